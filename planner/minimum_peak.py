"""Find the smallest peak that any save set has, and prove a bound from below."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from autoac.planner.formats.constraints import Constraints, without_forward_budget
from autoac.planner.formats.profile import Profile
from autoac.planner.problem.apply_constraints import constrained
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.solver.highs import OnProgress, Stopped
from autoac.planner.solver.incumbent import Goal
from autoac.planner.solver.search import Search
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance, Clock, Stopwatch, check_limits
from autoac.planner.solver.variables import options_for

WORK_LIMIT = 15.0  # see NOTE [ Work ] in highs.py
GAP = 0.01
ONCE_WORK = 5.0  # for a first peak without use groups


@dataclass(frozen=True, slots=True)
class MinimumPeak:
    """The smallest peak, in bytes: no save set beats `proven`, and `save_set` reaches `found`.

    `save_set` is meant for the `start` of a plan of the same profile. Its ids are those of the graph in which
    every op that may have use groups has them, not those of `build(profile)`.
    """

    proven: int
    found: int
    save_set: SaveSet = field(repr=False)
    stopped: Stopped


def find_minimum_peak(
    profile: Profile | Graph,
    *,
    constraints: Constraints | None = None,
    work_limit: float = WORK_LIMIT,
    time_limit_s: float = math.inf,
    clock: Clock | None = None,
    gap: float = GAP,
    progress: OnProgress | None = None,
) -> MinimumPeak:
    """Find the smallest peak that any save set has, as far as the work allows to find and prove it.

    `plan` with a budget of `found` begins with the same search, or with `save_set` if that is its `start`.

    Args:
        profile: one training step, or the Graph of one.
        constraints: rules that every save set must obey, without a budget of forward.
        work_limit: units of work, each about a second of one core; the same everywhere, unlike seconds.
        time_limit_s: seconds on `clock`; on the solver's own clock if that is None. By default there is no
            limit on time.
        clock: such as `time.monotonic`.
        gap: stop once `found` is proven to be within this fraction of the smallest.
        progress: called now and then while solving; returning True stops the solver.

    Raises:
        InvalidLimit: `gap` is not from 0 to 1, or another limit is negative.
        InvalidConstraints: a pattern matches nothing, pins contradict each other, or forward has a budget.
    """
    check_limits(gap, time_limit_s, work_limit)
    allowance = Allowance(work_limit, Stopwatch(time_limit_s, clock), progress)
    graph = constrained(profile, without_forward_budget(constraints))
    problem = SearchProblem(graph, options_for(profile, None))
    return search_minimum_peak(problem, allowance, gap)


def search_minimum_peak(problem: SearchProblem, allowance: Allowance, gap: float = GAP) -> MinimumPeak:
    """Search for the smallest peak that a plan of `problem` can have.

    Stop once `allowance` (work and time) is used up, or once the peak is proven to be within the fraction
    `gap` of the smallest.
    """
    search = _peak_search(problem, allowance, gap)
    return _result(search, search.run())


def search_peak_within(within: Search, allowance: Allowance) -> MinimumPeak:
    """Search for a save set within the budget of `within`, or for a proof that none exists.

    The dynamic program over blocks comes first, then the relaxations of `within`. Programs with integers come
    last, since they take much longer. If no save set fits, go on to the smallest peak: the error names it.
    """
    assert within.budget is not None
    budget = within.budget
    search = _peak_search(within.problem, allowance, GAP)
    search.best.goal = Goal(GAP, enough=budget)
    if not search.best.is_good_enough:
        within.relax()
        if within.best.save_set is not None:
            search.best.offer(within.best.save_set)
    stopped = search.run()
    if stopped is Stopped.OPTIMAL and search.best.bound <= budget:  # perhaps only up to the gap
        search.best.goal = Goal(0.0, enough=budget)
        stopped = search.run()
    if search.best.bound > budget:
        search.best.goal = Goal(GAP)
        stopped = search.run()
    return _result(search, stopped)


def _peak_search(problem: SearchProblem, allowance: Allowance, gap: float) -> Search:
    start: Iterable[SaveSet] = problem.segments.smallest()
    if problem.without_groups is not problem:
        once = _peak_search(problem.without_groups, allowance.with_work_up_to(ONCE_WORK), gap)
        once.run()
        assert once.best.save_set is not None
        start = chain(start, [problem.from_step(once.best.save_set)])
    search = Search(
        problem, None, goal=Goal(gap), allowance=allowance, start=start, bound=problem.bounds.floor
    )
    if not search.best.is_good_enough and problem.blockwise_peak is not None:
        best = search.best
        low, high = int(best.bound), int(best.cost)
        for bound, save_set in problem.blockwise_peak.smallest_peak(low, high, allowance.spend):
            if save_set is not None:
                best.offer(save_set)
            best.raise_bound(bound)
            if best.is_good_enough:
                break
    return search


def _result(search: Search, stopped: Stopped) -> MinimumPeak:
    best = search.best
    assert best.save_set is not None
    return MinimumPeak(int(best.bound), int(best.cost), best.save_set, stopped)
