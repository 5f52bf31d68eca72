"""Judge a training loop that does other things than its plan was made for: what to warn of and plan next.

`forwards_in_flight.py` observes the loop, for example two forwards before one backward; here it is judged.
Nothing is said if even a step that saves everything would fit.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ac_client.planning.forwards_in_flight import BackwardEvent, ForwardsInFlight
from ac_client.planning.loaded_policy import PlannedBucket
from ac_client.planning.peak_counter import FAR_UNDER
from ac_client.planning.plan_batch import BudgetPlanner
from autoac.planner.memory.simulate import waiting_bytes
from autoac.planner.units import format_bytes
from autoac.profiler import Loop

log = logging.getLogger("ac_client")

MOST_FORWARDS = 8  # that are planned for unasked: a profile runs them all


class LoopWatch:
    """Watches the training loop around one planned model.

    Args:
        forwards: as passed to `apply` for `forwards_in_flight`.
        has_loss: the plan knows the loss that backward starts from.

    Attributes:
        forwards: number of forwards before one backward to plan for.
    """

    def __init__(self, planner: BudgetPlanner, forwards: int | None, *, has_loss: bool) -> None:
        self.forwards = forwards or 1
        self._fixed = forwards is not None
        self._planner = planner
        self._name = planner.name
        self._has_loss = has_loss
        self._in_flight = ForwardsInFlight()
        self._warned_of_skipped = False
        self._most = 1  # in flight at once, so far
        self._warned_up_to = 0  # plans for fewer forwards than this were warned of

    def waiting(self) -> int:
        """Return how many forwards wait for their backward."""
        return self._in_flight.waiting()

    def loop_to_plan(self, bucket: PlannedBucket, waiting: int) -> Loop:
        """Return the form of loop to plan for, now that a forward of `bucket` begins while others wait.

        As soon as more forwards are in flight than were planned for, this forward is planned again: for twice
        as many, since more may follow, and from the next step on for as many as there were.
        """
        self._most = max(self._most, waiting + 1)
        if waiting + 1 > self.forwards:
            if not self._fits(bucket, waiting):
                self._warn_of_more_forwards(bucket, waiting + 1)
                if waiting < MOST_FORWARDS:
                    self.forwards = min(max(2 * self.forwards, waiting + 1), MOST_FORWARDS)
        elif not waiting and not self._fixed:
            self.forwards = min(self.forwards, self._most)
        observed = bucket.observed.loop
        return observed if observed.forwards == self.forwards else replace(observed, forwards=self.forwards)

    def forward_ended(self, bucket: PlannedBucket, out: Any) -> None:
        """Watch the forward that returned `out`; warn if it ran modules that the profiled one skipped."""
        if bucket.ran_skipped and not self._warned_of_skipped and not self.fits_twice(bucket):
            self._warned_of_skipped = True
            some = sorted(bucket.ran_skipped, key=lambda path: (len(path), path))
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            self._warn(
                bucket,
                f"modules run that the profiled forward skipped ({', '.join(some[:3])}{more}). They "
                "are decided like the nearest layer that it ran, or else saved",
                "a first batch that runs all modules is planned best",
                again=True,
            )
        self._in_flight.add(bucket, out, self, has_loss=self._has_loss)

    def backward_begins(self, event: BackwardEvent) -> None:
        """Compare what the loop holds as a backward begins with the plan, and warn of a difference."""
        bucket = event.bucket
        if self._planner.budget_bytes is None:
            return
        if event.creates_graph:
            self._graph_created(bucket)
        elif (event.retains_graph or not event.first) and not bucket.observed.warned_of_graph:
            self._graph_retained(bucket)
        if not event.first or bucket.profile is None or bucket.replaced:
            return
        self._judge_outputs(bucket, event)
        if event.nbytes_outside and not self._has_loss and not bucket.observed.warned_of_loss:
            self._loss_computed_outside(bucket, event.nbytes_outside)

    def fits_twice(self, bucket: PlannedBucket) -> bool:
        """Return True if a step that needs twice as much beyond the static bytes fits as well."""
        return self._fits(bucket, 1)

    def close(self) -> None:
        """Stop watching."""
        self._in_flight.forget()

    def _fits(self, bucket: PlannedBucket, waiting: int) -> bool:
        """Return True if a forward fits while `waiting` others wait, even if these have saved everything."""
        predicted, profile = bucket.policy.predicted, bucket.profile
        own = predicted.peak_bytes - predicted.static_bytes + (profile.static.inputs if profile else 0)
        planned = self._planner.budget_bytes is not None
        limit = self._planner.limit if planned else bucket.policy.budget_bytes
        return predicted.peak_bytes + waiting * own <= limit

    def _warn(self, bucket: PlannedBucket, observed: str, advice: str, *, again: bool = False) -> None:
        """Warn of a step that its plan was not made for.

        Args:
            bucket: under which the step runs.
            observed: what the step does.
            advice: what the user can do about it.
            again: the bucket is planned again for such steps.
        """
        then = ""
        if again:
            planned_here = bucket.profile is not None
            then = "It is planned again; " if planned_here else "It was planned elsewhere and stays; "
        log.warning(
            "%s: %s: this step may go over the budget of %s. %s%s",
            self._name,
            observed,
            format_bytes(self._planner.budget_bytes or bucket.policy.budget_bytes),
            then,
            advice if then else advice[0].upper() + advice[1:],
        )

    def _warn_of_more_forwards(self, bucket: PlannedBucket, in_flight: int) -> None:
        planned = len(bucket.loaded.forwards)
        if self._warned_up_to >= planned:
            return
        self._warned_up_to = max(in_flight, MOST_FORWARDS)
        self._warn(
            bucket,
            f"{in_flight} forwards wait for one backward, and the plan is for {planned}",
            "pass forwards_in_flight=N to ac_client.apply to have the first step planned for N",
            again=in_flight <= MOST_FORWARDS,
        )

    def _graph_created(self, bucket: PlannedBucket) -> None:
        if bucket.observed.warned_of_graph or self._fits(bucket, 2):
            return
        bucket.observed.warned_of_graph = True
        self._warn(
            bucket,
            "a backward with create_graph=True (a gradient penalty) runs over its forward, which no plan "
            "counts, so the budget cannot be kept",
            "compute the penalty in the forward of the module that is planned, or leave headroom_gb for it",
        )

    def _graph_retained(self, bucket: PlannedBucket) -> None:
        observed = bucket.observed
        if observed.loop.retains or self.fits_twice(bucket):
            return
        observed.loop = replace(observed.loop, retains=True)
        self._warn(
            bucket,
            "a backward retains its graph (retain_graph=True) and frees nothing that forward saved",
            "one backward of the sum of the losses needs less",
            again=True,
        )

    def _judge_outputs(self, bucket: PlannedBucket, event: BackwardEvent) -> None:
        drops, observed, predicted = bucket.step.loop.drops, bucket.observed, bucket.policy.predicted
        if drops and not drops <= event.dropped:
            if observed.loop.drops:
                observed.loop = replace(observed.loop, drops=frozenset())
                observed.holds_outputs = True
                held = bucket.profile.output_nbytes(drops - event.dropped) if bucket.profile else 0
                if predicted.peak_bytes + held > self._planner.limit:
                    self._warn(
                        bucket,
                        f"outputs of {format_bytes(held)} are held in backward, and the plan is for a loop "
                        "that drops them before",
                        "drop them in every step, as in loss = model(batch).loss, or hold them in every step",
                        again=True,
                    )
        elif (
            not drops
            and not observed.holds_outputs
            and event.dropped_nbytes > FAR_UNDER * min(self._planner.limit, predicted.peak_bytes)
        ):
            observed.loop = replace(observed.loop, drops=event.dropped)

    def _loss_computed_outside(self, bucket: PlannedBucket, nbytes: int) -> None:
        limit = self._planner.limit
        if nbytes <= FAR_UNDER * limit:
            return
        plan = bucket.plan
        assert plan is not None
        held = plan.graph.static_bytes + waiting_bytes(plan.graph, plan.save_set)
        if held + nbytes > limit:
            bucket.observed.warned_of_loss = True
            self._warn(
                bucket,
                f"between the model's forward and its backward about {format_bytes(nbytes)} were made, which "
                "are in no plan",
                "pass loss=... to ac_client.apply, or compute the loss in the model's forward",
            )
