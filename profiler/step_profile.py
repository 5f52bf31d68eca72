"""Put together the Profile of a step: its records, its static bytes, and the memory of optimizers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from autoac.planner.formats.profile import Environment, Profile, StaticBytes
from autoac.profiler.static_memory import optimizer_bytes, static_bytes, workspace_bytes
from autoac.profiler.steps.step_record import StepRecord
from autoac.profiler.steps.training_loop import TrainingStep
from autoac.profiler.timing.cache import Times
from autoac.profiler.timing.roofline import Device
from autoac.profiler.to_profile import assemble
from autoac.tape.capture.garbage_collection import no_garbage_collection
from autoac.tape.torch_facts.inductor import backend_of_plans, is_called_compiled, uncompiled

log = logging.getLogger("autoac.profiler")


def profile_of(
    subject: TrainingStep,
    step: StepRecord,
    notes: list[str],
    inputs: Sequence[str],
    environment: Environment,
    device: torch.device,
    datasheet: Device | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    static: StaticBytes | None = None,
) -> Profile:
    """Return the Profile of `step`, the records of one step of `subject`.

    Args:
        static: as the step began, with all batches and without the state of optimizers, if `subject` has
            changed since.
    """
    model, args, kwargs = subject.compiled, subject.args, subject.kwargs
    accumulates, loop = subject.accumulates, subject.loop
    if is_called_compiled(model) and not any(op.compiled for op in step.forward.ops):
        notes.append(
            f"nothing can be recomputed: the backend {backend_of_plans()!r} gave no graph of the model to "
            "AOTAutograd. Compile with backend='inductor' or 'aot_eager', or plan it uncompiled"
        )
        log.warning("%s: %s", type(uncompiled(model)).__name__, notes[-1])
    needs = optimizer_bytes(optimizer, device, datasheet)
    if static is None:
        static = static_bytes(model, args, kwargs, 0, device, datasheet, accumulates=accumulates)
        static = static.model_copy(update={"inputs": loop.forwards * static.inputs})
    workspaces = sum(block.nbytes for block in step.workspaces)
    if datasheet is not None:
        workspaces = workspace_bytes((op.facts.name for op in step.forward.ops), datasheet)
    with no_garbage_collection():
        return assemble(
            step,
            environment.allocator_rounding,
            model=type(uncompiled(model)).__name__,
            inputs=tuple(inputs),
            environment=environment,
            static=static.model_copy(update={"workspaces": workspaces, "optimizer_state": needs.state}),
            optimizer_workspace_nbytes=needs.workspace,
            notes=(*notes, *([needs.note] if needs.note else [])),
        ).with_dropped_outputs(loop.drops)


def with_cached_backward(result: Profile, times: Times, here: str) -> Profile:
    """Return the profile with the cached run times of backward. If there are none, cache the profile's."""
    cached = times.backward(here, result.fingerprint, len(result.backward))
    if cached is None:
        times.keep_backward(here, result.fingerprint, result.backward.runtime_us)
        return result
    backward = result.backward.model_copy(update={"runtime_us": tuple(cached)})
    return result.model_copy(update={"backward": backward})
