"""Run a fake step: a training step on tensors without memory, for a device that need not be here.

An observed step (observed_step.py) of a copy of the model runs under FakeTensorMode, so each op computes the
shapes of its outputs and nothing else. Memory is read from the births and deaths of fake storages
(fake_allocations.py) in place of the allocator's record, and times from the roofline of a datasheet
(roofline.py) in place of a clock. Nothing is recomputed, since holding a tensor takes no memory.

NOTE [ One device ]
The fake tensors claim to be on the CPU, for every datasheet: torch has autograd engines only for the devices
of its build, and a planner should get the same profile from every build. If a call would run other ops on a
GPU than on a CPU, gpu_dispatch/ runs the ops of the GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from autoac.profiler import gpu_dispatch
from autoac.profiler.gpu_dispatch.gpu_autocast import gpu_autocast
from autoac.profiler.gpu_dispatch.gpu_fake_kernels import GPU_FAKE_KERNELS
from autoac.profiler.gpu_dispatch.gpu_kernels import gpu_kernels
from autoac.profiler.observed_step import ObservedStep
from autoac.profiler.steps.fake_copy import fake_copy, own_leaves
from autoac.profiler.steps.step_record import StepRecord
from autoac.profiler.steps.training_loop import TrainingStep
from autoac.profiler.timing.on_device import OpTimesOnDevice
from autoac.profiler.timing.roofline import Device
from autoac.tape.capture.fake_allocations import FakeAllocations
from autoac.tape.distributed.ddp import without_ddp_sync
from autoac.tape.errors import CannotFake, CannotProfile
from autoac.tape.torch_facts.gradients import gradient_of
from autoac.tape.torch_facts.inductor import uncompiled
from autoac.tape.torch_facts.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from autoac.tape.torch_facts.rng import generators_restored
from autoac.tape.torch_facts.storage_table import fakes_have_storages, fakes_with_storages

CPU = torch.device("cpu")  # see NOTE [ One device ]


def run(
    subject: TrainingStep,
    device: Device,
    measured: OpTimesOnDevice | None = None,
    *,
    needs_checkpoints: bool = False,
) -> tuple[StepRecord, list[str]]:
    """Run one fake step. Nothing of the model's size is allocated.

    Args:
        subject: the step; its model and batch may be real, fake, or on the meta device. Inside of
            `fake_ranks` it runs on the model itself, whose gradients are then deleted.
        device: the datasheet.
        measured: measures each kind of op by itself; by default run times are those of the datasheet.
        needs_checkpoints: leave the checkpoints of the model to torch: NOTE [ Needed checkpoints ].

    Returns:
        The records of the step, and notes on estimates in them.

    Raises:
        NothingToProfile: no output of the model depends on anything that requires a gradient.
        CannotFake: an op needs values that are not known, or a kernel that torch has no fake of.
        CannotProfile: inside of `fake_ranks`, gradients exist before the step.
    """
    original = uncompiled(subject.compiled)
    accumulates = subject.accumulates
    if accumulates is None:
        accumulates = any(gradient_of(parameter) is not None for parameter in original.parameters())
    is_gpu = device.device_type != "cpu"
    ranks = fakes_with_storages()  # of the model itself, which was built under `fake_ranks`
    if ranks is not None and accumulates:
        raise CannotProfile(
            type(original).__name__,
            "under fake_ranks no gradient exists before the step",
            "plan the profile under Constraints(gradients='present')",
        )
    fakes = ranks or FakeTensorMode(allow_non_fake_inputs=True)
    allocations = FakeAllocations(
        fakes, device.allocator_rounding, (measured or device).runtime_us, GPU_FAKE_KERNELS if is_gpu else {}
    )
    with (
        generators_restored(CPU if measured is None else measured.device),
        gpu_kernels(device) if is_gpu else nullcontext(),
        gpu_autocast() if is_gpu else nullcontext(),
        torch.autograd.set_detect_anomaly(False),  # which looks at gradients
        torch.enable_grad(),
        fakes,
        fakes_have_storages(fakes),
    ):
        copied = subject if ranks is not None else fake_copy(subject, accumulates=accumulates)
        note_leaves = partial(own_leaves, original) if ranks is None else _all
        with without_ddp_sync(copied.compiled):
            step = ObservedStep(
                copied.compiled,
                copied.args,
                copied.kwargs,
                CPU,
                needs_checkpoints=needs_checkpoints,
                allocations=allocations,
            )
            try:
                step.run(copied, note_leaves)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise CannotFake(str(error), "it depends on values that are not known") from error
            except RuntimeError as error:
                if reason := _checkpoint_failure(error):
                    raise CannotProfile(type(original).__name__, *reason) from error
                if step.in_backward:
                    error.add_note("autoac: raised in the backward of a fake step, which has no numbers")
                raise
            finally:
                if ranks is not None:
                    original.zero_grad()
    if step.needs_checkpoints:
        return run(subject, device, measured, needs_checkpoints=True)
    record = step.record()
    rules = gpu_dispatch.notes() if is_gpu else []
    times = measured.notes if measured is not None else ()
    return record, [*record.unplanned, *rules, *allocations.notes, *times]


def _all(_leaves: list[Tensor]) -> None:
    """Let backward give gradients to all leaves."""


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
