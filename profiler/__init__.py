"""Observes one training step and writes down what a planner needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autoac.planner.profile import Environment, Profile
from autoac.profiler import hollow
from autoac.profiler.assemble import assemble
from autoac.profiler.errors import NothingToProfile, ProfilerBusy, ProfilerError
from autoac.profiler.hollow import Loss
from autoac.profiler.static import allocator_rounding, optimizer_bytes, static_bytes

__all__ = ["NothingToProfile", "ProfilerBusy", "ProfilerError", "observe", "profile"]


def profile(model: nn.Module, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Profile:
    """Profile one training step `loss(model(*args, **kwargs)).backward()` on the model's device.

    One hollow step (see hollow.py): no memory for saved activations is needed, and parameters,
    gradients, buffers and generators are afterwards as before. The model's own output is taken to be
    held until the end of backward, as in `out = model(batch); out.loss.backward()`.

    Args:
        model: in the mode (`train()`, `eval()`) and under the autocast that training will have.
        args, kwargs: a batch, as the training loop passes it.
        loss: output -> scalar. By default the output's `.loss`, else all of the output that
            requires a gradient.

    Raises:
        NothingToProfile: nothing requires a gradient.
        ProfilerBusy: torch.profiler is running on this thread.
    """
    return observe(model, args, kwargs, loss=loss)


def observe(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Profile:
    """As `profile`, with the state and workspace of `optimizer` counted."""
    device = device_of(model, args, kwargs)
    step = hollow.run(model, args, kwargs, loss, device)
    needs = optimizer_bytes(optimizer, device)
    return assemble(
        step,
        model=type(model).__name__,
        inputs=[describe(leaf) for leaf in tree_leaves((tuple(args), dict(kwargs)))],
        environment=_environment(model, device),
        static=static_bytes(model, args, kwargs, needs.state, device),
        optimizer_workspace_nbytes=needs.workspace,
        notes=[needs.note] if needs.note else [],
    )


def device_of(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> torch.device:
    """Where the model trains: the device of its first parameter, else of its first input."""
    for tensor in (*model.parameters(), *model.buffers(), *tree_leaves((tuple(args), dict(kwargs or {})))):
        if isinstance(tensor, Tensor):
            return tensor.device
    return torch.device("cpu")


def describe(leaf: Any) -> str:
    """A leaf of the batch as a profile names it: `int64[4, 128]`."""
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return type(leaf).__name__


def _environment(model: nn.Module, device: torch.device) -> Environment:
    parameter = next(iter(model.parameters()), None)
    autocast = torch.is_autocast_enabled(device.type)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Environment(
        torch=torch.__version__,
        device_type=device.type,
        device_name=name,
        dtype=str(parameter.dtype).removeprefix("torch.") if parameter is not None else "none",
        autocast=str(torch.get_autocast_dtype(device.type)).removeprefix("torch.") if autocast else "off",
        allocator_rounding=allocator_rounding(device),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
    )
