"""Where a model and its batch lie. A profile is of one device."""

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

    It is the first other than the CPU that a parameter, a buffer or the batch is on: a model on a GPU may
    take and keep some tensors on the CPU.
    """
    for _, tensor in _tensors(model, args, kwargs):
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cpu")


def check_one_device(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Refuse a model that lies on several devices, or partly on the CPU.

    A budget, an allocator and its counter are of one device. On the CPU a model of a GPU may have what costs
    that device nothing and has no backward of its own there: buffers and tensors of the batch, such as
    indices, lengths, or a batch that forward moves itself, and single numbers.

    Raises:
        CannotProfile: names a tensor on each of the devices.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in _tensors(model, args, kwargs):
        stays = tensor.device.type == "cpu" and not (isinstance(tensor, nn.Parameter) and tensor.dim())
        if not stays and tensor.device.type != "meta":
            found.setdefault(tensor.device, name)
    if len(found) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise CannotProfile(
            type(model).__name__,
            f"it lies on several devices ({where}), and a budget is that of one",
            "move model and batch to one device, or plan the part on each device as a stage of a pipeline "
            "(docs/pipelines.md)",
        )


def _tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and tensors of the batch, with what an error calls them."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for tensor in batch_tensors((*args, *(kwargs or {}).values())):
        yield "the batch", tensor
