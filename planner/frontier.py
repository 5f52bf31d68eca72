"""Trade memory for time: plans from the smallest peak to the peak with nothing recomputed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autoac.planner.errors import InvalidBudget
from autoac.planner.formats.constraints import Constraints, without_forward_budget
from autoac.planner.formats.profile import Profile
from autoac.planner.minimum_peak import MinimumPeak, search_minimum_peak
from autoac.planner.plan import DEFAULT_TIME_LIMIT_S, DEFAULT_WORK_LIMIT, Plan, plan_of
from autoac.planner.problem.apply_constraints import constrained
from autoac.planner.problem.graph import Graph
from autoac.planner.solver.highs import OnProgress, Stopped
from autoac.planner.solver.incumbent import Goal
from autoac.planner.solver.search import Search
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance, Clock, Stopwatch, check_limits
from autoac.planner.solver.variables import Options, options_for
from autoac.planner.units import format_bytes, format_us

PEAK_WORK = 3.0  # units of work for the search of the smallest peak
KINK = 2.0  # slope before a kink over slope after it


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans in order of their peaks: each takes more memory and less time than the one before it."""

    plans: tuple[Plan, ...]
    floor: MinimumPeak

    @property
    def kinks(self) -> frozenset[int]:
        """Return the peaks up to which memory buys much more time than beyond: budgets worth choosing."""
        plans = zip(self.plans, self.plans[1:], self.plans[2:], strict=False)
        return frozenset(p.peak for b, p, a in plans if _slope(b, p) > KINK * _slope(p, a))

    def data(self) -> list[dict[str, Any]]:
        """Return the plans as JSON data, in bytes and microseconds."""
        kinks = self.kinks
        return [
            {
                "budget_bytes": plan.budget,
                "peak_bytes": plan.peak,
                "recompute_us": plan.recompute_us,
                "bound_us": plan.bound_us,
                "step_us": plan.step_us,
                "gap": plan.gap,
                "stopped": plan.stopped.value,
                "kink": plan.peak in kinks,
            }
            for plan in self.plans
        ]


def find_frontier(
    profile: Profile | Graph,
    *,
    points: int = 16,
    constraints: Constraints | None = None,
    gap: float = 0.01,
    work_limit: float = DEFAULT_WORK_LIMIT,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    clock: Clock | None = None,
    progress: OnProgress | None = None,
    options: Options | None = None,
) -> Frontier:
    """Plan budgets spread evenly from the smallest peak found to the peak with nothing recomputed.

    Each plan starts from its neighbor with more memory: a bound proven there holds here too, and the moments
    that mattered there probably matter here. A plan that another one beats in memory and in time is left
    out, so both axes are monotone.

    Args:
        profile: one training step, or the Graph of one.
        points: how many budgets, both ends included; at least 2.
        constraints: rules in addition to the budgets, without a budget of forward.
        gap: stop each plan once its recompute time is proven to be within this fraction of the least.
        work_limit: as for `plan`, for each plan.
        time_limit_s, clock: as for `plan`, for each plan.
        progress: called now and then while solving, with the number of the plan as `point`; returning True
            stops the solver.
        options: switches of the program, for tests.

    Returns:
        At most `points` plans.

    Raises:
        InvalidBudget: fewer than 2 points.
        InvalidLimit: `gap` is not from 0 to 1, or another limit is negative.
        InvalidConstraints: a pattern matches nothing, pins contradict each other, or forward has a budget.
    """
    if points < 2:
        raise InvalidBudget(f"points must be at least 2, got {points}")
    check_limits(gap, time_limit_s, work_limit)
    observed = None if isinstance(profile, Graph) else profile
    graph = constrained(profile, without_forward_budget(constraints))
    problem = SearchProblem(graph, options_for(profile, options))
    allowance = Allowance(PEAK_WORK, Stopwatch(time_limit_s, clock), progress)
    smallest = search_minimum_peak(problem, allowance)
    low, high = smallest.found, problem.ceiling
    plans = [plan_of(problem, observed, high, problem.graph.everything, constraints=constraints)]
    bound_us, moments = 0.0, None
    for point in range(1, points):
        budget = low + (high - low) * (points - 1 - point) // (points - 1)
        on_progress = None if progress is None else _with_point(progress, point + 1, points)
        search = Search(
            problem,
            budget,
            goal=Goal(gap),
            allowance=Allowance(work_limit, Stopwatch(time_limit_s, clock), on_progress),
            start=(smallest.save_set,),
            moments=moments or (),
            bound=bound_us,  # of a larger budget: less memory can do no better
        )
        stopped = search.run()
        assert search.best.save_set is not None  # the smallest save set fits everywhere
        plans.append(
            plan_of(problem, observed, budget, search.best.save_set, search, stopped, constraints=constraints)
        )
        bound_us, moments = search.best.bound, search.moments
    if plans[-1].peak < smallest.found:
        assert search.best.save_set is not None
        smallest = replace(smallest, found=plans[-1].peak, save_set=search.best.save_set)
    return Frontier(_monotone(plans), smallest)


def _with_point(progress: OnProgress, point: int, points: int) -> OnProgress:
    return lambda now: progress(replace(now, point=point, points=points))


def _monotone(plans: list[Plan]) -> tuple[Plan, ...]:
    """Return `plans` from small budgets to large, without those that another beats in memory and time.

    A search may have been stopped when its plan's peak was far below its budget. The budget is then the peak,
    so that no other plan is faster within it. A bound for any larger budget holds too.
    """
    undominated: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak, plan.recompute_us, plan.budget)):
        if not undominated or plan.recompute_us < undominated[-1].recompute_us:
            undominated.append(plan)
    found = []
    for plan, larger in zip(undominated, (*undominated[1:], None), strict=True):
        budget = plan.budget if larger is None or plan.budget < larger.peak else plan.peak
        bound_us = max(other.bound_us for other in plans if other.budget >= budget)
        found.append(replace(plan, budget=budget, bound_us=min(bound_us, plan.recompute_us)))
    return tuple(found)


def _slope(less: Plan, more: Plan) -> float:
    """Return the microseconds that each further GiB saves, from one plan to the next."""
    return (less.recompute_us - more.recompute_us) / max((more.peak - less.peak) / 2**30, 1e-12)


def frontier_in_words(frontier: Frontier) -> str:
    """Write a line for each plan. Mark the budgets worth choosing, and the limit that stopped a solver."""
    kinks = frontier.kinks
    lines = [
        f"smallest peak {format_bytes(frontier.floor.found)}, proven {format_bytes(frontier.floor.proven)}",
        f"{'peak':>12}  {'recompute':>12}  {'of the step':>11}  {'gap':>5}",
    ]
    for plan in frontier.plans:
        share = plan.recompute_us / plan.step_us if plan.step_us else 0.0
        mark = "" if plan.stopped is Stopped.OPTIMAL else f"  {plan.stopped}"
        mark += "  less memory costs much more from here" if plan.peak in kinks else ""
        lines.append(
            f"{format_bytes(plan.peak):>12}  {format_us(plan.recompute_us):>12}  {share:>11.1%}  "
            f"{plan.gap:>5.1%}{mark}"
        )
    return "\n".join(lines)
