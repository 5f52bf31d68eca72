"""Find the device that a model trains on, and refuse a model on several devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoac.tape.errors import CannotProfile
from autoac.tape.torch_facts.batch_contents import batch_tensors


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


def device_of_step(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Return the device on which a step of `model` runs for real.

    Raises:
        CannotProfile: no such step runs, as on the meta device.
    """
    check_no_lazy_layers(model)
    check_one_device(model, args, kwargs)
    device = device_of(model, args, kwargs)
    if device.type == "meta":
        raise CannotProfile(
            type(model).__name__,
            "it is on the meta device, where no op runs",
            "move it to the device that it trains on (to_empty), or plan it without one: "
            "autoac.profiler.profile(model, ..., on=DATASHEETS[...])",
        )
    return device


def check_no_lazy_layers(model: nn.Module) -> None:
    """Refuse a model whose tensors do not all exist.

    Raises:
        CannotProfile: names one that its first forward creates.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CannotProfile(
                type(model).__name__,
                f"{name} is created in the first forward (a lazy layer)",
                "run one batch through the model first, under torch.no_grad() and before ac_client.apply",
            )


def _tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers and tensors of the batch, each with its name in an error."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for tensor in batch_tensors((*args, *(kwargs or {}).values())):
        yield "the batch", tensor
