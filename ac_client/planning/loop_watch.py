"""Judge a training loop that does other things than its plan was made for: what to warn of and plan next.

in_flight.py sees; here it is judged. Nothing is said where even a step that saves everything would fit.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ac_client.planning.forwards_in_flight import ForwardsInFlight, SeenBackward
from ac_client.planning.peak_counter import FAR_UNDER
from ac_client.planning.replan import Planning
from ac_client.planning.shape_buckets import Loaded
from autoac.planner import as_planned
from autoac.planner.memory.simulate import waiting_bytes
from autoac.planner.units import format_bytes
from autoac.profiler.steps.training_loop import Loop

log = logging.getLogger("ac_client")

MOST_FORWARDS = 8  # that are planned for unasked: a profile runs them all


class LoopWatch:
    """Watches the loop around one planned model.

    Attributes:
        forwards: that are planned for, before one backward.
    """

    def __init__(self, planning: Planning, forwards: int | None, *, has_loss: bool) -> None:
        self.forwards = forwards or 1
        self._given = forwards is not None
        self._planning = planning
        self._name = planning.name
        self._has_loss = has_loss
        self._in_flight = ForwardsInFlight()
        self._told_of_skipped = False
        self._most = 1  # in flight at once, so far
        self._warned = 0  # of plans for fewer forwards than this

    def waiting(self) -> int:
        """Return how many forwards wait for their backward."""
        return self._in_flight.waiting()

    def wanted(self, loaded: Loaded, waiting: int) -> Loop:
        """Return the form of loop to plan for, now that a forward of `loaded` begins while others wait.

        As soon as more forwards are in flight than were planned for, this forward is planned again: for twice
        as many, since more may follow, and from the next step on for as many as there were.
        """
        self._most = max(self._most, waiting + 1)
        if waiting + 1 > self.forwards:
            if not self._fits(loaded, waiting):
                self._warn_of_more(loaded, waiting + 1)
                if waiting < MOST_FORWARDS:
                    self.forwards = min(max(2 * self.forwards, waiting + 1), MOST_FORWARDS)
        elif not waiting and not self._given:
            self.forwards = min(self.forwards, self._most)
        return replace(loaded.seen_loop, forwards=self.forwards)

    def _warn_of_more(self, loaded: Loaded, in_flight: int) -> None:
        planned = len(loaded.ways)
        if self._warned >= planned:
            return
        self._warned = max(in_flight, MOST_FORWARDS)
        self._warn(
            loaded,
            f"{in_flight} forwards wait for one backward, and the plan is for {planned}",
            "pass forwards_in_flight=N to ac_client.apply to have the first step planned for N",
            again=in_flight <= MOST_FORWARDS,
        )

    def _warn(self, loaded: Loaded, seen: str, advice: str, *, again: bool = False) -> None:
        """Warn of a step that its plan was not made for.

        Args:
            loaded: the plan.
            seen: what the step does.
            advice: what to do about it.
            again: it is planned again for that.
        """
        then = ""
        if again:
            planned_here = loaded.profile is not None
            then = "It is planned again; " if planned_here else "It was planned elsewhere and stays; "
        log.warning(
            "%s: %s: this step may go over the budget of %s. %s%s",
            self._name,
            seen,
            format_bytes(self._planning.budget_bytes or loaded.policy.budget_bytes),
            then,
            advice if then else advice[0].upper() + advice[1:],
        )

    def forward_ended(self, loaded: Loaded, out: Any) -> None:
        """Watch the forward that has ended with `out`."""
        if loaded.met and not self._told_of_skipped and not self._fits(loaded, 1):
            self._told_of_skipped = True
            some = sorted(loaded.met, key=lambda path: (len(path), path))
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            self._warn(
                loaded,
                f"modules run that the profiled forward skipped ({', '.join(some[:3])}{more}), and all that "
                "they save is kept",
                "a first batch that runs all modules is planned best",
                again=True,
            )
        self._in_flight.add(loaded, out, self, has_loss=self._has_loss)

    def backward_begins(self, seen: SeenBackward) -> None:
        """Judge what a backward shows."""
        loaded = seen.loaded
        if self._planning.budget_bytes is None:
            return
        if seen.creates_graph:
            self._creates_graph(loaded)
        elif (seen.retains_graph or not seen.first) and not loaded.told_of_graph:
            self._retains_graph(loaded)
        if not seen.first or loaded.profile is None or loaded.replaced:
            return
        self._outputs(loaded, seen)
        if seen.made_outside and not self._has_loss and not loaded.told_of_loss:
            self._loss_outside(loaded, seen.made_outside)

    def fits(self, loaded: Loaded) -> bool:
        """Return True if a step that needs twice as much beyond the static bytes fits as well."""
        return self._fits(loaded, 1)

    def close(self) -> None:
        """Watch no longer."""
        self._in_flight.forget()

    def _fits(self, loaded: Loaded, waiting: int) -> bool:
        """Return True if so many forwards in flight surely fit, whatever they save."""
        predicted, profile = loaded.policy.predicted, loaded.profile
        own = predicted.peak_bytes - predicted.static_bytes + (profile.static.inputs if profile else 0)
        return predicted.peak_bytes + waiting * own <= self._limit(loaded)

    def _limit(self, loaded: Loaded) -> int:
        planning = self._planning
        return planning.limit if planning.budget_bytes is not None else loaded.policy.budget_bytes

    def _creates_graph(self, loaded: Loaded) -> None:
        if loaded.told_of_graph or self._fits(loaded, 2):
            return
        loaded.told_of_graph = True
        self._warn(
            loaded,
            "a backward with create_graph=True (a gradient penalty) runs over its forward, which no plan "
            "counts, so the budget cannot be kept",
            "compute the penalty in the forward of the module that is planned, or leave headroom_gb for it",
        )

    def _retains_graph(self, loaded: Loaded) -> None:
        if loaded.seen_loop.retains or self._fits(loaded, 1):
            return
        loaded.seen_loop = replace(loaded.seen_loop, retains=True)
        self._warn(
            loaded,
            "a backward retains its graph (retain_graph=True) and frees nothing that forward saved",
            "one backward of the sum of the losses needs less",
            again=True,
        )

    def _outputs(self, loaded: Loaded, seen: SeenBackward) -> None:
        drops = loaded.loop.drops
        if drops and not drops <= seen.dropped:
            if loaded.seen_loop.drops:
                loaded.seen_loop = replace(loaded.seen_loop, drops=frozenset())
                loaded.holds_outputs = True
                self._warn(
                    loaded,
                    "outputs are held in backward that earlier steps had let go of",
                    "hold them in every step, or in none",
                    again=True,
                )
        elif (
            not drops
            and loaded.recomputes
            and not loaded.holds_outputs
            and seen.dropped_nbytes > FAR_UNDER * self._planning.limit
        ):
            loaded.seen_loop = replace(loaded.seen_loop, drops=seen.dropped)

    def _loss_outside(self, loaded: Loaded, nbytes: int) -> None:
        limit = self._planning.limit
        if nbytes <= FAR_UNDER * limit:
            return
        assert loaded.profile is not None
        plan = loaded.plan or as_planned(loaded.policy, loaded.profile)
        held = plan.graph.static_bytes + waiting_bytes(plan.graph, plan.save_set)
        if held + nbytes > limit:
            loaded.told_of_loss = True
            self._warn(
                loaded,
                f"between the model's forward and its backward about {format_bytes(nbytes)} were made, which "
                "are in no plan",
                "pass loss=... to ac_client.apply, or compute the loss in the model's forward",
            )
