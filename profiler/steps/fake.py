"""Run a fake step: a training step on tensors without memory, for a device that need not be here.

Forward and backward run under FakeTensorMode, so each op computes the shapes of its outputs and nothing else.
An observed step (observed_step.py) reads memory from the allocator's record and times from a clock. A fake
step reads memory from the births and deaths of the fake tensors' storages (fake_allocations.py), and times
from the roofline of a datasheet (roofline.py). Autograd is handed descriptions in place of what forward
makes, so that the record shows when forward itself lets go of a tensor. Everything after that is shared, so
both give the same kind of Profile.

NOTE [ One device ]
The fake tensors claim to be on the CPU, for every datasheet: torch has autograd engines only for the devices
of its build, and a planner should get the same profile from every build. If a call would run other ops on a
GPU than on a CPU, gpu_dispatch/ runs the ops of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from autoac.profiler.compiler.second_stage import carried_by
from autoac.profiler.gpu_dispatch.gpu_autocast import gpu_autocast
from autoac.profiler.gpu_dispatch.gpu_fake_kernels import GPU_FAKE_KERNELS
from autoac.profiler.gpu_dispatch.gpu_kernels import gpu_kernels
from autoac.profiler.joint_graph.interpreted_part import FakeParts
from autoac.profiler.restore.isolated_call import Call, isolated_call
from autoac.profiler.restore.module_state import modules_restored
from autoac.profiler.steps.step_record import StepRecord
from autoac.profiler.steps.training_loop import Loop, Loss, TrainingStep, check_roots, run_forwards
from autoac.profiler.timing.on_device import OpTimesOnDevice
from autoac.profiler.timing.roofline import Device
from autoac.tape.capture.fake_allocations import FakeAllocations, copy_if_known, fake_like
from autoac.tape.capture.op_recorder import OpRecorder
from autoac.tape.capture.op_timer import median_and_spread
from autoac.tape.capture.saved_tensor_recorder import SavedTensorRecorder
from autoac.tape.checkpoints.own_checkpoints import NEEDED, checkpoints_left_alone
from autoac.tape.distributed.ddp import without_ddp_sync
from autoac.tape.errors import CannotFake, CannotProfile
from autoac.tape.torch_facts.gradients import gradient_of, leaves_of
from autoac.tape.torch_facts.inductor import (
    is_called_compiled,
    runs_compiled,
    uncompiled,
    watch_compiled,
)
from autoac.tape.torch_facts.module_paths import watch_modules
from autoac.tape.torch_facts.module_pins import pins_of
from autoac.tape.torch_facts.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from autoac.tape.torch_facts.rng import generators_restored
from autoac.tape.torch_facts.storage_table import has_storage_or_fake
from autoac.tape.unseen.function_calls import watch_functions

CPU = torch.device("cpu")  # see NOTE [ One device ]


def run(
    subject: TrainingStep, device: Device, measured: OpTimesOnDevice | None = None
) -> tuple[StepRecord, list[str]]:
    """Run one fake step. Nothing of the model's size is allocated.

    Args:
        subject: the step; its model and batch may be real, fake, or on the meta device.
        device: the datasheet.
        measured: measures each kind of op by itself; by default run times are those of the datasheet.

    Returns:
        The records of the step, and notes on estimates in them.

    Raises:
        NothingToProfile: no output of the model depends on anything that requires a gradient.
        CannotFake: an op needs values that are not known, or a kernel that torch has no fake of.
    """
    compiled, accumulates = subject.compiled, subject.accumulates
    model = uncompiled(compiled)
    if accumulates is None:
        accumulates = any(gradient_of(parameter) is not None for parameter in model.parameters())
    is_gpu = device.device_type != "cpu"
    allocations = FakeAllocations(
        device.allocator_rounding, (measured or device).runtime_us, GPU_FAKE_KERNELS if is_gpu else {}
    )
    recorder = OpRecorder(allocations.mark, allocations.locate, has_storage_or_fake)
    saved = SavedTensorRecorder(recorder, allocations.mark)
    allocations.idle = lambda: recorder.is_idle
    with (
        generators_restored(CPU if measured is None else measured.device),
        modules_restored(model),
        without_ddp_sync(model),
        gpu_kernels(device) if is_gpu else nullcontext(),
        gpu_autocast() if is_gpu else nullcontext(),
        FakeTensorMode(allow_non_fake_inputs=True),
        isolated_call(
            model,
            subject.args,
            subject.kwargs,
            fake_like,
            copy_if_known,
            copy_if_known,
            accumulates=accumulates,
            entry=compiled,
        ) as (call, leaves),
        carried_by(FakeParts()) if runs_compiled(compiled) else nullcontext(),
    ):
        step = PreparedStep(model, call, leaves, subject.loss, subject.loop)
        try:
            if runs_compiled(compiled):
                _compile(call)
            with allocations, torch.enable_grad():
                backward = take_step(step, recorder, saved, allocations.mark)
        finally:
            saved.closed = True
            allocations.close()
            recorder.generators.restore()
    if NEEDED in call.unplanned:
        with checkpoints_left_alone(needed=True):
            again, notes = run(subject, device, measured)
        return again, [NEEDED, *notes]
    at, ops = allocations.times_ns, recorder.record.ops
    op_times_us = [(at[op.end_mark] - at[op.begin_mark]) / 1e3 for op in ops]
    op_times = median_and_spread(op_times_us, [op.signature for op in ops], {})
    traced = StepRecord(recorder.record, saved, allocations, at, *backward, op_times=op_times)
    return traced, [*call.unplanned, *allocations.notes, *(measured.notes if measured is not None else ())]


def _compile(call: Call) -> None:
    """Run forward once, so that tracing and compiling take no memory of the step."""
    try:
        call()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CannotFake(str(error), "it depends on values that are not known") from error


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A training step that is ready to run."""

    model: nn.Module
    call: Call
    leaves: list[Tensor]  # that backward may give gradients to
    loss: Loss | None
    loop: Loop


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
    with torch.autocast(CPU.type, enabled=False), step.call.hooks.silenced():
        gradients = [torch.ones_like(root) for root in roots]
        retained = [root.grad_fn for root in roots] if step.loop.retains else []
        leaves = [leaf for leaf in step.leaves if leaf.requires_grad]
        leaves += _leaves_made(step, recorder, roots)
        try:
            torch.autograd.backward(roots, gradients, step.loop.retains, inputs=leaves)
        except RuntimeError as error:
            if reason := _checkpoint_failure(error):
                raise CannotProfile(type(step.model).__name__, *reason) from error
            error.add_note("autoac: raised in the backward of a fake step, which has no numbers")
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
    path = [recorder.module]
    recorder.pins = pins_of(step.model)

    def enter(name: str) -> None:
        path.append(name)
        recorder.module = name

    def leave(_name: str) -> None:
        path.pop()
        recorder.module = path[-1]

    watch_compiled()
    watch_functions()
    compiled = recorder.compiled = is_called_compiled(step.call.entry)
    handles = [] if compiled else watch_modules(step.model, enter, leave)
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack),
            carried_by(FakeParts(recorder, saved)) if runs_compiled(step.call.entry) else nullcontext(),
            recorder,
        ):
            calls = repeat(step.call, step.loop.forwards)
            held, roots = run_forwards(calls, step.loss, recorder.end_forward, recorder.begin_loss)
        saved.forward_over = True
        if recorder.needs_checkpoints:
            step.call.unplanned[NEEDED] = None
    finally:
        for handle in handles:
            handle.remove()
    return held, roots


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
