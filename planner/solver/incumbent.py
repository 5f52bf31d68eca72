"""Judge the save sets that a search comes across, and keep the best with the bound that is proven for all."""

from __future__ import annotations

import math
from collections.abc import Set

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import fits, peak_bytes, simulate
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.constrained_moments import moments_over_budget
from autoac.planner.solver.highs import Floats
from autoac.planner.solver.moments import ConstrainedMoment
from autoac.planner.solver.program import UNDECIDED, BuiltProgram
from autoac.planner.solver.start.search_problem import Problem
from autoac.planner.solver.time_limit import Allowance, relative_gap


class Incumbent:
    """The best save set so far, and the proven bound of the cost.

    The cost is the recompute time in microseconds, or the peak in bytes in a search without a budget.

    Invariant: `bound` holds for every save set that fits; `save_set` fits, by the simulator.
    """

    def __init__(self, graph: Graph, budget: int | None, bound: float, allowance: Allowance) -> None:
        self.cost = math.inf
        self.save_set: SaveSet | None = None
        self.bound = bound
        self._graph, self._budget, self._allowance = graph, budget, allowance

    @property
    def gap(self) -> float:
        """Return the share of the cost that is not proven to be necessary; infinite without a save set."""
        return math.inf if self.save_set is None else relative_gap(self.cost, self.bound)

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

        A bound above the best cost says that nothing is better, so it is cut down to that.
        """
        if math.isfinite(bound):
            if self._budget is None:  # peaks are whole numbers
                bound = math.ceil(bound * (1 - 1e-9))
            self.bound = max(self.bound, min(bound, self.cost))
        self._allowance.report(None if self.save_set is None else self.cost, self.bound)


class Judge:
    """Simulate candidates, pass the ones that fit on to the incumbent, and note where others are too large.

    Invariant: `missing` is about the last candidate: None if it fits, or if nothing is known of it.
    """

    def __init__(
        self, problem: Problem, budget: int | None, best: Incumbent, moments: Set[ConstrainedMoment]
    ) -> None:
        self.missing: list[ConstrainedMoment] | None = None
        self._problem, self._graph, self._budget, self._best = problem, problem.graph, budget, best
        self._moments = moments  # with rows

    def consider(self, candidate: SaveSet, objective: float) -> int:
        """Keep `candidate` if it is the best; else note where it is too large.

        Args:
            candidate: a save set.
            objective: its cost by the program.

        Returns:
            its peak.
        """
        self.missing = None
        tidy = without_cost_free_recomputes(self._graph, candidate)
        tidy_peak = peak_bytes(self._graph, tidy)
        if self._budget is not None and tidy_peak <= self._budget:
            self._best.take(recompute_us(self._graph, tidy), tidy)
            return tidy_peak
        windows, blocks = self._problem.windows, self._problem.blocks
        timeline = simulate(self._graph, candidate)  # its peak is seldom smaller than that of `tidy`
        peak = timeline.peak.live_bytes
        if self._budget is None:
            self._best.take(tidy_peak, tidy)
            self._best.take(peak, candidate)
            over = moments_over_budget(windows, math.ceil(objective), candidate, timeline, blocks)
            self.missing = [moment for moment in over if moment not in self._moments] or None
        elif peak <= self._budget:
            self._best.take(recompute_us(self._graph, candidate), candidate)
        else:
            self.missing = moments_over_budget(windows, self._budget, candidate, timeline, blocks)
        return min(tidy_peak, peak)

    def consider_rounded(self, built: BuiltProgram, decisions: Floats, objective: float) -> None:
        """Consider the relaxation's decisions, rounded.

        If that takes too much memory and there is a budget, two other ways to round are tried. Without what
        the relaxation saves in part, a large model takes less and is hardly slower. With all of it, a chain
        of ops is cut up that would run again at once; `missing` is then about this candidate.
        """
        peak = self.consider(built.rounded(decisions), objective)
        if self._budget is None or self.missing is None:
            return
        whole = built.rounded(decisions, 1 - UNDECIDED)
        self._best.offer(without_cost_free_recomputes(self._graph, whole))
        parts = built.rounded(decisions, UNDECIDED)
        if peak_bytes(self._graph, parts) < peak:
            self.consider(parts, objective)
