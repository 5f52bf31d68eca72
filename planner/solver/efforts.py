"""Look for a good candidate near the relaxation: each effort is a function from a Round to EffortResults.

An effort changes nothing but the work that is left. The search (search.py) takes each result before it asks
for the next, so `best` is up to date when an effort goes on.

Source: docs/formulation.md, section 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from autoac.planner.memory.simulate import fits, peak_bytes
from autoac.planner.problem.graph import SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.highs import Outcome, check_work
from autoac.planner.solver.incumbent import SHARE, Incumbent
from autoac.planner.solver.moments import ConstrainedMoment
from autoac.planner.solver.program import UNDECIDED, BuiltProgram, assignment, build_program
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance
from autoac.planner.solver.variables import Options

# (share, reach) of the neighborhoods: see `neighborhood`.
TIME_NEIGHBORHOODS = ((0.05, 1.0), (0.2, 2.0))
PEAK_NEIGHBORHOODS = ((0.1, 1.0), (0.5, 1.0))
FAR = 0.1  # gap from which lower limits are tried
LIMITS = 5  # how many lower limits are tried
FEW_NODES = 20  # in a neighborhood: what is not found soon is not there
MANY_UNDECIDED = 100  # open decisions: with as many, `rounded` and `neighborhood` find little
FEW_UNDECIDED = 10  # open decisions: as few are better left to the full program than to blocks
TIGHT = 0.5  # of the time of everything: if more must run again, blocks come right after rounding
BLOCKS_SHARE = 0.4  # of the work that is left: blocks leave this much for further rounds
OPEN_SHARE = 1 / 8  # of all decisions: with more open, HiGHS hardly gets past the root node
ROOT_CHECKS = 30  # how often HiGHS checks its limits in that root node
DEAR = 5.0  # units of work for a relaxation: with dearer ones, neighborhoods and lower limits do not pay


@dataclass(frozen=True, slots=True)
class Round:
    """Holds what an effort knows: the program with the rows so far, its relaxation, and the best save set."""

    problem: SearchProblem
    budget: int | None  # bytes; None to minimise the peak
    moments: frozenset[ConstrainedMoment]  # with rows
    options: Options
    built: BuiltProgram
    relaxed: Outcome
    best: Incumbent
    allowance: Allowance

    @property
    def n_open(self) -> int:
        """Return the number of decisions that the relaxation leaves open."""
        return self.built.undecided(self.relaxed)

    @property
    def root_is_too_dear(self) -> bool:
        """Return True if the work that is left is too little for the root node with integers."""
        is_hard = self.n_open > OPEN_SHARE * len(self.built.ops)
        return is_hard and ROOT_CHECKS * check_work(self.relaxed.work) > self.allowance.work_left

    @property
    def all_us(self) -> float:
        """Return the time of recomputing all ops that may be recomputed."""
        return float(self.problem.arrays.cost_us.sum())


@dataclass(frozen=True, slots=True)
class EffortResult:
    """A candidate, and what is proven for all save sets."""

    save_set: SaveSet | None = None
    bound: float = -math.inf  # of the cost of every save set; infinite if none is better than the best one
    objective: float = 0.0  # the cost of the candidate, by the program
    adds_rows: bool = False  # moments at which the candidate is too large get rows
    is_solution: bool = False  # of the program: ruled out if it is too large and no row is missing


Effort = Callable[[Round], Iterator[EffortResult]]


def efforts(now: Round) -> list[Effort]:
    """Return the efforts of a round, the cheapest first."""
    if now.budget is None:
        return [rounded, *(partial(neighborhood, *one) for one in PEAK_NEIGHBORHOODS), full_program]
    near: list[Effort] = [lowered_limits, *(partial(neighborhood, *one) for one in TIME_NEIGHBORHOODS)]
    if now.best.bound > TIGHT * now.all_us:
        near = [blocks, *near]
    elif now.n_open > FEW_UNDECIDED:
        near = [*near, blocks]
    return [rounded, *near, full_program]


def rounded(now: Round) -> Iterator[EffortResult]:
    """Round the relaxation's decisions: seldom a plan, but they show where rows are missing.

    If the rounded save set does not fit a budget, two others are tried. One saves only what the relaxation
    saves in full: a large model then takes less memory and is hardly slower. The other also saves all that
    the relaxation saves in part, which cuts up a chain of ops that would else run again at once.
    """
    assert now.relaxed.values is not None
    built, graph = now.built, now.problem.graph
    decisions = built.decisions(now.relaxed.values)
    candidate = built.rounded(decisions)
    if now.budget is not None and not fits(graph, candidate, now.budget):
        yield EffortResult(built.rounded(decisions, 1 - UNDECIDED))
        parts = built.rounded(decisions, UNDECIDED)
        candidate = min(candidate, parts, key=lambda save_set: peak_bytes(graph, save_set))
    is_useful = now.budget is None or now.n_open < MANY_UNDECIDED
    yield EffortResult(candidate, objective=_cost(now, now.relaxed), adds_rows=is_useful)


def lowered_limits(now: Round) -> Iterator[EffortResult]:
    """Solve relaxations with lower limits, and save all that they save in part, until a save set fits.

    This is done only if the best plan is far from the bound. Where thousands of ops form a chain, as in a
    recurrent network, the relaxation saves a tenth of some of them. If these ops are not saved, the whole
    chain runs again at once; if they are, a little too much is saved for the limit.
    """
    if now.best.gap < FAR or now.relaxed.work > DEAR:
        return
    assert now.budget is not None
    graph, built, relaxed, limit, too_much = now.problem.graph, now.built, now.relaxed, now.budget, now.budget
    for left in reversed(range(LIMITS + 1)):
        if relaxed.values is None:
            limit = (limit + too_much) // 2
        else:
            decisions = built.decisions(relaxed.values)
            save_set = without_cost_free_recomputes(graph, built.rounded(decisions, UNDECIDED))
            over = peak_bytes(graph, save_set) - now.budget
            if over <= 0:
                yield EffortResult(save_set)
                return
            halfway = (limit + now.problem.bounds.floor) // 2
            limit, too_much = max(limit - 2 * over, halfway), limit
        if left == 0 or now.allowance.over:
            return
        built = build_program(now.problem.arrays, limit, now.moments, options=now.options)
        relaxed = now.allowance.solve(built.program, relaxed=True)


def neighborhood(share: float, reach: float, now: Round) -> Iterator[EffortResult]:
    """Look for a candidate that differs from the relaxation by changes that are each cheap.

    The slack is the distance from the relaxation to the target (for the peak: to the best). One change
    may cost `share` of the slack, and the candidate may be `reach` times the slack away. Nothing is tried if
    many decisions are open, since that is about as hard as the whole program, or if the root node alone would
    take too long.
    """
    built, relaxed = now.built, now.relaxed
    if now.root_is_too_dear:
        return
    if now.budget is None:
        cutoff = now.best.cost / built.cost_scale
        slack = max(cutoff - relaxed.bound, 0.0)
        target = relaxed.bound + slack / 4
    elif now.n_open >= MANY_UNDECIDED or relaxed.work > DEAR:
        return
    else:
        target = now.best.target / built.cost_scale
        slack = max(target - relaxed.bound, 0.0)
        cutoff = relaxed.bound + reach * slack
    outcome = now.allowance.solve(
        replace(built.program.priced_out(relaxed, share * slack), cutoff=cutoff),
        target=target,
        relaxed_work=relaxed.work,
        options={"mip_max_nodes": FEW_NODES},
    )
    yield _solution(now, outcome, cutoff)


def blocks(now: Round) -> Iterator[EffortResult]:
    """Yield plans and bounds of the dynamic program over blocks. They do not depend on the relaxation."""
    blockwise, allowance, best = now.problem.blockwise, now.allowance, now.best
    if blockwise is None or now.budget is None:
        return
    least_left = BLOCKS_SHARE * allowance.work_left

    def may_go_on(work: float) -> bool:
        return allowance.spend(work) and allowance.work_left > least_left

    proven = 0.0 if best.save_set is None else best.bound
    plans = blockwise.plans(now.budget, min(best.cost, now.all_us), may_go_on, proven_us=proven)
    for bound, save_set in plans:
        yield EffortResult(save_set, bound)


def full_program(now: Round) -> Iterator[EffortResult]:
    """Solve the program with all its columns: find a candidate up to a cutoff, or prove that none exists.

    The cutoff starts at the target. Its distance from the bound doubles each time, up to the best cost. For
    the peak, the cutoff is the best peak from the start. If the work that is left is too little for the root
    node, the search ends.
    """
    built, best = now.built, now.best
    if now.root_is_too_dear:
        now.allowance.spend(now.allowance.work_left)
        return
    slack = max(best.target - best.bound, 1e-4 * now.all_us)
    while True:
        known, cutoff_cost = best.save_set, best.cost
        if now.budget is not None:
            # If nothing is better than this, the best is good enough.
            cutoff_cost *= 1 - best.allowed_gap * SHARE
            if best.bound + slack < now.all_us:
                cutoff_cost = min(best.bound + slack, cutoff_cost)
        slack *= 2
        is_up_to_best = cutoff_cost >= best.cost
        cutoff = cutoff_cost / built.cost_scale
        program = replace(built.program, cutoff=cutoff)
        if math.isfinite(cutoff) and now.options.fix_by_price:
            program = program.priced_out(now.relaxed, cutoff - now.relaxed.bound)
        outcome = now.allowance.solve(
            program,
            gap=best.allowed_gap * SHARE,
            relaxed_work=now.relaxed.work,
            target=None if now.budget is None else best.target / built.cost_scale,
            start=assignment(now.problem.windows, built, known)
            if known is not None and is_up_to_best
            else None,
        )
        yield _solution(now, outcome, cutoff, min(outcome.bound * built.cost_scale, cutoff_cost))
        if outcome.bound < cutoff:
            return
        if is_up_to_best:
            yield EffortResult(bound=math.inf)
            return


def _solution(now: Round, outcome: Outcome, cutoff: float, bound: float = -math.inf) -> EffortResult:
    if outcome.values is None:
        return EffortResult(bound=bound)
    save_set, is_within = now.built.save_set(outcome.values), outcome.bound < cutoff
    return EffortResult(save_set, bound, _cost(now, outcome), adds_rows=is_within, is_solution=is_within)


def _cost(now: Round, outcome: Outcome) -> float:
    return (outcome.objective or 0.0) * now.built.cost_scale
