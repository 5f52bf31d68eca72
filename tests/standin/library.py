"""Build the stand-in's library, once for each version of its source and of torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

NAME = "standin_cuda"
HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.cpp"))
HEADERS = sorted(HERE.glob("*.h"))
FLAGS = ["-O1", "-w"]
BUILD_S = 600


class CannotBuild(Exception):
    """A tool that the build needs is not installed."""


def library() -> Path:
    """Return the path of the library, built if need be. Processes that need it at once wait for one build.

    Raises:
        CannotBuild: no C++ compiler or no ninja, or torch is built for a GPU.
    """
    if _torch_has_a_gpu():
        raise CannotBuild("the stand-in takes the place of CUDA, which this build of torch has")
    version = importlib.metadata.version("torch")
    sources = b"".join(source.read_bytes() for source in (*SOURCES, *HEADERS))
    key = hashlib.sha256(f"{version} {sys.version} {FLAGS}".encode() + sources).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoac" / "standin"
    folder = cache / f"torch-{version}-{key}"
    built = folder / f"{NAME}.so"
    if built.exists():
        return built
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for needed in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(needed, path=path) is None:
            raise CannotBuild(f"the stand-in device is compiled, and {needed} is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not built.exists():
            _build(folder, built, {**os.environ, "PATH": path})
    return built


def _torch_has_a_gpu() -> bool:
    """Return True if torch is built for one. It must not be imported before the library is loaded."""
    spec = importlib.util.find_spec("torch")
    assert spec.origin is not None
    versions = (Path(spec.origin).parent / "version.py").read_text()
    return re.search(r"^(cuda|hip)\b.*= '", versions, re.MULTILINE) is not None


def _build(folder: Path, built: Path, environment: dict[str, str]) -> None:
    scratch = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    command = [sys.executable, str(Path(__file__)), str(scratch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        raise RuntimeError(f"the stand-in device does not compile:\n{done.stdout}\n{done.stderr}")
    folder.mkdir(exist_ok=True)
    (scratch / built.name).replace(built)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    from torch.utils.cpp_extension import load

    load(NAME, [*map(str, SOURCES)], extra_cflags=FLAGS, build_directory=sys.argv[1], verbose=True)
