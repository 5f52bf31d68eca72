"""Measure steps of a planned model, and draw the last one over its plan."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.measure.step_marks import last_step
from autoac.planner import Plan, Policy, picture
from autoac.planner.report.align_measured import MeasuredStep, op_names
from autoac.planner.report.page import timeline_page
from autoac.planner.units import format_bytes
from autoac.profiler import device_of
from autoac.tape.distributed.fsdp import parameters_of
from autoac.tape.distributed.wrapped_tensors import with_memory
from autoac.tape.torch_facts.gradients import gradient_of


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A measured step, and the plan under which it ran."""

    owner: object  # what the plan belongs to; compared by identity
    policy: Policy
    plan: Plan | None
    step: MeasuredStep


class MeasuredSteps:
    """Measure steps of a planned model by the record of the allocator.

    Attributes:
        timeline: that is being recorded, and gets the marks of step_marks.py; None if none is.
        peak_bytes: the peak of the last measured block; None if there was none.
        beyond_plan: a step of the block ran on a batch that its plan does not cover.
    """

    def __init__(self) -> None:
        self.timeline: AllocatorTimeline | None = None
        self.peak_bytes: int | None = None
        self.beyond_plan = False
        self._last: PlannedStep | None = None
        self._counted: Set[int] = frozenset()  # storages that are part of the block's base
        self._batches: dict[
            int, weakref.ref[Any]
        ] = {}  # by storage, of batches that may be older than the block

    @contextmanager
    def record(
        self, model: nn.Module, state: Iterable[Tensor], base: int, policies: Iterable[Policy]
    ) -> Iterator[AllocatorTimeline]:
        """Record the body; the timeline is complete when the with-block ends.

        Args:
            model: the model whose steps run.
            state: of its optimizers.
            base: bytes live at the beginning, batches not included; see `AllocatorTimeline`.
            policies: the policies under which the steps may run.

        Raises:
            RuntimeError: torch.profiler is running.
        """
        timeline = AllocatorTimeline(
            device_of(model),
            base=base,
            ops=op_names([key for policy in policies for key in policy.decisions]),
        )
        self.beyond_plan = False
        try:
            with timeline:
                self.timeline = timeline
                own = [*parameters_of(model), *model.buffers()]
                self._counted = {storage._cdata for storage in _storages(own)}
                watches = _watch(chain(own, map(gradient_of, own), state), timeline)
                del own  # the steps may replace them
                yield timeline
                del watches
        finally:
            self.timeline = None
            self._batches.clear()
        self.peak_bytes = timeline.peak_bytes

    def note_batch(self, batch: Iterable[Tensor]) -> None:
        """Note that a step of the block runs on `batch`.

        A batch that was made before the block is in no record: neither its allocation nor its release.
        """
        timeline = self.timeline
        if timeline is None:
            return
        for storage in _storages(batch):
            key, nbytes, address = storage._cdata, storage.nbytes(), storage.data_ptr()
            if not nbytes or key in self._counted or key in self._batches:
                continue
            timeline.note_existing(storage)

            def note_release(_: object, key: int = key, nbytes: int = nbytes, address: int = address) -> None:
                self._batches.pop(key, None)
                timeline.note_release(nbytes, address)

            self._batches[key] = weakref.ref(storage, note_release)

    def remember(self, timeline: AllocatorTimeline, owner: object, policy: Policy, plan: Plan | None) -> None:
        """Keep the last step in `timeline`, which ran under `policy` of `owner`, for `page`."""
        if (step := last_step(timeline)) is not None:
            self._last = PlannedStep(owner, policy, plan, step)

    def page(self, owner: object, policy: Policy, plan: Plan | None) -> str:
        """Return an HTML page: the step last measured under `owner`, as planned then, or else the plan alone.

        Raises:
            RuntimeError: `plan` is None, so the sizes of the tensors are unknown.
        """
        step, notes = None, []
        if self._last is not None and self._last.owner is owner:
            if self._last.policy is not policy:
                notes.append(
                    "The model was planned again since this step was measured; its predicted peak is now "
                    f"{format_bytes(policy.predicted.peak_bytes)}."
                )
            policy, plan, step = self._last.policy, self._last.plan, self._last.step
        if plan is None:
            raise RuntimeError(
                "the policy was given without its profile, which has the sizes; draw the policy with "
                "`autoac explain POLICY --profile PROFILE --html PAGE`"
            )
        return timeline_page(picture(plan, step, policy=policy, notes=notes).data())


def _watch(tensors: Iterable[Any], timeline: AllocatorTimeline) -> list[weakref.ref[Any]]:
    """Note in `timeline` when memory of `tensors`, part of its base, is released, while the result lives.

    `zero_grad` releases gradients, and `parameter.data = ...` what the parameter had.
    """
    storages = {storage._cdata: storage for storage in _storages(tensors)}

    def watch(storage: torch.UntypedStorage) -> weakref.ref[Any]:
        nbytes = storage.nbytes()
        return weakref.ref(storage, lambda _: timeline.note_release(nbytes))

    return [watch(storage) for storage in storages.values()]


def _storages(tensors: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in with_memory(tensors))
