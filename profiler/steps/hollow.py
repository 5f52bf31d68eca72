"""Run a hollow step: a real training step that holds no saved activations.

Theory of operation:

1. Every op of forward and every node of backward runs for real, in order, so kernels take the time and the
   memory that they take in training.
2. Autograd is handed descriptions in place of floating-point activations, so an activation is freed as soon
   as forward itself drops it. Backward gets ones of the same description: right sizes, meaningless numbers
   (NOTE [ What replaces a saved tensor ] in saved_tensor_recorder.py).
3. A mark is placed around each op and each unpack, and at each drop. The allocator's record lists these marks
   among the allocations and frees, so every byte belongs to an op or a node without a clock.
4. The step works on aliases of the parameters and on copies of the buffers, and everything else that a
   forward may change is restored (isolated_call.py, module_state.py, rng.py). Gradients and the hooks of
   parameters (an optimizer in backward, DDP) are not touched. Of the user's other backward hooks,
   only those that differentiate are called (backward_hooks.py).
5. One step has three phases. *Prepare* runs one forward that warms up, and on a GPU a whole step, since first
   backwards are unlike all others. *Trace* runs the recorded step. *Time* runs further forwards, without
   records, for kinds of op whose run time is not known well.

For `h = x @ w; y = relu(h); loss = y.sum()` with 32 bytes for each of h and y, the record of the trace is:

    mark  event                          allocator         autograd holds
    0-1   aten.mm: h                     +32 h             x and w: external, kept as they are
    2-3   aten.relu: y                   +32 y             "y: float32 [4, 2]", and not y
          forward drops h                -32 h
    4-5   aten.sum: loss                 +4 loss
          forward drops y                -32 y             in training y would stay until mark 9
    6     backward begins                +4 ones for loss
    7-8   ReluBackward0 unpacks y        +32 stand-in      the stand-in is not counted: no real step has it
          the node runs                  +32 gradient, -32 stand-in
    9     autograd drops y
          MmBackward0 runs               +24 gradient of w, -32 gradient of h
    10    backward ends

From this record, to_profile.py derives that y is saved by op 1, needed by ReluBackward0 and dropped after it.
The planner then decides if y is saved or recomputed.

What must stay true: the user's objects are afterwards as before; every forward starts from the same state.
This file knows neither the columns of a Profile nor anything of the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from autoac.planner.formats.profile import CROSSES
from autoac.profiler.capture.allocations import AllocatedBlock, AllocationRecord, Allocations
from autoac.profiler.capture.op_recorder import ForwardRecord, OpRecorder, RecordedStorage
from autoac.profiler.capture.saved_tensor_recorder import SavedTensorRecorder
from autoac.profiler.checkpoints.own_checkpoints import NEEDED, checkpoints_left_alone
from autoac.profiler.compiler.second_stage import carried_by
from autoac.profiler.distributed.ddp import without_ddp_sync
from autoac.profiler.distributed.fsdp import Shards, parameters_of, single_rank_fsdp, watch_sharding
from autoac.profiler.errors import CannotProfile
from autoac.profiler.joint_graph.interpreted_part import HollowParts
from autoac.profiler.restore.isolated_call import Call, isolated_call
from autoac.profiler.restore.module_state import modules_restored
from autoac.profiler.steps.training_loop import Loop, Loss, TrainingStep, check_roots, loss_of
from autoac.profiler.timing.backlog import Backlog
from autoac.profiler.timing.cache import OpTime
from autoac.profiler.timing.op_timer import (
    BETWEEN_OPS,
    EXTRA_S,
    MOST_STEPS,
    Samples,
    clock_of,
    host_clock,
    median_and_spread,
    sample_forwards,
    timed_forward,
)
from autoac.profiler.torch_facts.gradients import gradient_of, leaves_of, roots_of
from autoac.profiler.torch_facts.inductor import (
    is_called_compiled,
    runs_compiled,
    uncompiled,
    watch_compiled,
)
from autoac.profiler.torch_facts.libraries import free_workspaces, is_first_backward_special
from autoac.profiler.torch_facts.module_paths import watch_modules
from autoac.profiler.torch_facts.module_pins import pins_of
from autoac.profiler.torch_facts.op_facts import OpFacts
from autoac.profiler.torch_facts.rng import generators_restored
from autoac.profiler.unseen.contents import Contents
from autoac.profiler.unseen.fingerprints import Comparison
from autoac.profiler.unseen.function_calls import watch_functions

FREED = "its FSDP unit is freed when backward asks for it"

KnownTimes = Callable[[Set[Hashable]], Mapping[Hashable, OpTime]]
"""Return the run times that need not be measured, among those of the given signatures."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A training step that is ready to run."""

    model: nn.Module
    call: Call
    leaves: list[Tensor]  # that backward may give gradients to
    loss: Loss | None
    device: torch.device
    loop: Loop
    backlog: Backlog | None = None  # of the device; None: nothing is timed


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The records of one profiled step.

    Invariant: every mark in `forward` and `saved` is an index into `times_ns` and `allocations.positions`.
    """

    forward: ForwardRecord
    saved: SavedTensorRecorder
    allocations: Allocations
    times_ns: Sequence[int]  # of each mark
    backward_begin: int  # mark
    graph_end: int  # mark: backward is over, and the graph ends
    backward_end: int  # mark
    workspaces: Sequence[AllocatedBlock] = ()  # allocated in this step, and there in the whole of the next
    op_times: Mapping[Hashable, OpTime] = field(default_factory=dict)  # by signature, or BETWEEN_OPS
    timing_note: str = ""  # on times that may include time of the host
    unplanned: Sequence[str] = ()  # messages on what decides itself what autograd holds
    temporary: Sequence[RecordedStorage] = ()  # held longer than until the mark, in this step alone
    hidden: Sequence[tuple[int, int]] = ()  # pairs of marks: what is allocated in between counts as nothing


@dataclass(frozen=True, slots=True)
class _WarmUp:
    """Times of the preparation of a step."""

    samples: Samples  # run times of ops in its forward
    forward_ns: int
    begin_ns: int  # when the time that a profile may take began


def run(
    subject: TrainingStep,
    device: torch.device,
    *,
    known: KnownTimes,
) -> StepRecord:
    """Run one hollow step.

    Args:
        subject: the step.
        device: the device of the model.
        known: returns run times that need not be measured.

    Raises:
        NothingToProfile: no output of the model depends on anything that requires a gradient.
        ProfilerBusy: torch.profiler is running on this thread.
        ShardsInUse, CannotProfile: as for `single_rank_fsdp`.
        CannotProfile: the allocator reports nothing or not everything, or torch.utils.checkpoint inside the
            model cannot run its part again.
    """
    compiled, accumulates = subject.compiled, subject.accumulates
    model = uncompiled(compiled)
    if accumulates is None:
        accumulates = any(gradient_of(parameter) is not None for parameter in parameters_of(model))
    backlog = Backlog(device)
    allocations = AllocationRecord(device, clock_of(device, backlog))
    recorder = OpRecorder(allocations.mark)
    saved = SavedTensorRecorder(recorder, allocations.mark)
    with (
        generators_restored(device),
        modules_restored(model),
        without_ddp_sync(model),
        single_rank_fsdp(model, accumulates=accumulates) as shards,
        isolated_call(
            model,
            subject.args,
            subject.kwargs,
            accumulates=accumulates,
            entry=compiled,
            excluded=shards.managed(),
            before=shards.reset,
        ) as (call, leaves),
        carried_by(HollowParts()) if runs_compiled(compiled) else nullcontext(),
    ):
        step = PreparedStep(model, call, leaves, subject.loss, device, subject.loop, backlog)
        saved.can_run = shards.is_gathered
        try:
            warm_up = _prepare(step, shards)
            unseen = _find_unseen_writes(step)
            traced = _trace(step, shards, recorder, saved, allocations)
            _save_unseen(traced.forward, unseen)
            op_times = _time(step, traced, warm_up, known)
            traced = replace(
                traced, op_times=op_times, timing_note=backlog.note(), unplanned=tuple(call.unplanned)
            )
        finally:
            saved.closed = True
            torch.clear_autocast_cache()
            recorder.generators.restore()
    if NEEDED not in traced.unplanned:
        return traced
    with checkpoints_left_alone(needed=True):
        again = run(subject, device, known=known)
    return replace(again, unplanned=(NEEDED, *again.unplanned))


def _prepare(step: PreparedStep, shards: Shards) -> _WarmUp:
    """Run one forward to warm up, and a whole step on devices whose first backward is special."""
    now_ns = host_clock(step.device)
    begin = now_ns()
    with step.call.originals.searching() if not shards.aliases else nullcontext():  # FSDP writes in forward
        samples = timed_forward(step.call, step.device, step.backlog)
    step.leaves.extend(shards.leaves())
    forward_ns = now_ns() - begin
    if is_first_backward_special(step.device):
        _run_unrecorded(step)
        _clear_gradients(step, shards)
        begin = now_ns() - forward_ns
    return _WarmUp(samples, forward_ns, begin)


def _find_unseen_writes(step: PreparedStep) -> list[tuple[int, OpFacts, str]]:
    """Run a forward that compares contents; return the ops to be saved by position, each with the reason."""
    if not Comparison.enabled or is_called_compiled(step.call.entry):
        return []
    recorder = OpRecorder(lambda: 0)
    recorder.contents = Contents()
    saved = SavedTensorRecorder(recorder, lambda: 0)
    try:
        with torch.enable_grad():
            held = _forward(step, recorder, saved)
            record = recorder.record
            found = recorder.contents.unseen_writes([version.op for version in record.versions])
            del held
    finally:
        saved.closed = True
        recorder.contents = None
        torch.clear_autocast_cache()
        recorder.generators.restore()
    return [(op, record.ops[op].facts, reason) for op, reason in found.items()]


def _save_unseen(record: ForwardRecord, unseen: Sequence[tuple[int, OpFacts, str]]) -> None:
    """Mark the ops of `unseen` as saved. If another op is at the position now, mark all calls of the op."""
    for position, facts, reason in unseen:
        if position < len(record.ops) and record.ops[position].facts is facts:
            record.ops[position].force_save(reason)
        else:
            for op in record.ops:
                if op.facts is facts:
                    op.force_save(reason)


def _run_unrecorded(step: PreparedStep) -> None:
    """Run a hollow step without a record. Leaves gradients."""
    recorder = OpRecorder(lambda: 0)
    saved = SavedTensorRecorder(recorder, lambda: 0)
    try:
        with torch.enable_grad():
            take_step(step, recorder, saved, lambda: 0)
    finally:
        saved.closed = True
        recorder.generators.restore()


def _clear_gradients(step: PreparedStep, shards: Shards) -> None:
    for leaf in (*step.leaves, *shards.aliases):
        leaf.grad = None


def _trace(
    step: PreparedStep,
    shards: Shards,
    recorder: OpRecorder,
    saved: SavedTensorRecorder,
    allocations: AllocationRecord,
) -> StepRecord:
    """Run the recorded step. Every workspace of cuBLAS is allocated in it."""
    free_workspaces(step.device)
    with allocations:
        with torch.enable_grad():
            backward = take_step(step, recorder, saved, allocations.mark)
        saved.closed = True
        end = allocations.mark()
        freed = free_workspaces(step.device)
        after_free = allocations.mark()
    allocations.check_complete(type(step.model).__name__, recorder.record.storages)
    _clear_gradients(step, shards)  # with them, a further forward would hold more than any step
    force_saves_of_units(recorder.record, shards, saved.out_of_reach)
    recorder.generators.restore()
    workspaces = allocations.freed_between(end, after_free) if freed else ()
    return StepRecord(recorder.record, saved, allocations, allocations.times_ns, *backward, workspaces)


def force_saves_of_units(record: ForwardRecord, shards: Shards, out_of_reach: Set[int]) -> None:
    """Mark as saved the ops that cannot run again under FSDP: NOTE [ Units ] in distributed/fsdp.py."""
    units = [shards.unit_of(op.module) for op in record.ops]
    for reader, op in enumerate(record.ops):
        for version in op.reads:
            writer = record.versions[version].op
            if units[writer] is not units[reader]:
                record.ops[writer].force_save(CROSSES)
    for writer in out_of_reach:
        record.ops[writer].force_save(FREED)


def _time(
    step: PreparedStep, traced: StepRecord, warm_up: _WarmUp, known: KnownTimes
) -> Mapping[Hashable, OpTime]:
    """Return the run time of each kind of op: from `known`, from the trace, or from further forwards."""
    ops, at = traced.forward.ops, traced.times_ns
    signatures: list[Hashable] = [op.signature for op in ops]
    kinds = {*signatures, *warm_up.samples.keys() & {BETWEEN_OPS}}
    times = known(kinds)
    unknown = kinds - times.keys()
    if not unknown:
        return times
    in_trace_us = [(at[op.end_mark] - at[op.begin_mark]) / 1e3 for op in ops]
    samples: Samples = {}
    # Clocks differ between ranks, so with collectives they must not decide how often forward runs.
    if not any(op.facts.collective for op in ops):
        # The warm-up was cold, the trace was recorded: the shorter one is closer to a forward.
        forward_ns = min(warm_up.forward_ns, at[traced.backward_begin] - at[0])
        step_ns = forward_ns + at[traced.backward_end] - at[traced.backward_begin]
        left_ns = MOST_STEPS * step_ns - (host_clock(step.device)() - warm_up.begin_ns)
        total_us = dict.fromkeys(unknown, 0.0)
        for signature, us in zip(signatures, in_trace_us, strict=True):
            if signature in total_us:
                total_us[signature] += us
        samples = sample_forwards(
            step.call, step.device, total_us, forward_ns / 1e9, max(EXTRA_S, left_ns / 1e9), step.backlog
        )
    samples.setdefault(BETWEEN_OPS, warm_up.samples.get(BETWEEN_OPS, []))
    return {**median_and_spread(in_trace_us, signatures, samples), **times}


def take_step(
    step: PreparedStep, recorder: OpRecorder, saved: SavedTensorRecorder, mark: Callable[[], int]
) -> tuple[int, int, int]:
    """Run forward under the recorder, then backward.

    Return three marks: where backward begins, where autograd's graph ends, and where the step ends.
    """
    held, roots = _forward(step, recorder, saved)
    check_roots(roots, step.leaves)
    # What autocast cached belongs to the caller's context. A real backward runs outside of it.
    torch.clear_autocast_cache()
    begin = mark()
    with torch.autocast(step.device.type, enabled=False), step.call.hooks.silenced():
        gradients = [torch.ones_like(root) for root in roots]
        retained = [root.grad_fn for root in roots] if step.loop.retains else []
        leaves = [leaf for leaf in step.leaves if leaf.requires_grad]
        leaves += _leaves_made(step, recorder, roots)
        try:
            torch.autograd.backward(roots, gradients, step.loop.retains, inputs=leaves)
        except RuntimeError as error:
            if reason := _checkpoint_failure(error):
                raise CannotProfile(type(step.model).__name__, *reason) from error
            error.add_note("autoac: raised in the backward of a profiled step, which runs on made-up numbers")
            raise
    saved.save_differentiated()
    del gradients, retained  # a retained graph holds everything that forward saved until here
    graph_end = mark()
    del leaves, roots  # leaves that forward made end with the graph
    end = mark()
    del held
    return begin, graph_end, end


def _leaves_made(step: PreparedStep, recorder: OpRecorder, roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that forward itself made, as `x.requires_grad_()` does to differentiate by `x`.

    Backward gives them gradients in training. Other leaves that are not in `step.leaves` are the user's own.
    """
    known = {id(leaf) for leaf in step.leaves}
    return [
        leaf
        for leaf in leaves_of(roots)
        if id(leaf) not in known
        and recorder.has_storage(leaf)
        and (
            recorder.newest.get(leaf) is not None
            or (not isinstance(leaf, nn.Parameter) and step.call.batch.holds(leaf))
        )
    ]


def _forward(
    step: PreparedStep, recorder: OpRecorder, saved: SavedTensorRecorder
) -> tuple[list[Any], list[Tensor]]:
    """Run the forwards of the loop. Return the outputs on storages that existed before, and the roots.

    Other outputs are released, so that the record shows when their storages are free. The effect of a loop
    that holds them is derived from that (`Profile.with_dropped_outputs`).
    """
    loss, loop, path = step.loss, step.loop, [recorder.module]
    recorder.originals = step.call.originals
    recorder.pins = pins_of(step.model)

    def enter(name: str) -> None:
        path.append(name)
        recorder.module = name

    def leave(_name: str) -> None:
        path.pop()
        recorder.module = path[-1]

    watch_compiled()
    watch_functions()
    watch_sharding()
    compiled = recorder.compiled = is_called_compiled(step.call.entry)
    handles = [] if compiled else watch_modules(step.model, enter, leave)
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack),
            carried_by(HollowParts(recorder, saved)) if runs_compiled(step.call.entry) else nullcontext(),
            recorder,
        ):
            held: list[Any] = []
            outputs: list[Any] = []
            roots: list[Tensor] = []
            for _ in range(loop.forwards):
                output = step.call()
                held += recorder.end_forward(output)
                if loss is None:
                    roots += roots_of(output)
                else:
                    outputs.append(output)
                del output
            if loss is not None:
                recorder.begin_loss()
                roots = [loss_of(loss, outputs if loop.forwards > 1 else outputs[0])]
                del outputs
        saved.forward_over = True
        if recorder.needs_checkpoints:
            step.call.unplanned[NEEDED] = None
    finally:
        for handle in handles:
            handle.remove()
    return held, [root for root in roots if root.requires_grad]


def _checkpoint_failure(error: RuntimeError) -> tuple[str, str] | None:
    """Return why torch's checkpoint could not recompute, and what to do about it; None for another error."""
    if isinstance(error, CheckpointError):
        return (
            "torch.utils.checkpoint in it recomputed a part on made-up numbers, on which that part took "
            "another path",
            "leave that checkpoint out: the plan recomputes what it must",
        )
    if "use_reentrant=True" in str(error):
        return (
            "torch.utils.checkpoint(use_reentrant=True) in it runs a backward of its own, which would give "
            "gradients to more than the profiled step",
            "pass use_reentrant=False",
        )
    return None
