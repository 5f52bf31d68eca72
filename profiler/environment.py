"""Describe the environment of a profile: the device, the types, and the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoac.planner.formats.profile import ESTIMATED, Environment
from autoac.profiler.static_memory import allocator_rounding
from autoac.profiler.timing.cache import processor
from autoac.profiler.timing.roofline import Device
from autoac.tape.distributed.fsdp import layout_of
from autoac.tape.torch_facts.libraries import cudnn_of


def device_name(device: torch.device) -> str:
    """Return the name that a profile has for a device of this machine: its model's."""
    if device.type == "cpu":
        return processor()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_leaf(leaf: Any) -> str:
    """Return the name that a profile has for a leaf of the batch, such as `int64[4, 128]`."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            return "nested"
        return f"{_dtype_name(leaf.dtype)}{list(leaf.shape)}"
    return type(leaf).__name__


def environment_of_device(model: nn.Module, device: torch.device) -> Environment:
    """Return the environment of a step of `model` on a device of this machine."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    rounding, cudnn = allocator_rounding(device), cudnn_of(device)
    return _environment(model, device.type, device_name(device), rounding, threads, cudnn)


def environment_of_datasheet(model: nn.Module, device: Device) -> Environment:
    """Return the environment of a fake step of `model`."""
    name = device.name + ESTIMATED
    rounding = device.allocator_rounding
    environment = _environment(model, device.device_type, name, rounding, 0, device.cudnn)
    # A fake step is the same on every build of one torch: drop the "+cpu" of "2.13.0+cpu".
    torch_version = environment.torch.partition("+")[0]
    return environment.model_copy(update={"torch": torch_version})


def _environment(
    model: nn.Module, device_type: str, name: str, rounding: int, threads: int, cudnn: int
) -> Environment:
    parameter = next(iter(model.parameters()), None)
    autocast = torch.is_autocast_enabled(device_type)
    return Environment(
        torch=torch.__version__,
        device_type=device_type,
        device_name=name,
        dtype=_dtype_name(parameter.dtype) if parameter is not None else "none",
        autocast=_dtype_name(torch.get_autocast_dtype(device_type)) if autocast else "off",
        allocator_rounding=rounding,
        threads=threads,
        cudnn=cudnn,
        ranks=layout_of(model),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
