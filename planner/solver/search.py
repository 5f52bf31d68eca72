"""Search for a save set that is proven good enough: relax, look near the relaxation, simulate, refine.

One search serves both objectives: the least recompute time within a budget, and the smallest peak.

NOTE [ What is proven ]

The program that HiGHS solves is a relaxation (docs/formulation.md): every save set that fits satisfies its
rows. So its bound holds for every plan, in every round, and the largest one counts. A plan is accepted
only if the simulator finds that it fits. Where the simulator finds a peak above the budget, the program gets
the row of that moment. If it has the row already, that save set alone is ruled out. No plan that fits is lost
by this. Merged ops are an exception: docs/formulation.md, section 3, says when.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import replace

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes, simulate
from autoac.planner.problem.graph import SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.constrained_moments import first_moments, moments_over_budget
from autoac.planner.solver.efforts import (
    Effort,
    EffortResult,
    Round,
    blocks,
    efforts,
    lowered_limits,
    rounded,
)
from autoac.planner.solver.highs import Stopped
from autoac.planner.solver.incumbent import Goal, Incumbent
from autoac.planner.solver.moments import ConstrainedMoment
from autoac.planner.solver.program import build_program
from autoac.planner.solver.start.fill import filled
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance

ONCE = {rounded, blocks, lowered_limits}  # efforts that later rounds would hardly help
RELAXED = {rounded, lowered_limits}  # efforts that solve only relaxations


class Search:
    """A search for candidates near the relaxation, then farther away, until one is proven good enough.

    Each round begins with the relaxation without integers. It takes a fraction of a second, and its bound is
    within a percent or two of the best plan. Nearly all of its decisions are whole already, and its prices
    (reduced costs) say how much each column would cost if it were changed. Then the efforts of efforts.py
    follow, the cheapest first. The round ends when the goal is reached or a candidate shows where the program
    lacks rows.

    Source: docs/formulation.md, section 7.
    """

    def __init__(
        self,
        problem: SearchProblem,
        budget: int | None,
        *,
        goal: Goal,
        allowance: Allowance,
        start: Iterable[SaveSet] = (),
        moments: Iterable[ConstrainedMoment] = (),
        bound: float = 0.0,
    ) -> None:
        """Prepare a search.

        Args:
            problem: the graph.
            budget: bytes; None to minimise the peak.
            goal: when to stop.
            allowance: work and time.
            start: save sets to compare with; at least one to minimise the peak.
            moments: the first rows of the budget, such as those of a neighboring budget.
            bound: a cost that is already proven to be the least.
        """
        self.problem, self.budget, self.allowance = problem, budget, allowance
        self.options, self.rounds = problem.options, 0
        self.best = Incumbent(problem.graph, budget, goal, bound, allowance)
        self.excluded: list[SaveSet] = []
        self._done: set[Effort] = set()  # of those that run once
        self._begun: Round | None = None  # by `relax`, for `run` to go on with
        for save_set in start:
            self.best.offer(save_set)
        if budget is not None and self.best.save_set is None:
            within = problem.segments.within(budget)
            if within is not None:
                self.best.offer(within)
        everything = problem.graph.everything
        likely = (everything, self.best.save_set or everything)
        self.moments = set(moments) or first_moments(problem.windows, likely)

    def relax(self) -> None:
        """Look for a first save set that fits by relaxations alone, which take much less than integers do."""
        while self.best.save_set is None and self._begun is None and not self.allowance.over:
            if self._round(RELAXED) is not None:
                return

    def run(self) -> Stopped:
        """Search, and return the reason to stop.

        OPTIMAL: the goal is reached. INFEASIBLE: no save set fits. At a limit, the best plan is filled.
        """
        while not (self.best.is_good_enough or self.allowance.over):
            if (stopped := self._round()) is not None:
                return stopped
        best, allowance = self.best, self.allowance
        is_short = best.goal.enough is None and not best.is_good_enough and not allowance.out_of_time
        if is_short and self.budget is not None and best.save_set is not None:
            best.offer(filled(self.problem.graph, best.save_set, self.budget))
        return Stopped.OPTIMAL if best.is_good_enough else allowance.stopped

    def _round(self, only: Container[Effort] | None = None) -> Stopped | None:
        """Solve the relaxation with the rows so far, and take answers until the program has to change.

        Return the reason to stop, if that is known. None: the goal or a limit is reached, rows were added, or
        the efforts of `only` are over.
        """
        now, self._begun = self._begun or self._relaxation(), None
        if now.relaxed.stopped is Stopped.INFEASIBLE:
            if self.best.save_set is not None and not self.excluded:  # it fits, so the program is wrong
                self.best.bound = 0.0
                return Stopped.FAILED
            return self._nothing_better()
        if now.relaxed.stopped is not Stopped.OPTIMAL:
            return None if self.allowance.over else Stopped.FAILED
        answer = EffortResult()
        for effort in efforts(now):
            if effort in self._done or (only is not None and effort not in only):
                continue
            if effort in ONCE:
                self._done.add(effort)
            for answer in effort(now):
                if math.isinf(answer.bound) and answer.bound > 0:
                    return self._nothing_better()
                if self._take(answer) or self.best.is_good_enough or self.allowance.over:
                    return None
            if self.best.is_good_enough or self.allowance.over:
                return None
        if only is not None:
            self._begun = now
            return None
        if answer.save_set is None:
            return Stopped.FAILED
        self.excluded.append(answer.save_set)  # its cost by the program was too low
        return None

    def _relaxation(self) -> Round:
        """Build the program with the moments so far, and solve it without integers."""
        self.rounds += 1
        moments = frozenset(self.moments)
        built = build_program(
            self.problem.arrays, self.budget, moments, excluded=self.excluded, options=self.options
        )
        relaxed = self.allowance.solve(built.program, relaxed=True)
        self.best.raise_bound(relaxed.bound * built.cost_scale)
        return Round(
            self.problem, self.budget, moments, self.options, built, relaxed, self.best, self.allowance
        )

    def _nothing_better(self) -> Stopped:
        """Return why to stop, once no save set is better than the best, except ones that were ruled out."""
        if self.best.save_set is None:
            return Stopped.INFEASIBLE
        self.best.bound = self.best.cost
        return Stopped.OPTIMAL

    def _take(self, answer: EffortResult) -> bool:
        """Take what `answer` finds and proves; return True if the program changes with it."""
        self.best.raise_bound(answer.bound)
        if answer.save_set is None:
            return False
        if not answer.adds_rows:
            self.best.offer(without_cost_free_recomputes(self.problem.graph, answer.save_set))
            return False
        if self.budget is None and self.allowance.out_of_work:
            return False  # so that more work never finds a larger peak
        too_large = self._simulate(answer.save_set, answer.objective)
        new = [moment for moment in too_large if moment not in self.moments]
        self.moments.update(new)
        if new or not (too_large and answer.is_solution):
            return bool(new)
        if not self.options.lazy_rows:
            # The candidate runs an op earlier than the runtime would, where no row forbids it yet.
            self.options = replace(self.options, sparse_stride=1, lazy_rows=True)
        else:
            self.excluded.append(answer.save_set)
        return True

    def _simulate(self, candidate: SaveSet, objective: float) -> list[ConstrainedMoment]:
        """Keep `candidate` if it is the best, and return the moments at which it is too large.

        Args:
            candidate: a save set.
            objective: its cost by the program. Without a budget, a moment with more bytes is too large.
        """
        graph, windows = self.problem.graph, self.problem.windows
        tidy = without_cost_free_recomputes(graph, candidate)
        tidy_peak = peak_bytes(graph, tidy)
        if self.budget is not None and tidy_peak <= self.budget:
            self.best.take(recompute_us(graph, tidy), tidy)
            return []
        timeline = simulate(graph, candidate)  # its peak is seldom smaller than that of `tidy`
        peak = timeline.peak.live_bytes
        if self.budget is None:
            self.best.take(tidy_peak, tidy)
            self.best.take(peak, candidate)
            over = moments_over_budget(windows, math.ceil(objective), candidate, timeline)
            return [moment for moment in over if moment not in self.moments]
        if peak <= self.budget:
            self.best.take(recompute_us(graph, candidate), candidate)
            return []
        return moments_over_budget(windows, self.budget, candidate, timeline)
