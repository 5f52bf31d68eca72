"""Compare peak and stalls of the steps of each plan with the predicted ones, where a device counts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ac_client.planning.batch_shape import ModelCall
from ac_client.planning.facts.model_structure import device_of
from ac_client.planning.facts.optimizer_steps import ModelOptimizers
from ac_client.planning.facts.peak_counter import CudaPeak, allocator_peak, least_peak
from ac_client.planning.loaded_policy import LoadedPolicy, PlannedBucket
from ac_client.planning.options import ApplyOptions
from ac_client.planning.trigger import WATCHED_STEPS, Measured
from autoac.tape.runtime.moves.copies import stalls

log = logging.getLogger("ac_client")


@dataclass(slots=True)
class _Readings:
    """Readings of the allocator's counter in one step."""

    bucket: PlannedBucket
    loaded: LoadedPolicy  # when the step began
    counts: list[int] | None  # from before forward on; None if the step's peak is not compared


class PeakWatch:
    """Reads the allocator's counter in each step: NOTE [ The counter is the user's ].

    Attributes:
        allocator: of the model's device, once a step was planned here.
    """

    def __init__(self, options: ApplyOptions, optimizers: ModelOptimizers) -> None:
        self.allocator: CudaPeak | None = None
        self._options = options
        self._started = False
        self._optimizers = optimizers
        self._readings: _Readings | None = None  # of the step that runs, if it is compared
        self._reserved = 0  # when it was last read
        self._reserved_outside = 0  # between steps, for an evaluation say

    def start(self, model: nn.Module) -> None:
        """Begin to compare, now that a step was planned here, if the device of `model` counts."""
        if self._started:
            return
        self._started = True
        self.allocator = allocator_peak(device_of(model))
        if self.allocator is None:
            log.info(
                "%s: on a CPU nothing compares the measured peak with the predicted one by itself. To "
                "compare them, run a step in `with ac_client.applied(model).measure():`",
                type(model).__name__,
            )
        else:
            self._reserved = self.allocator.reserved()  # a profile has given back what it took

    @property
    def reading(self) -> bool:
        """Return True if the step that runs is watched."""
        return self._readings is not None

    def begin_step(self, bucket: PlannedBucket, call: ModelCall, *, compares: bool = False) -> None:
        """Take the first reading of a step under `bucket`.

        Note how much was reserved since the last step. A batch that `bucket` does not cover is not compared.

        Args:
            call: of the model, on the batch.
            compares: backward compares contents in this step, for which it allocates up to 2 MiB more.
        """
        if self.allocator is None:
            return
        before, self._reserved = self._reserved, self.allocator.reserved()
        self._reserved_outside += max(0, self._reserved - before)
        comparable = not compares and self.is_complete(bucket) and bucket.covers(call.args, call.kwargs)
        counts = [self.allocator.allocated_peak()] if comparable else None
        if counts is not None and bucket.policy.moves and bucket.statistics.compared == WATCHED_STEPS - 1:
            stalls.watch()
        self._readings = _Readings(bucket, bucket.loaded, counts)

    def read(self) -> int:
        """Take one more reading of the step that runs; return the bytes that it needed by now, at least."""
        counts = self._readings.counts if self._readings is not None else None
        if counts is None or self.allocator is None:
            return 0
        counts.append(self.allocator.allocated_peak())
        return least_peak(counts)

    def discard(self) -> None:
        """Drop the readings of the step that runs: it will not end, or shows more than its plan."""
        self._readings = None
        stalls.take()

    def end_step(self) -> tuple[PlannedBucket, Measured] | None:
        """End the step, and return what it has shown; None if there is nothing to judge."""
        self.read()
        stalled_us = stalls.take()
        readings, self._readings = self._readings, None
        if readings is None or readings.loaded is not readings.bucket.loaded:
            return None
        bucket = readings.bucket
        measured = Measured()
        if readings.counts is not None:
            predicted, plan = bucket.policy.predicted, bucket.plan
            longer_us = stalled_us - predicted.stall_us
            finds = self._options.finds_host_budget and plan is not None
            measured = Measured(
                peak=least_peak(readings.counts),
                stalled=longer_us / predicted.step_us if predicted.step_us else 0.0,
                moves_lose=finds and plan is not None and longer_us > plan.gained_us,
            )
        return bucket, self._with_reserved(measured, bucket, readings.counts)

    def _with_reserved(
        self, measured: Measured, bucket: PlannedBucket, counts: Sequence[int] | None
    ) -> Measured:
        """Return `measured`, and by how much the steps took what is reserved over the budget.

        What was reserved between steps is not the plan's to keep small.
        """
        budget = self._options.budget_bytes
        if self.allocator is None or budget is None:
            return measured
        self._reserved = now = self.allocator.reserved()
        if counts is not None:
            # The counter may show what needed more than a step: a profile, or an evaluation.
            fragments = max(0, now - min(max(counts), bucket.planned_for.peak))
            measured = measured._replace(fragments=fragments)
        over = now - self._reserved_outside - budget
        return measured._replace(
            reserved_over=max(0, over), of_reserved=self._options.constraints.budget_of == "reserved"
        )

    def is_complete(self, bucket: PlannedBucket) -> bool:
        """Return True if all of the optimizer's state exists, so that a step now needs as much as later ones.

        Before the optimizer's first step its state is missing, so a correction would be too small, and one
        of few would be used up.
        """
        counted = bucket.planned_for.present.optimizers
        return bucket.profile is None or self._optimizers.steps > 0 or self._optimizers.has_state(counted)
