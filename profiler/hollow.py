"""A hollow step: a training step that runs for real and keeps no saved activations.

Forward runs as it is. Autograd is handed descriptions in place of floating-point activations, and
backward gets ones of the right shape, so every kernel runs, in order, on meaningless numbers. The
step works on aliases of the parameters and copies of the buffers, so gradients, buffers and the hooks
of parameters (an optimizer in backward, DDP) are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from autoac.profiler.allocations import AllocationRecord
from autoac.profiler.errors import NothingToProfile
from autoac.profiler.modules import watch_modules
from autoac.profiler.pins import pins_of
from autoac.profiler.randomness import generators_restored
from autoac.profiler.record import ForwardRecord, Recorder, SavedTensorsRecord
from autoac.profiler.timing import DeviceClock

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class HollowStep:
    """What one hollow step left behind."""

    forward: ForwardRecord
    saved: SavedTensorsRecord
    allocations: AllocationRecord
    op_runtimes_us: list[float]
    backward_began: int  # mark
    backward_ended: int  # mark; outputs of the model are still held


def run(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss | None, device: torch.device
) -> HollowStep:
    """Run one hollow step.

    Raises:
        NothingToProfile: no output of the model depends on anything that requires a gradient.
        ProfilerBusy: torch.profiler is running on this thread.
    """
    allocations = AllocationRecord(device)
    clock = DeviceClock(device)
    recorder = Recorder(allocations.mark, clock.stamp)
    saved = SavedTensorsRecord(recorder, allocations.mark)
    with generators_restored(device), _isolated(model, args, kwargs) as (call, leaves):
        with torch.no_grad():
            call()  # warms up kernels and their libraries, so that the first op is timed like the rest
        torch.clear_autocast_cache()
        try:
            with allocations:
                with torch.enable_grad():
                    backward_began, backward_ended = _step(
                        model, call, leaves, loss, recorder, saved, allocations.mark, device
                    )
                saved.closed = True
        finally:
            saved.closed = True
            for state in recorder.generators.values():
                state.restore()
    spans = [(op.began, op.ended) for op in recorder.record.ops]
    return HollowStep(
        recorder.record,
        saved,
        allocations,
        clock.runtimes_us(allocations.times_ns, spans),
        backward_began,
        backward_ended,
    )


def _step(
    model: nn.Module,
    call: Callable[[], Any],
    leaves: Sequence[Tensor],
    loss: Loss | None,
    recorder: Recorder,
    saved: SavedTensorsRecord,
    mark: Callable[[], int],
    device: torch.device,
) -> tuple[int, int]:
    path = [recorder.module]
    recorder.pins = pins_of(model)

    def enter(name: str) -> None:
        path.append(name)
        recorder.module = name

    def leave(_name: str) -> None:
        path.pop()
        recorder.module = path[-1]

    handles = watch_modules(model, enter, leave)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack), recorder:
            out = call()
            roots = [loss(out)] if loss is not None else _roots(out)
    finally:
        for handle in handles:
            handle.remove()
    roots = [root for root in roots if root.requires_grad]
    if not roots:
        raise NothingToProfile(
            "no output of the model depends on a parameter or input that requires a gradient; "
            "pass loss=... if the model's output is not where backward starts"
        )
    # What autocast cached belongs to the caller's context, which a real backward is outside of.
    torch.clear_autocast_cache()
    began = mark()
    with torch.autocast(device.type, enabled=False):
        gradients = [torch.ones_like(root) for root in roots]
        torch.autograd.backward(roots, gradients, inputs=[t for t in leaves if t.requires_grad])
    del gradients, roots
    ended = mark()
    del out
    return began, ended


def _roots(out: Any) -> list[Tensor]:
    """Where backward starts: `.loss` or `["loss"]` of the output if there is one, else all of it."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    found = tree_leaves(list(out.values()) if isinstance(out, Mapping) else out)
    return [t for t in found if isinstance(t, Tensor) and t.requires_grad]


@contextmanager
def _isolated(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Callable[[], Any], list[Tensor]]]:
    """A call of the model on aliases: nothing that it does reaches the model's own tensors."""
    leaves: list[Tensor] = []
    accumulate = False

    def alias(tensor: Tensor) -> Tensor:
        copy = tensor.detach()
        if tensor._is_view():
            copy = copy.view_as(copy)  # autocast keeps what it made of a leaf, but not of a view
        if tensor.requires_grad:
            copy.requires_grad_()
            leaves.append(copy)
        return copy

    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[name] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            leaves.append(tensors[name])
        accumulate = accumulate or parameter.grad is not None
    for name, buffer in model.named_buffers():
        tensors[name] = buffer.detach().clone()
    own_args, own_kwargs = tree_map_only(Tensor, alias, (tuple(args), dict(kwargs)))
    if accumulate:
        # A gradient that is there already takes the new one in and frees it.
        for leaf in leaves:
            leaf.register_post_accumulate_grad_hook(_drop_gradient)

    def call() -> Any:
        return torch.func.functional_call(model, tensors, own_args, own_kwargs)

    yield call, leaves


def _drop_gradient(tensor: Tensor) -> None:
    tensor.grad = None
