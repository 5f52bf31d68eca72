"""Collect the versions of everything that a GPU's results depend on. No names of hosts, no paths."""

from __future__ import annotations

import platform
import re
import shutil
import socket
import subprocess
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import PurePath
from typing import Any

import torch

from autoac.tape.capture.backlog import Backlog

_FRAMES = 6  # of a traceback, the innermost
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.@+~-]+){2,}[\\/]?")


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return versions, device and driver, by name. A fact that cannot be read is "unknown (ERROR)"."""
    properties = torch.cuda.get_device_properties(device)
    readers: dict[str, Callable[[], str]] = {
        "autoac": lambda: version("autoac"),
        "torch": lambda: torch.__version__,
        "Python": platform.python_version,
        "system": lambda: f"{platform.system()} {platform.machine()}",
        "device": lambda: torch.cuda.get_device_name(device),
        "devices": lambda: str(torch.cuda.device_count()),
        "compute capability": lambda: "{}.{}".format(*torch.cuda.get_device_capability(device)),
        "memory": lambda: f"{properties.total_memory / 2**30:.2f} GiB",
        "L2 cache": lambda: f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "multiprocessors": lambda: str(properties.multi_processor_count),
        "driver": _driver,
        "CUDA of torch": lambda: str(torch.version.cuda),
        "ROCm of torch": lambda: str(torch.version.hip),
        "cuDNN": lambda: str(torch.backends.cudnn.version()),
        "NCCL": _nccl,
        "allocator": torch.cuda.get_allocator_backend,
        "work can be queued ahead": lambda: str(Backlog(device).can_queue),
    }
    found = {}
    for name, read in readers.items():
        try:
            found[name] = redacted(read())
        except Exception as error:  # noqa: BLE001 - a fact that is missing must not hide the others
            found[name] = f"unknown ({type(error).__name__})"
    return found


def _nccl() -> str:
    version_of_nccl: Any = torch.cuda.nccl.version  # untyped
    return ".".join(map(str, version_of_nccl()))


def _driver() -> str:
    """Return the driver's version, from the vendor's tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (no nvidia-smi)"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return ", ".join(sorted(set(said.split())))


def error_in_words(error: BaseException) -> str:
    """Return type, message and innermost frames of `error`, without paths."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = " > ".join(f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    message = " ".join(str(error).split())[:600]
    return redacted(f"{type(error).__name__}: {message} (in {where})")


def redacted(text: str) -> str:
    """Return `text` without the name of this host, and with the last part of each path alone."""
    text = _PATH.sub(lambda match: PurePath(match[0]).name, text)
    for name in {socket.gethostname(), socket.gethostname().partition(".")[0]}:
        text = re.sub(rf"\b{re.escape(name)}\b", "<host>", text)
    return text
