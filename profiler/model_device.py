"""Find the device that a model trains on, and refuse a model on several devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoac.profiler.errors import CannotProfile
from autoac.profiler.torch_facts.batch_contents import batch_tensors


def device_of(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> torch.device:
    """Return the device that the model trains on.

    That is the first device other than the CPU of a parameter, a buffer or the batch: a model on a GPU may
    keep some tensors on the CPU.
    """
    for _, tensor in _tensors(model, args, kwargs):
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cpu")


def check_one_device(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Refuse a model on several devices, or with parameters both on a GPU and on the CPU.

    A budget, an allocator and its counter belong to one device. A model on a GPU may have buffers, tensors
    of the batch (indices, lengths, a batch that forward moves itself) and single numbers on the CPU, which
    cost the GPU nothing.

    Raises:
        CannotProfile: names a tensor on each device.
    """
    devices: dict[torch.device, str] = {}
    for name, tensor in _tensors(model, args, kwargs):
        stays = tensor.device.type == "cpu" and not (isinstance(tensor, nn.Parameter) and tensor.dim())
        if not stays and tensor.device.type != "meta":
            devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise CannotProfile(
            type(model).__name__,
            f"it is on several devices ({where}), and a budget is for one",
            "move model and batch to one device, or plan the part on each device as a stage of a pipeline "
            "(docs/pipelines.md)",
        )


def _tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers and tensors of the batch, each with its name in an error."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for tensor in batch_tensors((*args, *(kwargs or {}).values())):
        yield "the batch", tensor
