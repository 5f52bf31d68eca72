"""Profile a step before it runs, by a hollow one (steps/hollow.py): of compiled models, and as an oracle."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import replace

import torch

from autoac.planner.formats.profile import Profile
from autoac.profiler.autocast import autocast_to
from autoac.profiler.capture.garbage_collection import frozen_heap
from autoac.profiler.distributed.ddp import buckets_of, build_replicating
from autoac.profiler.distributed.fsdp import check_rehearsed
from autoac.profiler.environment import describe_leaf, environment_of_device
from autoac.profiler.model_device import device_of_step
from autoac.profiler.step_profile import profile_of, with_cached_backward
from autoac.profiler.steps import hollow
from autoac.profiler.steps.hollow import StepRecord
from autoac.profiler.steps.training_loop import TrainingStep
from autoac.profiler.timing.cache import OpTime, Times, machine
from autoac.profiler.timing.op_timer import BETWEEN_OPS
from autoac.profiler.torch_facts.private import tree_leaves
from autoac.profiler.torch_facts.probes import check_torch

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@frozen_heap()
def rehearse(
    subject: TrainingStep,
    *,
    optimizer: Optimizers = None,
    times: Times | None = None,
    autocast: torch.dtype | None = None,
) -> Profile:
    """Profile a hollow step of `subject`, which leaves the user's objects as they were.

    Args:
        subject: the step.
        optimizer, times, autocast: as for `observe`.
    """
    check_torch()
    model, args, kwargs = subject.compiled, subject.args, subject.kwargs
    device = device_of_step(model, args, kwargs)
    build_replicating(model)
    check_rehearsed(model)
    if buckets_of(model, None).holds_gradients:  # each gradient is copied into its bucket, and freed
        subject = replace(subject, accumulates=True)
    inputs = [describe_leaf(leaf) for leaf in tree_leaves((tuple(args), dict(kwargs)))]
    times = times or Times.of_environment()
    with autocast_to(device.type, autocast):
        environment = environment_of_device(model, device)
        here = machine(device, environment.device_name)
        step, notes = _real_step(subject, device, here, times)
    result = profile_of(subject, step, notes, inputs, environment, device, None, optimizer)
    if times is not None:
        result = with_cached_backward(result, times, here)
    return result


def _real_step(
    subject: TrainingStep,
    device: torch.device,
    here: str,
    times: Times | None,
) -> tuple[StepRecord, list[str]]:
    """Run a hollow step. Return it with notes."""
    known: dict[Hashable, OpTime] = {}
    notes: list[str] = []

    def look_up(signatures: Set[Hashable]) -> Mapping[Hashable, OpTime]:
        known.update(times.ops(here, signatures) if times is not None else {})
        return dict(known)

    step = hollow.run(subject, device, known=look_up)
    if times is not None:
        times.keep_ops(here, {key: row for key, row in step.op_times.items() if key not in known})
    kinds = step.op_times.keys() - {BETWEEN_OPS}
    single = sum(step.op_times[key][2] == 1 for key in kinds)
    suffix = f"; {single} of them have one sample" if single else ""
    notes.append(f"measured: run times of {len(kinds)} kinds of op{suffix}")
    notes += step.unplanned
    if step.timing_note:
        notes.append(step.timing_note)
    return step, notes
