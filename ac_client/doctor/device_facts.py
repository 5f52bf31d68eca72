"""Collect the versions of everything that a GPU's results depend on. No names of hosts, no paths."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from ac_client.doctor.gpu_report import redacted
from autoac.profiler import DATASHEETS, Device
from autoac.tape.capture.backlog import Backlog

_BY_CAPABILITY = {(8, 0): "a100", (8, 9): "rtx4090"}


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


def datasheet_like(device: torch.device) -> Device:
    """Return a datasheet with the architecture and cuDNN of `device`, and the rates of the most similar one.

    Architecture and cuDNN decide which kernels run. The rates only serve to compare run times.
    """
    name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    named = next((key for key in DATASHEETS if key in name), None)  # "nvidiageforcertx4090"
    if torch.version.hip is not None:
        return DATASHEETS["mi300x"]
    capability = torch.cuda.get_device_capability(device)
    like = DATASHEETS[named or _BY_CAPABILITY.get(capability, "h100")]
    return replace(like, capability=capability, cudnn=torch.backends.cudnn.version() or 0)
