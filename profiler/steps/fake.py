"""Run a fake step: a training step on tensors without memory, for a device that need not be here.

Forward and backward run under FakeTensorMode, so each op computes the shapes of its outputs and nothing else.
A hollow step (hollow.py) reads memory from the allocator's record and times from a clock. A fake step reads
memory from the births and deaths of the fake tensors' storages (fake_allocations.py), and times from the
roofline of a datasheet (roofline.py). Everything after that is shared, so both give the same kind of Profile.

NOTE [ One device ]
The fake tensors claim to be on the CPU, for every datasheet: torch has autograd engines only for the devices
of its build, and a planner should get the same profile from every build. If a call would run other ops on a
GPU than on a CPU, gpu_dispatch/ runs the ops of the GPU.
"""

from __future__ import annotations

import contextlib

import torch

from autoac.profiler.capture.fake_allocations import FakeAllocations, copy_if_known, fake_like
from autoac.profiler.capture.op_recorder import OpRecorder
from autoac.profiler.capture.saved_tensor_recorder import SavedTensorRecorder
from autoac.profiler.checkpoints.own_checkpoints import NEEDED, checkpoints_left_alone
from autoac.profiler.compiler.second_stage import carried_by
from autoac.profiler.distributed.ddp import without_ddp_sync
from autoac.profiler.errors import CannotFake
from autoac.profiler.gpu_dispatch.gpu_autocast import gpu_autocast
from autoac.profiler.gpu_dispatch.gpu_fake_kernels import GPU_FAKE_KERNELS
from autoac.profiler.gpu_dispatch.gpu_kernels import gpu_kernels
from autoac.profiler.joint_graph.interpreted_part import HollowParts
from autoac.profiler.restore.isolated_call import Call, isolated_call
from autoac.profiler.restore.module_state import modules_restored
from autoac.profiler.steps.hollow import PreparedStep, StepRecord, take_step
from autoac.profiler.steps.training_loop import TrainingStep
from autoac.profiler.timing.on_device import OpTimesOnDevice
from autoac.profiler.timing.op_timer import median_and_spread
from autoac.profiler.timing.roofline import Device
from autoac.profiler.torch_facts.gradients import gradient_of
from autoac.profiler.torch_facts.inductor import runs_compiled, uncompiled
from autoac.profiler.torch_facts.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from autoac.profiler.torch_facts.rng import generators_restored
from autoac.profiler.torch_facts.storage_table import has_storage_or_fake

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
        gpu_kernels(device) if is_gpu else contextlib.nullcontext(),
        gpu_autocast() if is_gpu else contextlib.nullcontext(),
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
        carried_by(HollowParts()) if runs_compiled(compiled) else contextlib.nullcontext(),
    ):
        step = PreparedStep(model, call, leaves, subject.loss, CPU, subject.loop)
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
