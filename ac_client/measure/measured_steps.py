"""What was measured of a planned model's steps, and the page that draws it over the plan."""

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
from ac_client.measure.step_marks import StepMarks, last_step
from ac_client.planning.shape_buckets import Loaded
from autoac.planner import Plan, Policy, as_planned, picture
from autoac.planner.report.align_measured import MeasuredStep, op_names
from autoac.planner.report.page import timeline_page
from autoac.planner.units import format_bytes
from autoac.profiler import device_of
from autoac.profiler.distributed.fsdp import parameters_of
from autoac.profiler.torch_facts.gradients import gradient_of
from autoac.profiler.torch_facts.storage_table import has_storage


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step that was measured, as it was planned then."""

    loaded: Loaded
    policy: Policy
    plan: Plan | None
    step: MeasuredStep


class Measuring:
    """Measures steps by the allocator's own record.

    Attributes:
        marks: where forwards and modules are marked, while a step is measured; else None.
        peak_bytes: of what was measured last.
    """

    def __init__(self) -> None:
        self.marks: StepMarks | None = None
        self.peak_bytes: int | None = None
        self._drawn: Drawn | None = None
        self._timeline: AllocatorTimeline | None = None
        self._counted: Set[int] = frozenset()  # storages that are part of a block's base
        self._watched: dict[int, weakref.ref[Any]] = {}  # by storage: what may be from before the block

    @contextmanager
    def block(self, model: nn.Module, base: int, policies: Iterable[Policy]) -> Iterator[AllocatorTimeline]:
        """Record what runs inside; the timeline is filled when it ends.

        Args:
            model: whose steps run.
            base: bytes that are live at the beginning, batches not counted; see `AllocatorTimeline`.
            policies: that may be carried out.

        Raises:
            RuntimeError: torch.profiler is running.
        """
        timeline = AllocatorTimeline(
            device_of(model),
            base=base,
            ops=op_names([key for policy in policies for key in policy.decisions]),
        )
        self.marks = StepMarks(timeline)
        try:
            with timeline:
                self._timeline = timeline
                self._counted = {
                    storage._cdata for storage in _storages(chain(model.parameters(), model.buffers()))
                }
                gradients = _told_when_they_go(model, timeline)
                yield timeline
                del gradients
        finally:
            self.marks = self._timeline = None
            self._watched.clear()
        self.peak_bytes = timeline.peak_bytes

    def meets(self, batch: Iterable[Tensor]) -> None:
        """A step of the block runs on `batch`, which was made before the block or in it.

        One from before is in no record, neither where it came nor where it goes.
        """
        timeline = self._timeline
        if timeline is None:
            return
        for storage in _storages(batch):
            key, nbytes, address = storage._cdata, storage.nbytes(), storage.data_ptr()
            if not nbytes or key in self._counted or key in self._watched:
                continue
            timeline.found(storage)

            def gone(_: object, key: int = key, nbytes: int = nbytes, address: int = address) -> None:
                self._watched.pop(key, None)
                timeline.released(nbytes, address)

            self._watched[key] = weakref.ref(storage, gone)

    def keep(self, timeline: AllocatorTimeline, loaded: Loaded) -> None:
        """Draw the last step in `timeline`, which ran under `loaded`, from now on."""
        if (step := last_step(timeline)) is not None:
            self._drawn = Drawn(loaded, loaded.policy, loaded.plan, step)

    def page(self, loaded: Loaded | None) -> str:
        """What was measured last under `loaded`, as it was planned then; else the plan as it is.

        Raises:
            RuntimeError: nothing is planned yet, or the policy was given without a profile.
        """
        if loaded is None:
            raise RuntimeError("nothing is planned yet: run one training step first, then ask for the page")
        policy, plan, step, notes = loaded.policy, loaded.plan, None, []
        if self._drawn is not None and self._drawn.loaded is loaded:
            policy, plan, step = self._drawn.policy, self._drawn.plan, self._drawn.step
            if policy is not loaded.policy:
                notes.append(
                    "The model was planned again since this step was measured; its predicted peak is now "
                    f"{format_bytes(loaded.policy.predicted.peak_bytes)}."
                )
        if plan is None:
            if loaded.profile is None:
                raise RuntimeError(
                    "the policy was given without its profile, which has the bytes: draw it with "
                    "`autoac explain POLICY --profile PROFILE --html PAGE`"
                )
            plan = as_planned(policy, loaded.profile)
        drawn = picture(plan, step, policy=policy, notes=notes)
        return timeline_page(drawn.data())


def _told_when_they_go(model: nn.Module, timeline: AllocatorTimeline) -> list[weakref.ref[Any]]:
    """While the list lives, tell `timeline` of gradients that are there now and are dropped (`zero_grad`)."""
    gradients = (g for p in parameters_of(model) if (g := gradient_of(p)) is not None)
    storages = {storage._cdata: storage for storage in _storages(gradients)}

    def watched(storage: torch.UntypedStorage) -> weakref.ref[Any]:
        nbytes = storage.nbytes()
        return weakref.ref(storage, lambda _: timeline.released(nbytes))

    return [watched(storage) for storage in storages.values()]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tensors if has_storage(tensor))
