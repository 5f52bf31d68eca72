"""When a plan is made again: the loop, the optimizers, the neighbors, or the allocator show something else.

docs/budget.md is the page. NOTE [ The counter is the user's ] in peak_counter.py says what is compared.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ac_client.planning.batch_shape import ModelCall
from ac_client.planning.loaded_policy import Correction, PlannedBucket, corrected
from ac_client.planning.models_on_device import of_others
from ac_client.planning.optimizer_steps import ModelOptimizers
from ac_client.planning.peak_counter import (
    LAST_MARGIN,
    MOST_CORRECTIONS,
    WATCHED_STEPS,
    AllocatorPeak,
    PeakBounds,
    excess_bytes,
    mispredicted_bytes,
    unused_bytes,
)
from ac_client.planning.plan_batch import BucketPlanner, first_line, loop_in_words
from ac_client.runtime.write_guard import version_counter
from ac_client.service_client.errors import RemoteError
from autoac.planner import PlannerError
from autoac.planner.units import format_bytes
from autoac.profiler import Loop, ProfilerBusy, device_of
from autoac.profiler.distributed.fsdp import parameters_of
from autoac.profiler.errors import ProfilerError
from autoac.profiler.static_memory import optimizer_bytes

log = logging.getLogger("ac_client")

TIGHTER = 0.9  # of a planned peak that the device did not have room for
MOST_MODULE_TRIES = 8  # batches that are profiled to find one that runs more modules


class Replanner:
    """Plans the buckets of one model again.

    The methods `for_...` return the bucket that takes the place of the old one, or the old one if it stays.
    The others load another policy into the same bucket.
    """

    def __init__(self, buckets: BucketPlanner, optimizers: ModelOptimizers) -> None:
        self._buckets = buckets
        self._planner = buckets.planner
        self._name = buckets.planner.name
        self._on_device = buckets.on_device
        self._lock = buckets.lock
        self._optimizers = optimizers
        self._adopted_checked = 0  # adopted optimizers when their state was last compared with a plan's

    def for_gradients(self, call: ModelCall, bucket: PlannedBucket, loop: Loop) -> PlannedBucket:
        """Plan again if gradients exist before a step that was planned as one that makes them.

        So it is with microbatches after the first, and with `zero_grad(set_to_none=False)`. The new plan
        then serves first microbatches too, which need less.
        """
        if call.shape != bucket.step.shape:
            return bucket  # wait for a batch like the one that was profiled
        bucket.may_lack_gradients = False
        with self._lock:
            try:
                again = self._buckets.plan(call, loop)
            except ProfilerBusy:
                bucket.may_lack_gradients = True
                return bucket
            except (PlannerError, RemoteError) as error:
                self._planner.warn_once(
                    "gradients",
                    "%s: gradients exist before the step, and no plan leaves room for them (%s). The present "
                    "plan stays",
                    self._name,
                    first_line(error),
                )
                return bucket
        bucket.hand_over(again)
        log.info("%s: planned again, since gradients exist before the step", self._name)
        return again

    def for_loop(self, call: ModelCall, bucket: PlannedBucket, loop: Loop) -> PlannedBucket:
        """Plan again for a loop of another form than the one that `bucket` was planned for."""
        if call.shape != bucket.step.shape:
            return bucket  # wait for a batch like the one that was profiled
        with self._lock:
            try:
                known = None
                if (
                    bucket.profile is not None
                    and replace(loop, drops=bucket.step.loop.drops) == bucket.step.loop
                ):
                    known = bucket.profile.with_dropped_outputs(loop.drops)  # no other bytes differ
                again = self._buckets.plan(call, loop, running=True, profile=known)
            except ProfilerBusy:
                return bucket
            except (ProfilerError, PlannerError, RemoteError) as error:
                bucket.step = replace(bucket.step, loop=loop)  # try once
                bucket.observed.loop = loop
                self._planner.warn_once(
                    "loop",
                    "%s: the loop has %s, and no plan could be made for that (%s). The present plan stays",
                    self._name,
                    loop_in_words(loop),
                    first_line(error),
                )
                return bucket
        bucket.hand_over(again)
        log.info("%s: planned again, for a loop with %s", self._name, loop_in_words(loop))
        return again

    def for_more_modules(self, call: ModelCall, bucket: PlannedBucket) -> PlannedBucket:
        """Plan this batch if its forward runs more modules than the one that `bucket` was planned for.

        Which modules a forward runs may be drawn (stochastic depth), so only its own profile tells.
        """
        profile, loop = bucket.profile, bucket.step.loop
        if call.shape != bucket.step.shape or bucket.module_tries >= MOST_MODULE_TRIES or profile is None:
            return bucket
        with self._lock:
            bucket.module_tries += 1
            try:
                found = self._buckets.profiler.profile(call, loop)
                if len(found.ops) <= len(profile.ops):
                    return bucket
                others = self._on_device.others_nbytes()
                reason = "in a forward that runs more modules than the one before"
                made = self._planner.plan_running(found, reason, others)
            except ProfilerBusy:
                return bucket
            except (ProfilerError, PlannerError, RemoteError):
                bucket.module_tries = MOST_MODULE_TRIES
                return bucket
            again = self._buckets.bucket(call, found, loop, made, others_nbytes=others)
            again.module_tries = bucket.module_tries
        bucket.hand_over(again)
        log.info("%s: planned again, for a forward that runs more modules", self._name)
        return again

    def count_optimizers(self, model: nn.Module, bucket: PlannedBucket) -> None:
        """Plan again with the state of optimizers that were not passed to `apply` and have stepped."""
        adopted, profile = self._optimizers.adopted, bucket.profile
        if profile is None or bucket.step.n_adopted == adopted:
            return
        with self._lock:
            needs = optimizer_bytes(self._optimizers.all, device_of(model))
            bucket.step = replace(bucket.step, n_adopted=adopted)
            if needs.state == profile.static.optimizer_state and (
                needs.workspace <= profile.optimizer_workspace_nbytes
            ):
                return
            static = profile.static.model_copy(update={"optimizer_state": needs.state})
            profile = profile.model_copy(
                update={"static": static, "optimizer_workspace_nbytes": needs.workspace}
            )
            bucket.step = replace(bucket.step, profile=profile)
            names = _types(self._optimizers.all)
            reason = f"{format_bytes(needs.state)} of it the state of {names}"
            try:
                bucket.load(*self._planner.plan_running(profile, reason, bucket.step.extra_static))
            except (PlannerError, RemoteError) as error:
                log.warning(
                    "%s: %s steps it, and no plan leaves room for the state of %s (%s). The present plan "
                    "stays",
                    self._name,
                    _types(self._optimizers.not_passed),
                    names,
                    first_line(error),
                )
                return
        log.info("%s: planned again, with %s of state of %s", self._name, format_bytes(needs.state), names)

    def warn_of_uncounted_state(self, model: nn.Module, bucket: PlannedBucket) -> None:
        """Warn of an optimizer that was not passed to `apply`, in the step in which it makes its state."""
        profile, adopted = bucket.profile, self._optimizers.adopted
        if profile is None or self._planner.budget_bytes is None:
            return
        if adopted in (bucket.step.n_adopted, self._adopted_checked):
            return
        self._adopted_checked = adopted
        more = optimizer_bytes(self._optimizers.all, device_of(model)).state - profile.static.optimizer_state
        if more > 0:
            self._planner.warn_once(
                "optimizer",
                "%s: %s steps it and was not passed to ac_client.apply. This plan does not count the "
                "optimizer's state of %s, so this step may go over the budget. The next step is planned with "
                "the state. Pass optimizer=... to have it counted from the first step on",
                self._name,
                _types(self._optimizers.not_passed),
                format_bytes(more),
            )

    def count_other_models(self, bucket: PlannedBucket) -> None:
        """Plan again with what other planned models on the device hold by now.

        That is done if the plan leaves no room for it, if no plan did and they hold less now, or if they
        asked for room themselves.
        """
        held = self._on_device.others_nbytes()
        more = held - bucket.step.others_nbytes
        over = bucket.policy.predicted.peak_bytes > self._planner.limit
        requested, bucket.room_requested = bucket.room_requested, False
        if bucket.profile is None or not (
            requested
            or self._on_device.lacks_room(bucket, more)
            or (over and bucket.step.others_nbytes and more < 0)
        ):
            return
        with self._lock:
            bucket.step = replace(bucket.step, others_nbytes=held)
            try:
                needs = self._plan_again(bucket, bucket.correction)
            except (PlannerError, RemoteError) as error:
                log.warning(
                    "%s: %s, and no plan leaves room for that (%s). The present plan stays",
                    self._name,
                    of_others(held),
                    first_line(error),
                )
                return
        if needs is None or bucket.correction.withheld:
            log.info("%s: planned again, %s", self._name, of_others(held))
        else:
            self._planner.warn_over_budget(needs, of_others(held))
            self._on_device.ask_others_for_room(needs)

    def replan_if_mispredicted(self, model: nn.Module, bucket: PlannedBucket, *, whole: bool) -> None:
        """Plan again if the compared steps were over the budget, or correct the prediction alone.

        Args:
            whole: the steps had the optimizer's step in them: plan again, too, if they were far below.
        """
        peak, profile, correction = bucket.statistics.peak, bucket.profile, bucket.correction
        if self._planner.budget_bytes is None or peak is None or bucket.replaced:
            return
        limit = self._planner.limit
        predicted = bucket.policy.predicted.peak_bytes
        excess = excess_bytes(peak, predicted, limit)
        if profile is not None and excess and correction.times < MOST_CORRECTIONS:
            last = correction.times == MOST_CORRECTIONS - 1
            self._correct(bucket, excess + last * round(LAST_MARGIN * limit), measured=peak.at_least)
            return
        if excess and not bucket.warned_over_budget:
            bucket.warned_over_budget = True
            log.warning(
                "%s: measured a peak of %s, over the limit of %s. The plan stays, because it was %s",
                self._name,
                format_bytes(peak.at_least),
                format_bytes(limit),
                "planned elsewhere" if profile is None else f"corrected {correction.times} times",
            )
        if not whole or profile is None or not self._optimizers.has_state_of(model, profile):
            return
        # Only at first: what turns out too loose can then still be tightened.
        may_loosen = bucket.loaded.recomputes and correction == Correction()
        if may_loosen and (unused := unused_bytes(peak, predicted, limit)):
            self._correct(bucket, -unused, measured=peak.at_most or 0)
        elif change := mispredicted_bytes(peak, predicted, limit):
            bucket.correct_prediction(change)
            log.info(
                "%s: measured a peak of %s, predicted %s. The plan stays, and its prediction is corrected",
                self._name,
                format_bytes(peak.at_least),
                format_bytes(predicted),
            )

    def _correct(self, bucket: PlannedBucket, change: int, *, measured: int) -> None:
        """Add `change`, by which the measured peak differs from the predicted one, and plan again."""
        predicted = bucket.policy.predicted.peak_bytes
        before = bucket.correction
        tried = replace(before, times=before.times + 1)
        with self._lock:
            try:
                needs = self._plan_again(bucket, replace(tried, nbytes=before.nbytes + change))
            except (PlannerError, RemoteError) as error:
                bucket.correction = tried
                log.warning(
                    "%s: measured a peak of %s, predicted %s. Planning again failed (%s), so the present "
                    "plan stays",
                    self._name,
                    format_bytes(measured),
                    format_bytes(predicted),
                    first_line(error),
                )
                return
        if needs is not None:
            bucket.warned_over_budget = True
            self._planner.warn_over_budget(
                needs,
                f"measured {format_bytes(measured)}, predicted {format_bytes(predicted)}; no plan "
                f"counts the difference of {format_bytes(change)}",
            )
            return
        log.warning(
            "%s: measured a peak of %s, predicted %s, for a budget of %s. It is planned again, with a "
            "correction of %s: %d of %d ops are recomputed, and the predicted peak is %s",
            self._name,
            format_bytes(measured),
            format_bytes(predicted),
            format_bytes(self._planner.budget_bytes or 0),
            format_bytes(change),
            bucket.policy.recomputed,
            len(bucket.policy.decisions),
            format_bytes(bucket.policy.predicted.peak_bytes),
        )

    def tighten(self, bucket: PlannedBucket, allocator: AllocatorPeak | None, before: int) -> None:
        """Plan again for less memory than the device turned out to have.

        Args:
            bucket: whose step ran out of memory.
            allocator: of the device, if it counts by itself.
            before: what it counted before the step.

        Raises:
            PlannerError: the planner found no tighter plan.
            RemoteError: the service did not make one.
        """
        had = bucket.policy.predicted.peak_bytes
        aim = int(had * TIGHTER)
        if allocator is not None and (counted := allocator.allocated_peak()) > before:
            aim = min(aim, counted)  # so much the device had
        withheld = max(0, self._planner.limit - aim)
        with self._lock:
            self._plan_again(bucket, replace(bucket.correction, withheld=withheld), tighter=True)
        log.warning(
            "%s ran out of memory under a plan with a peak of %s. It is planned again for a peak of %s, and "
            "the step runs again",
            self._name,
            format_bytes(had),
            format_bytes(bucket.policy.predicted.peak_bytes),
        )

    def _plan_again(
        self, bucket: PlannedBucket, correction: Correction, *, tighter: bool = False
    ) -> int | None:
        """Load the plan for `correction` into `bucket`, or the tightest plan if none fits.

        Returns:
            The bytes that the step then needs, corrections included; None if they are within the limit.

        Args:
            tighter: raise if the tightest plan has no smaller peak than the present one.

        Raises:
            PlannerError, RemoteError: no plan was found; the bucket is as it was.
        """
        assert bucket.profile is not None
        within = max(1, self._planner.limit - correction.total)
        policy, made, infeasible = self._planner.plan_or_tightest(
            bucket.profile, within, bucket.step.extra_static
        )
        needs = None
        if infeasible is not None:
            if (
                tighter
                and policy.predicted.peak_bytes >= bucket.policy.predicted.peak_bytes - correction.nbytes
            ):
                raise infeasible
            needs = policy.predicted.peak_bytes + correction.total
        policy = policy.model_copy(update={"budget_bytes": self._planner.budget_bytes})
        bucket.correction = correction
        bucket.load(corrected(policy, correction.nbytes, correction.total), made)
        return needs


def _types(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    return ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))


@dataclass(slots=True)
class _Readings:
    """Readings of the allocator's counter in one step."""

    bucket: PlannedBucket
    counts: list[int]  # from before forward on
    written: int  # `PeakWatch.written` before forward


class PeakWatch:
    """Compares the first steps of each plan with the allocator's counter, where the device has one.

    Attributes:
        allocator: of the model's device, once a step was planned here.
    """

    def __init__(self, model: nn.Module, optimizers: ModelOptimizers, replanner: Replanner) -> None:
        self.allocator: AllocatorPeak | None = None
        self._model = weakref.ref(model)
        self._optimizers = optimizers
        self._replanner = replanner
        self._readings: _Readings | None = None  # of the step that runs, if it is compared
        self._written_at_first = self.written()

    @property
    def reading(self) -> bool:
        """Return True if the step that runs is compared."""
        return self._readings is not None

    def begin_step(self, bucket: PlannedBucket, *, compares: bool = False) -> None:
        """Take the first reading of a step under `bucket`, if it is one to compare.

        Args:
            compares: backward compares contents in this step, for which it allocates up to 2 MiB more.
        """
        compared = bucket.statistics.compared
        if (
            not compares
            and self.allocator is not None
            and compared < WATCHED_STEPS
            and self.is_complete(bucket)
        ):
            self._readings = _Readings(bucket, [self.allocator.allocated_peak()], self.written())

    def read(self) -> None:
        """Take one more reading of the step that runs."""
        if self._readings is not None and self.allocator is not None:
            self._readings.counts.append(self.allocator.allocated_peak())

    def discard(self) -> None:
        """Drop the readings of the step that runs: it will not end, or the counter is about to be reset."""
        self._readings = None

    def end_step(self) -> None:
        """Compare the step that is over with its prediction."""
        self.read()
        readings, self._readings = self._readings, None
        if readings is None:
            return
        bucket = readings.bucket
        bucket.statistics.add(PeakBounds.of(readings.counts))
        last = bucket.statistics.compared == WATCHED_STEPS
        self._judge(bucket, whole=last and self.written() != readings.written)

    def judge_exact(self, bucket: PlannedBucket, nbytes: int, *, written: int) -> None:
        """Compare a peak that was measured exactly, in a block before which `written` was counted."""
        bucket.statistics.peak = PeakBounds.exactly(nbytes)
        self._judge(bucket, whole=self.written() != written)

    def _judge(self, bucket: PlannedBucket, *, whole: bool) -> None:
        if (model := self._model()) is not None:
            self._replanner.replan_if_mispredicted(model, bucket, whole=whole)

    def is_complete(self, bucket: PlannedBucket) -> bool:
        """Return True if all of the optimizer's state exists, so that a step now needs as much as later ones.

        Before the optimizer's first step its state is missing, so a correction would be too small, and one
        of few would be used up.
        """
        model = self._model()
        return (
            bucket.profile is None
            or self.written() != self._written_at_first
            or (model is not None and self._optimizers.has_state_of(model, bucket.profile))
        )

    def written(self) -> int:
        """Return a number that rises with every step of the optimizer.

        Version counters count what an unknown optimizer writes.
        """
        model = self._model()
        parameters = parameters_of(model) if model is not None else ()
        return sum(version_counter(p) for p in parameters if p.requires_grad) + self._optimizers.steps
