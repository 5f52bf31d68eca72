"""Keep the best save set that a search has found, with the bound that is proven for all save sets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import fits, peak_bytes
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.solver.time_limit import Allowance, relative_gap

CLOSED = 1e-9  # a bound within this share of a cost counts as equal to it
SHARE = 0.98  # of the gap in the goal that a solve may use up; the rest is for rounding


@dataclass(frozen=True, slots=True)
class Goal:
    """Says when a search may end: as soon as one of these conditions is met."""

    gap: float  # the best cost is proven to exceed the least by at most this fraction of itself
    tolerance: float = 0.0  # or by at most this much
    enough: float | None = None  # the best cost is at most this, or every cost is proven to be above it


class Incumbent:
    """The best save set so far, and the proven bound of the cost.

    The cost is the recompute time in microseconds, or the peak in bytes in a search without a budget.

    Invariant: `bound` holds for every save set that fits; `save_set` fits, by the simulator.
    """

    def __init__(
        self, graph: Graph, budget: int | None, goal: Goal, bound: float, allowance: Allowance
    ) -> None:
        self.cost = math.inf
        self.save_set: SaveSet | None = None
        self.bound, self.goal = bound, goal
        self._graph, self._budget, self._allowance = graph, budget, allowance

    @property
    def gap(self) -> float:
        """Return the share of the cost that is not proven to be necessary; infinite without a save set."""
        return math.inf if self.save_set is None else relative_gap(self.cost, self.bound)

    @property
    def allowed_gap(self) -> float:
        """Return the larger of the goal's gap and the goal's tolerance as a share of the cost."""
        goal = self.goal
        return max(goal.gap, min(goal.tolerance / self.cost, 1.0) if self.cost > 0 else 0.0)

    @property
    def target(self) -> float:
        """Return the cost up to which a save set is proven to be good enough."""
        goal = self.goal
        return max(self.bound / max(1 - goal.gap * SHARE, 0.01), self.bound + goal.tolerance * SHARE)

    @property
    def is_good_enough(self) -> bool:
        """Return True if the goal is reached."""
        enough = self.goal.enough
        if enough is not None and (self.cost <= enough or self.bound > enough):
            return True
        return self.gap <= max(self.allowed_gap, CLOSED)

    def offer(self, save_set: SaveSet) -> None:
        """Take `save_set` if it fits and costs less."""
        if self._budget is None:
            if math.isinf(self.cost) or fits(self._graph, save_set, int(self.cost) - 1):
                self.take(peak_bytes(self._graph, save_set), save_set)
            return
        spent = recompute_us(self._graph, save_set)
        if spent < self.cost and fits(self._graph, save_set, self._budget):
            self.take(spent, save_set)

    def take(self, cost: float, save_set: SaveSet) -> None:
        """Take `save_set`, which fits, if its `cost` is less."""
        if cost < self.cost:
            self.cost, self.save_set = cost, save_set
            self.bound = min(self.bound, cost)  # it may be larger by rounding

    def raise_bound(self, bound: float) -> None:
        """Raise the proven bound to `bound`, if it is larger and finite, and report the progress.

        A bound above the best cost only says that no save set is better. It is lowered to the best cost.
        """
        if math.isfinite(bound):
            if self._budget is None:  # peaks are whole numbers
                bound = math.ceil(bound * (1 - 1e-9))
            self.bound = max(self.bound, min(bound, self.cost))
        self._allowance.report(None if self.save_set is None else self.cost, self.bound)
