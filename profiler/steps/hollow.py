"""A hollow step: a training step that runs for real and keeps no saved activations.

Forward runs as it is. Autograd is handed descriptions in place of floating-point activations, and
backward gets ones of the right shape, so every kernel runs, in order, on meaningless numbers. The
step works on aliases of the parameters and copies of the buffers, so gradients, buffers and the hooks
of parameters (an optimizer in backward, DDP) are not touched. Other hooks of backward are not called.

A plain step (`keep=True`) is the same with everything kept: it needs the memory that training needs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from autoac.profiler.capture.allocations import AllocationRecord, Allocations, Block
from autoac.profiler.capture.op_recorder import ForwardRecord, Recorder
from autoac.profiler.capture.saved_tensor_recorder import SavedTensorRecorder
from autoac.profiler.distributed.ddp import without_ddp_sync
from autoac.profiler.distributed.fsdp import parameters_of, single_rank_fsdp, watch_sharding
from autoac.profiler.errors import CannotProfile, NothingToProfile
from autoac.profiler.restore.backward_hooks import backward_hooks
from autoac.profiler.restore.batch import Batch, Call
from autoac.profiler.restore.module_state import modules_restored, nothing_cached
from autoac.profiler.restore.written_tensors import Originals
from autoac.profiler.steps.training_loop import ONE_FORWARD, Loop, Loss, loss_of, outputs_held, roots_of
from autoac.profiler.timing.cache import Measured
from autoac.profiler.timing.op_timer import (
    BETWEEN,
    EXTRA_S,
    MOST_STEPS,
    Samples,
    forwards,
    host_clock,
    middle_and_spread,
    timed_forward,
)
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.gradients import free_gradient_when_accumulated, gradient_of
from autoac.profiler.torch_facts.inductor import watch_compiled
from autoac.profiler.torch_facts.module_paths import watch_modules
from autoac.profiler.torch_facts.module_pins import pins_of
from autoac.profiler.torch_facts.rng import generators_restored

Known = Callable[[Set[Hashable]], Mapping[Hashable, Measured]]


def _nothing_known(_signatures: Set[Hashable]) -> Mapping[Hashable, Measured]:
    return {}


@dataclass(frozen=True, slots=True)
class HollowStep:
    """What one hollow step left behind."""

    forward: ForwardRecord
    saved: SavedTensorRecorder
    allocations: Allocations
    measured: Mapping[Hashable, Measured]  # run times of ops, by signature; one may be BETWEEN ops
    times_ns: Sequence[int]  # for each mark, when it was
    backward_began: int  # mark
    backward_ended: int  # mark; outputs of the model are still held
    lasting: Sequence[Block] = ()  # came in this step, and will be there from the beginning of the next


def run(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Loss | None,
    device: torch.device,
    *,
    accumulates: bool | None = None,
    keep: bool = False,
    known: Known = _nothing_known,
    time_ops: bool = True,
    loop: Loop = ONE_FORWARD,
) -> HollowStep:
    """Run one hollow step, or with `keep` a plain one.

    Args:
        model, args, kwargs, loss: as for `autoac.profiler.profile`.
        device: where the model is.
        accumulates: as for `isolated_call`.
        keep: keep what autograd saves.
        known: signatures of ops -> run times of those that need not be measured.
        time_ops: False if the run times are of no interest: then no forward is run for them alone.
        loop: what the training loop does with the model's forwards and outputs.

    Raises:
        NothingToProfile: no output of the model depends on anything that requires a gradient.
        ProfilerBusy: torch.profiler is running on this thread.
        ShardsInUse, CannotProfile: as `single_rank_fsdp`.
        CannotProfile: the allocator reports nothing or not all, or torch.utils.checkpoint inside the model
            cannot run its part again.
    """
    if accumulates is None:
        accumulates = any(gradient_of(parameter) is not None for parameter in parameters_of(model))
    now_ns = host_clock(device)
    allocations = AllocationRecord(device)
    recorder = Recorder(allocations.mark)
    saved = SavedTensorRecorder(recorder, allocations.mark, keep=keep)
    with (
        generators_restored(device),
        modules_restored(model),
        without_ddp_sync(model),
        single_rank_fsdp(model, accumulates=accumulates) as shards,
        isolated_call(
            model, args, kwargs, accumulates=accumulates, placed=shards.managed(), before=shards.reset
        ) as (call, leaves),
    ):
        saved.may_be_made = shards.is_there
        try:
            began = now_ns()
            # Warms up, so that the first op is timed like the rest.
            with call.originals.finding() if not shards.aliases else nullcontext():  # FSDP writes in forward
                first = timed_forward(call, device)
            leaves += shards.leaves()
            cold_ns = now_ns() - began
            if chooses_at_first(device):
                warm_up(model, call, leaves, loss, device, loop)
                for leaf in (*leaves, *shards.aliases):
                    leaf.grad = None
                began = now_ns() - cold_ns
            forget_workspaces(device)
            with allocations:
                with torch.enable_grad():
                    backward_began, backward_ended = take_step(
                        model, call, leaves, loss, recorder, saved, allocations.mark, device, loop
                    )
                saved.closed = True
                ended = allocations.mark()
                given_back = forget_workspaces(device)
                forgotten = allocations.mark()
            if not allocations.changes and any(made.address for made in recorder.record.storages):
                raise CannotProfile(
                    type(model).__name__,
                    f"the allocator of {device} reports nothing to torch.profiler, so no size is known",
                    "let torch use its own (on CUDA the backend `native`, no pluggable one)",
                )
            allocations.check_complete(type(model).__name__)
            for leaf in (*leaves, *shards.aliases):
                leaf.grad = None  # a further forward beside them would hold more than any step
            shards.mark(recorder.record, saved.out_of_reach)
            for state in recorder.generators.values():
                state.restore()
            ops = recorder.record.ops
            signatures: list[Hashable] = [op.signature for op in ops]
            kinds = {*signatures, *first.keys() & {BETWEEN}}
            at = allocations.times_ns
            measured = known(kinds)
            wanted = kinds - measured.keys()
            # Ranks must run forward equally often, and clocks would decide.
            silent = not any(op.facts.collective for op in ops)
            if wanted:
                more: Samples = {}
                in_step = [(at[op.ended] - at[op.began]) / 1e3 for op in ops]
                if time_ops and silent:
                    forward_ns = min(cold_ns, at[backward_began] - at[0])  # one was cold, one recorded
                    step_ns = forward_ns + at[backward_ended] - at[backward_began]
                    left_s = (MOST_STEPS * step_ns - (now_ns() - began)) / 1e9
                    took = dict.fromkeys(wanted, 0.0)
                    for signature, us in zip(signatures, in_step, strict=True):
                        if signature in took:
                            took[signature] += us
                    more = forwards(call, device, took, forward_ns / 1e9, max(EXTRA_S, left_s))
                more.setdefault(BETWEEN, first.get(BETWEEN, []))
                measured = {**middle_and_spread(in_step, signatures, more), **measured}
        finally:
            saved.closed = True
            torch.clear_autocast_cache()
            for state in recorder.generators.values():
                state.restore()
    return HollowStep(
        recorder.record,
        saved,
        allocations,
        measured,
        allocations.times_ns,
        backward_began,
        backward_ended,
        allocations.freed_between(ended, forgotten) if given_back else (),
    )


def chooses_at_first(device: torch.device) -> bool:
    """Whether an op's first backward there is unlike all others, in time and in memory.

    On a GPU kernels are loaded and handles made when they are first needed, and cuDNN, told to, tries its
    ways to convolve (`torch.backends.cudnn.benchmark`), with the memory of the most demanding one. What it
    finds it remembers for each thread, so no forward does that for backward.
    """
    return device.type != "cpu"


def warm_up(
    model: nn.Module,
    call: Call,
    leaves: Sequence[Tensor],
    loss: Loss | None,
    device: torch.device,
    loop: Loop = ONE_FORWARD,
) -> None:
    """Take a hollow step of which nothing is written down. Leaves gradients."""
    recorder = Recorder(_unmarked)
    saved = SavedTensorRecorder(recorder, _unmarked)
    try:
        with torch.enable_grad():
            take_step(model, call, leaves, loss, recorder, saved, _unmarked, device, loop)
    finally:
        saved.closed = True
        for state in recorder.generators.values():
            state.restore()


def _unmarked() -> int:
    return 0


def forget_workspaces(device: torch.device) -> bool:
    """Give back what cuBLAS keeps between calls, for the record to see it come and go; whether there is such.

    It lasts from step to step. torch takes it from the allocator that everything comes from, once for each
    stream and thread, and there are versions of torch in which a thread can give back its own alone.
    """
    if device.type != "cuda":
        return False
    private.clear_cublas_workspaces()
    in_backward(private.clear_cublas_workspaces, device)
    return True


def in_backward(call: Callable[[], None], device: torch.device) -> None:
    """Call it on the thread on which backward of ops on `device` runs: not this one, where that is a GPU."""
    with torch.enable_grad():
        out = torch.zeros((), device=device, requires_grad=True).clone()
    out.register_hook(lambda _gradient: call())
    out.backward()


def take_step(
    model: nn.Module,
    call: Call,
    leaves: Sequence[Tensor],
    loss: Loss | None,
    recorder: Recorder,
    saved: SavedTensorRecorder,
    mark: Callable[[], int],
    device: torch.device,
    loop: Loop = ONE_FORWARD,
) -> tuple[int, int]:
    """Forward under the recorder and backward after it; returns the marks around backward."""
    path = [recorder.module]
    recorder.originals = call.originals
    recorder.pins = pins_of(model)

    def enter(name: str) -> None:
        path.append(name)
        recorder.module = name

    def leave(_name: str) -> None:
        path.pop()
        recorder.module = path[-1]

    watch_compiled()
    watch_sharding()
    handles = watch_modules(model, enter, leave)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack), recorder:
            outs: list[Any] = []
            roots: list[Tensor] = []
            for _ in range(loop.forwards):
                out = call()
                recorder.end_forward()
                if loss is None:
                    roots += roots_of(out)
                outs.append(outputs_held(out, loop) if loss is None else out)
                del out
            if loss is not None:
                recorder.begin_loss()
                roots = [loss_of(loss, outs if loop.forwards > 1 else outs[0])]
                outs = [outputs_held(out, loop) for out in outs]
        saved.forward_over = True
    finally:
        for handle in handles:
            handle.remove()
    roots = [root for root in roots if root.requires_grad]
    if not roots:
        if not any(leaf.requires_grad for leaf in leaves):
            raise NothingToProfile(
                "no parameter and no input of the model requires a gradient; call requires_grad_() on what "
                "is to train"
            )
        raise NothingToProfile(
            "no output of the model depends on a parameter or input that requires a gradient; "
            "pass loss=... if the model's output is not where backward starts"
        )
    # What autocast cached belongs to the caller's context, which a real backward is outside of.
    torch.clear_autocast_cache()
    began = mark()
    with torch.autocast(device.type, enabled=False), call.hooks.silenced():
        gradients = [torch.ones_like(root) for root in roots]
        try:
            torch.autograd.backward(
                roots, gradients, loop.retains, inputs=[t for t in leaves if t.requires_grad]
            )
        except RuntimeError as error:
            if why := _checkpoint_refused(error):
                raise CannotProfile(type(model).__name__, *why) from error
            error.add_note(
                "autoac: this came from the backward of a profiled step, which runs on made-up numbers"
            )
            raise
    del gradients, roots
    if loop.retains:
        outs.clear()  # their graph holds all that forward saved, until here
    ended = mark()
    del outs
    return began, ended


def _checkpoint_refused(error: RuntimeError) -> tuple[str, str] | None:
    """Why a part under torch's checkpoint could not run again, and what to do instead; None: it did."""
    if isinstance(error, CheckpointError):
        return (
            "torch.utils.checkpoint in it ran a part again on made-up numbers, on which that part decided "
            "otherwise",
            "leave that checkpoint out: the plan recomputes what it must",
        )
    if "use_reentrant=True" in str(error):
        return (
            "torch.utils.checkpoint(use_reentrant=True) in it runs a backward of its own, which would give "
            "gradients to more than the profiled step",
            "pass use_reentrant=False, or leave that checkpoint out: the plan recomputes what it must",
        )
    return None


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@contextmanager
def isolated_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of_parameter: Callable[[Tensor], Tensor] = Tensor.detach,
    of_buffer: Callable[[Tensor], Tensor] = _cloned,
    of_input: Callable[[Tensor], Tensor] = Tensor.detach,
    *,
    accumulates: bool,
    placed: Set[Tensor] = frozenset(),
    before: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Call, list[Tensor]]]:
    """A call of the model on aliases: nothing that it does reaches the model's own tensors.

    Until the end the aliases are in the model in place of its own. Yields the call and the leaves that it
    may give gradients to. Without gradients of their own, what `of_parameter`, `of_buffer` and `of_input`
    return stands in for the tensors of the model and the batch.

    Args:
        model, args, kwargs: as for `run`.
        of_parameter, of_buffer, of_input: from a tensor of the model or batch to what stands in for it.
        accumulates: gradients go into ones that are there already.
        placed: parameters that are no part of this: somebody else puts an alias in place.
        before: to be called before each call of the model.
    """
    leaves: list[Tensor] = []
    tensors: dict[str, Tensor] = {}
    originals = Originals()
    for name, parameter in model.named_parameters():
        if parameter in placed:
            continue
        tensors[name] = nn.Parameter(of_parameter(parameter), requires_grad=parameter.requires_grad)
        originals.share(parameter, tensors[name])
        if parameter.requires_grad:
            leaves.append(tensors[name])
    for name, buffer in model.named_buffers():
        tensors[name] = of_buffer(buffer)
        originals.share(buffer, tensors[name])
    batch = Batch(args, kwargs, of_input, originals)
    leaves += batch.leaves
    if accumulates:
        # A gradient that is there already takes the new one in and frees it.
        for leaf in leaves:
            free_gradient_when_accumulated(leaf)

    # As torch.func.functional_call does it, but for backward too: what runs a part of forward again then
    # (torch.utils.checkpoint), and hooks, find the aliases.
    with (
        private.reparametrize_module(model, tensors, tie_weights=True),
        nothing_cached(),
        backward_hooks(model) as hooks,
    ):
        try:
            yield Call(model, batch, originals, before, hooks), leaves
        finally:
            batch.let_go()
            originals.restore()
