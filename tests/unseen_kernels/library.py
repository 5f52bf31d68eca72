"""Compile kernels.cpp once for all processes, and call its kernels on pointers.

    launch("scale", x.dtype, y, x, x.numel(), 2.0)

PyTorch sees nothing of such a call: no op, no new version of `y`. So the calls stand for Triton's and
pybind's kernels on a CPU, and on the stand-in device of the tests, whose memory is the host's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC")
CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


class NoCompiler(Exception):
    """No C++ compiler is installed."""


def compiled() -> Path:
    """Return the path of the compiled kernels.

    Raises:
        NoCompiler: neither the compiler that CXX names nor `c++` is installed.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise NoCompiler(f"the kernels are compiled, and {compiler} is not installed")
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join((compiler, *FLAGS)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoac"
    built = cache / f"unseen-kernels-{key}.so"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{built}.lock"):
        if not built.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                whole = Path(scratch) / built.name
                subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(whole)], check=True, timeout=300)
                whole.replace(built)
    return built


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled()))


def launch(kernel: str, dtype: torch.dtype, *arguments: Tensor | int | float) -> None:
    """Call a kernel on the pointers of tensors, and on numbers."""
    getattr(_library(), kernel)(ctypes.c_int64(CODES[dtype]), *map(_plain, arguments))


def seed_noise(seed: int) -> None:
    """Seed the generator that only the kernel `noise` knows."""
    _library().seed_noise(ctypes.c_int64(seed))


def _plain(argument: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_double:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_double(argument)
