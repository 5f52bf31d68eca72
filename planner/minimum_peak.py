"""The smallest peak that any save set has: found, and proven from below."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autoac.planner.formats.constraints import Constraints, constrained, no_forward_budget
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.simulate import peak_bytes, simulate
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.constrained_moments import first_points, too_large
from autoac.planner.solver.highs import OnProgress, Outcome, Stopped
from autoac.planner.solver.program import Built, Options, Point, assignment, build_program
from autoac.planner.solver.search import FEW_NODES, SHARE, Problem, priced_out
from autoac.planner.solver.time_limit import Allowance, Clock, Stopwatch, check_limits

WORK_LIMIT = 15.0  # see NOTE [ Work ] in highs.py
GAP = 0.01
NEIGHBOURHOODS = (0.1, 0.5)  # shares of the distance from bound to found that a change may cost


@dataclass(frozen=True, slots=True)
class MinimumPeak:
    """The smallest peak, in bytes: no save set beats `proven`, and `save_set` reaches `found`."""

    proven: int
    found: int
    save_set: SaveSet = field(repr=False)
    stopped: Stopped


def find_minimum_peak(
    profile: Profile | Graph,
    *,
    constraints: Constraints | None = None,
    work_limit: float = WORK_LIMIT,
    time_limit_s: float = 120.0,
    clock: Clock | None = None,
    gap: float = GAP,
    progress: OnProgress | None = None,
) -> MinimumPeak:
    """The smallest peak that any save set has, as far as it can be found and proven with the work.

    A `plan` within a budget of `found` starts from the same search, or from `save_set` if it is passed on.

    Args:
        profile: one training step, or the Graph of one.
        constraints: what every save set must keep to; no budget of forward.
        work_limit: units of work, each about a second of one core; the same everywhere, unlike seconds.
        time_limit_s: seconds on `clock`, or else of the solver's own. A safety net: see `stopped`.
        clock: such as `time.monotonic`.
        gap: stop once `found` is proven to be within this fraction of the smallest.
        progress: called now and then while solving; returning True stops the solver.

    Raises:
        InvalidLimit: `gap` is not from 0 to 1, or another limit is negative.
        InvalidConstraints: a pattern stands for nothing, pins contradict each other, or forward has a budget.
    """
    check_limits(gap, time_limit_s, work_limit)
    allowance = Allowance(work_limit, Stopwatch(time_limit_s, clock), progress)
    problem = Problem(constrained(profile, no_forward_budget(constraints)))
    return FloorSearch(problem, allowance, gap).run()


class FloorSearch:
    """As `search.Search`, with the peak as what is minimised: relax, look near, simulate, refine.

    Any candidate counts here, for each has some peak; the best simple save set is the first.
    """

    def __init__(self, problem: Problem, allowance: Allowance, gap: float = GAP) -> None:
        """Args: `allowance`: what it may use up. `gap` as in `floor`."""
        self.problem, self.graph, self.f = problem, problem.graph, problem.facts
        self.proven, self.gap = problem.bounds.floor, gap
        self.within: int | None = None
        self.allowance = allowance
        peaks = [(peak_bytes(self.graph, s), i, s) for i, (_, s) in enumerate(problem.simple)]
        self.found, _, self.save_set = min(peaks)
        self.points: set[Point] = set()
        self.options = Options()
        self.excluded: list[SaveSet] = []

    def decide(self, budget: int) -> MinimumPeak:
        """Search until a save set within `budget` is found or proven not to exist, if the work is enough."""
        self.within = budget
        first = self.run()
        if first.stopped is not Stopped.OPTIMAL or self._done_within(budget):
            return first
        self.gap = 0.0
        return self.run()

    def run(self) -> MinimumPeak:
        """Search until the gap is closed, the work or the time is over, or `progress` stops it.

        A candidate of a solve that the limit on work has cut short is not used: so what is found with less
        work is found with more as well.
        """
        efforts = [self._rounded, *[self._near] * len(NEIGHBOURHOODS), self._among_all]
        at = 0
        self.points = self.points or first_points(self.f, (self.graph.everything, self.save_set))
        while not self._done:
            if self.allowance.over:
                return MinimumPeak(self.proven, self.found, self.save_set, self.allowance.stopped)
            built, relaxed = self._relaxation()
            if relaxed.stopped is Stopped.INFEASIBLE:
                self.proven = self.found  # all save sets that are smaller were ruled out: there are none
                break
            if relaxed.stopped is not Stopped.OPTIMAL:
                if not self.allowance.over:
                    return MinimumPeak(self.proven, self.found, self.save_set, Stopped.FAILED)
                continue
            new = False
            while not (new or self._done or self.allowance.over):
                effort = min(at, len(efforts) - 1)
                outcome = efforts[effort](built, relaxed, effort)
                if self.allowance.out_of_work:
                    break
                new = self._judge(built, outcome)
                if new:
                    at = min(at, 1)
                elif effort < len(efforts) - 1:
                    at += 1
                elif outcome.values is None:
                    if outcome.stopped is Stopped.INFEASIBLE:
                        self.proven = self.found
                    break
                elif not self.options.lazy:
                    # The candidate runs an op earlier than the runtime would, where no row forbids it yet.
                    self.options = replace(self.options, apart=1, lazy=True)
                    break
                else:
                    self.excluded.append(built.save_set(outcome.values))
                    break
        return MinimumPeak(self.proven, self.found, self.save_set, Stopped.OPTIMAL)

    @property
    def _done(self) -> bool:
        if self.within is not None and self._done_within(self.within):
            return True
        return self.found - self.proven <= self.gap * self.found

    def _done_within(self, budget: int) -> bool:
        return self.found <= budget or self.proven > budget

    def _relaxation(self) -> tuple[Built, Outcome]:
        built = build_program(
            self.problem.columns, None, self.points, excluded=self.excluded, options=self.options
        )
        outcome = self.allowance.solve(built.program, built.cost_scale, relaxed=True)
        self._learn(built, outcome)
        return built, outcome

    def _rounded(self, _built: Built, relaxed: Outcome, _effort: int) -> Outcome:
        return relaxed

    def _near(self, built: Built, relaxed: Outcome, effort: int) -> Outcome:
        cutoff = self.found / built.cost_scale
        slack = max(cutoff - relaxed.bound, 0.0)
        program = priced_out(
            built.program.costing_at_most(cutoff), relaxed, NEIGHBOURHOODS[effort - 1] * slack
        )
        target = relaxed.bound + slack / 4
        return self.allowance.solve(
            program, built.cost_scale, target=target, options={"mip_max_nodes": FEW_NODES}
        )

    def _among_all(self, built: Built, relaxed: Outcome, _effort: int) -> Outcome:
        cutoff = self.found / built.cost_scale
        program = priced_out(built.program.costing_at_most(cutoff), relaxed, cutoff - relaxed.bound)
        start = assignment(self.f, built, self.save_set)
        outcome = self.allowance.solve(program, built.cost_scale, gap=self.gap * SHARE, start=start)
        self._learn(built, outcome)
        return outcome

    def _learn(self, built: Built, outcome: Outcome) -> None:
        """A bound of the whole program holds for every save set that is not better than `found` already."""
        if math.isfinite(outcome.bound):
            bound = math.ceil(outcome.bound * built.cost_scale * (1 - 1e-9))
            self.proven = max(self.proven, min(self.found, bound))
        self.allowance.tell(self.found, self.proven)

    def _judge(self, built: Built, outcome: Outcome) -> bool:
        """Simulate a candidate; whether it has peaks that have no row yet."""
        if outcome.values is None:
            return False
        candidate = built.save_set(outcome.values)
        timeline = simulate(self.graph, candidate)
        tidy = without_cost_free_recomputes(self.graph, candidate)
        for save_set, peak in (
            (tidy, peak_bytes(self.graph, tidy)),
            (candidate, timeline.peak.live_bytes),
        ):
            if peak < self.found:
                self.found, self.save_set = peak, save_set
        reached = math.ceil((outcome.objective or 0.0) * built.cost_scale)
        likeness = self.problem.likeness
        new = [
            point
            for point in too_large(self.f, reached, candidate, timeline, likeness)
            if point not in self.points
        ]
        self.points.update(new)
        return bool(new)
