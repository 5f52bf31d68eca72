"""Plan what to move to the host, where that is faster than to recompute.

A relaxation with moves (solver/rows/move_columns.py) says which outputs are worth the link, and proves a
bound. The points of these moves follow from the times of the step (memory/points.py). Then the step with the
moves is a Graph like any other, and the usual search finds what else to save; the three clocks say how long
compute waits.

Source: docs/formulation.md, section 10.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, Unpack

from autoac.planner.errors import InfeasibleBudget, SolverOutOfTime
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.clocks import Timing, timing
from autoac.planner.memory.points import SLACK, choose_points, in_time
from autoac.planner.memory.schedule import Compute, Free, Recompute
from autoac.planner.memory.simulate import fits, instants, peak_of
from autoac.planner.minimum_peak import search_peak_within
from autoac.planner.plan import (
    DEFAULT_GAP,
    DEFAULT_TIME_LIMIT_S,
    DEFAULT_WORK_LIMIT,
    Plan,
    goal_of,
    moving,
    plan,
    plan_of,
    step_time_us,
)
from autoac.planner.problem.apply_constraints import constrained
from autoac.planner.problem.graph import Graph, OpId, SaveSet
from autoac.planner.problem.moves import Link, Move, movable, with_moves
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves
from autoac.planner.shared_code import shared_calls
from autoac.planner.solver.constrained_moments import first_moments
from autoac.planner.solver.highs import OnProgress, Stopped
from autoac.planner.solver.incumbent import Goal
from autoac.planner.solver.moments import DuringBurst
from autoac.planner.solver.program import build_program
from autoac.planner.solver.rows.move_columns import MoveProblem
from autoac.planner.solver.search import Search
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance, Clock, Stopwatch
from autoac.planner.solver.variables import options_for

SHARES = (1.0, 1 / (1 + SLACK), 0.8)  # of the bandwidth that relaxations count on, one after another
WORTH = 0.005  # of the step: what moves must save for the host to be used
FEW = 40  # if no more ops than this may move, the program decides about them without rounding
WORK_LIMIT = 10.0  # units of work for all searches of moves, but not more than
MOVES_SHARE = 0.6  # of the work limit; the plan without moves has the rest
STRETCHES = 8  # of backward, with a moment each in the first relaxation; more hardly change what moves
SEARCH_WORK = 5.0  # units of work for one search


class PlanTerms(TypedDict, total=False):
    """Arguments of `plan` that a plan with moves takes too."""

    constraints: Constraints | None
    gap: float
    step_gap: float | None
    work_limit: float
    time_limit_s: float
    clock: Clock | None
    start: Iterable[SaveSet]
    progress: OnProgress | None


@dataclass(frozen=True, slots=True)
class Offload:
    """A save set with moves that fits, and its times.

    Attributes:
        unmoved: `graph` without the moves.
        graph: with the moves.
        save_set: of `graph`; saves no moved op.
    """

    unmoved: Graph = field(repr=False)
    graph: Graph = field(repr=False)
    save_set: SaveSet = field(repr=False)
    moves: tuple[Move, ...]
    timing: Timing
    extra_us: float  # recomputes and stalls


def plan_offload(
    profile: Profile | Graph,
    *,
    budget_bytes: int,
    link: Link,
    **terms: Unpack[PlanTerms],
) -> Plan:
    """Return the fastest plan found within a budget, with a link to the host: save, recompute or move.

    Nothing moves if everything fits, or if moves do not save half a percent of the step. Nor does anything
    move under a forward budget, or if blocks or forwards share compiled code: with moves, each would need
    code of its own. Microbatches that wait have moved as much as the one at work, to the same host.

    Args:
        profile: one training step, or the Graph of one.
        budget_bytes: that the device may hold at any moment.
        link: of device and host, with the bytes of the host that may be used.
        terms: as in `plan`.

    Raises:
        InfeasibleBudget, SolverOutOfTime: `plan` raises it, and no moves were found with which a plan fits.
        InvalidBudget, InvalidLimit, InvalidConstraints: as in `plan`.
    """
    constraints = terms.get("constraints") or Constraints()
    graph = constrained(profile, constraints)
    of = profile if isinstance(profile, Profile) else None
    link = replace(link, host_bytes=link.host_bytes // (1 + graph.waiting_microbatches))
    limited = constraints.forward_budget_bytes is not None
    may_move = not (limited or shared_calls(graph)) and bool(movable(graph, link))
    without, unplanned, work_limit = None, None, terms.get("work_limit", DEFAULT_WORK_LIMIT)
    share = 1.0 - MOVES_SHARE if may_move else 1.0
    try:
        without = plan(profile, budget_bytes=budget_bytes, **terms | {"work_limit": share * work_limit})
    except (InfeasibleBudget, SolverOutOfTime) as error:
        if not may_move:
            raise
        unplanned = error
    if without is not None and without.recompute_us == 0:
        return replace(without, why_unmoved="it all fits on the device")
    if without is not None and not may_move:
        return replace(without, why_unmoved="no output of this step may move")
    options = replace(options_for(profile, None), use_groups=False)
    problem = SearchProblem(graph, options)
    step_us = step_time_us(graph)
    goal = goal_of(terms.get("gap", DEFAULT_GAP), terms.get("step_gap"), step_us)
    stopwatch = Stopwatch(terms.get("time_limit_s", DEFAULT_TIME_LIMIT_S), terms.get("clock"))
    allowance = Allowance(min(WORK_LIMIT, MOVES_SHARE * work_limit), stopwatch, terms.get("progress"))
    known = None if without is None else (SearchProblem(without.graph, options), without.save_set)
    budget = budget_bytes - constraints.headroom_bytes
    best, bound_us = _search(problem, budget, link, goal, allowance, known)
    if best is None and unplanned is not None:
        raise unplanned
    if without is not None and (best is None or best.extra_us > without.recompute_us - WORTH * step_us):
        why = f"no moves were found that save {WORTH:.1%} of the step"
        return replace(without, bound_us=min(bound_us, without.recompute_us), why_unmoved=why)
    assert best is not None
    bound_us = max(0.0, min(bound_us, best.extra_us))
    proven = best.extra_us - bound_us <= max(goal.gap * best.extra_us, goal.tolerance)
    made = plan_of(
        problem,
        of,
        budget,
        graph.everything,
        stopped=Stopped.OPTIMAL if proven else Stopped.WORK_LIMIT,
        constraints=constraints,
    )
    made = moving(made, best.unmoved, best.graph, best.save_set, best.moves, best.timing)
    gained_us = math.inf if without is None else without.recompute_us - best.extra_us
    return replace(made, bound_us=bound_us, gained_us=gained_us)


def plan_with_host(profile: Profile | Graph, *, budget_bytes: int, **terms: Unpack[PlanTerms]) -> Plan:
    """Plan a step, with moves to the host if its constraints give the host a budget.

    Args:
        profile: one training step, or the Graph of one. Without the rates of a link, nothing moves.
        budget_bytes: that the device may hold at any moment.
        terms: as in `plan`.

    Raises:
        As `plan_offload` and `plan` do.
    """
    constraints = terms.get("constraints")
    host_bytes = constraints.host_budget_bytes if constraints is not None else 0
    rates = profile.link if isinstance(profile, Profile) else None
    if not host_bytes or rates is None:
        made = plan(profile, budget_bytes=budget_bytes, **terms)
        return replace(made, why_unmoved="the profile has no link") if host_bytes else made
    return plan_offload(profile, budget_bytes=budget_bytes, link=Link.of(rates, host_bytes), **terms)


def _search(
    problem: SearchProblem,
    budget: int,
    link: Link,
    goal: Goal,
    allowance: Allowance,
    without: tuple[SearchProblem, SaveSet] | None,
) -> tuple[Offload | None, float]:
    """Return the best moves that were found, and a proven bound of the time with any moves.

    Args:
        without: a problem of the same step, perhaps with use groups, and a save set without moves that fits.
    """
    graph, arrays = problem.graph, problem.arrays
    nbytes = movable(graph, link)
    best: Offload | None = None
    bound = 0.0
    known = first_moments(problem.windows, (graph.everything,), STRETCHES)
    tried: set[frozenset[OpId]] = set()
    for share in SHARES if nbytes else ():
        built = build_program(
            arrays, budget, known, options=problem.options, moves=MoveProblem(nbytes, link.slower(share))
        )
        relaxed = allowance.solve(built.program, relaxed=len(nbytes) > FEW)
        if relaxed.values is None or built.moves is None:
            break
        if share == 1.0:
            bound = max(bound, relaxed.bound * built.cost_scale)
        moved = built.moves.moved(relaxed.values)
        if moved not in tried:
            tried.add(moved)
            saved = built.save_set(relaxed.values) - moved
            unmoved = frozenset() if without is None or without[0].graph.runs else without[1]
            found, search = _with(problem, budget, link, moved, saved, unmoved, goal, allowance)
            known |= {moment for moment in search.moments if not isinstance(moment, DuringBurst)}
            if found is None and best is None and without is not None:  # move what was saved: that fits
                other, save_set = without
                own = movable(other.graph, link) if other.graph.runs else moved  # with use groups, other ids
                found, _ = _with(
                    other, budget, link, save_set & set(own), save_set, save_set, goal, allowance
                )
            if found is not None and (best is None or found.extra_us < best.extra_us):
                best = found
        good = best is not None and best.extra_us - bound <= max(goal.gap * best.extra_us, goal.tolerance)
        if good or allowance.over:
            break
    return best, bound


def _with(
    problem: SearchProblem,
    budget: int,
    link: Link,
    moved: frozenset[OpId],
    saved: SaveSet,
    unmoved: SaveSet,
    goal: Goal,
    allowance: Allowance,
) -> tuple[Offload | None, Search]:
    """Return the best of what a search finds with `moved`, and the search.

    Args:
        saved: a guess at what else is saved; the points of the moves are first chosen for it.
        unmoved: what else is saved if that does not fit: fits without moves, or is empty.
    """
    graph = problem.graph
    fullest = peak_of(graph, graph.everything).moment
    moves = choose_points(graph, saved - moved, moved, link)
    if not graph.waiting_microbatches:  # else each leaves the device before its microbatch waits
        moves = tuple(move for move in moves if move.is_absent(graph, fullest))
    own = allowance.with_work_up_to(SEARCH_WORK)
    had = own.work_left

    def search_with(moves: Sequence[Move], start: SaveSet) -> Search:
        moving = SearchProblem(with_moves(graph, moves, link), replace(problem.options, blockwise=False))
        return Search(moving, budget, goal=goal, allowance=own, start=[start])

    search = search_with(moves, saved - moved)
    if search.best.save_set is None and fits(graph, unmoved, budget):
        points = choose_points(graph, unmoved - moved, moved, link)
        moves = _with_room(graph, points, unmoved, budget, link)
        search = search_with(moves, unmoved - {move.op for move in moves})
    if search.best.save_set is None:
        smallest = search_peak_within(search, own)
        if smallest.proven > budget:
            allowance.spend(had - own.work_left)
            return None, search
        search.best.offer(smallest.save_set)
    search.run()
    allowance.spend(had - own.work_left)
    if search.best.save_set is None:
        return None, search
    moving = search.problem.graph
    save_set = with_forced_saves(moving, search.best.save_set)
    again = recomputed_by_backward(moving, save_set)
    moves = tuple(move for move in moves if again[move.op])
    later = choose_points(graph, save_set, [move.op for move in moves], link)
    found = [_judged(graph, save_set, points, budget, link) for points in (moves, later)]
    return min((f for f in found if f is not None), key=lambda f: f.extra_us, default=None), search


def _with_room(
    graph: Graph, moves: Sequence[Move], save_set: SaveSet, budget: int, link: Link
) -> tuple[Move, ...]:
    """Return those of `moves` for which a save set that fits without moves leaves room.

    Those that the device holds at the fullest moment are left out, the largest first, until all fit. If it
    holds none of them there, the one that was fetched last is: without it, more was recomputed before.
    """
    kept = {move.op: move for move in moves}
    while kept:
        held, fetched = dict[OpId, int](), list[OpId]()
        most, at_most, latest = 0, dict[OpId, int](), next(iter(kept))
        moving = with_moves(graph, list(kept.values()), link)
        for event, live, _ in instants(moving, save_set - set(kept)):
            match event:
                case Free():
                    held.pop(graph.versions[event.version].op, None)
                case Compute() | Recompute() if event.op in kept:
                    held[event.op] = sum(map(graph.nbytes, graph.ops[event.op].writes))
                    fetched.append(event.op)
            if live > most:
                most, at_most, latest = live, dict(held), fetched[-1] if fetched else latest
        over = most - budget
        if over <= 0:
            break
        for op in sorted(at_most, key=lambda op: -at_most[op]) or [latest]:
            if over > 0:
                over -= at_most.get(op, over)
                del kept[op]
    return tuple(kept.values())


def _judged(
    graph: Graph, save_set: SaveSet, moves: tuple[Move, ...], budget: int, link: Link
) -> Offload | None:
    """Return the Offload of `moves` under `save_set`; None if over a budget or if a fetch is too late."""
    early = in_time(graph, save_set, moves, link)
    if early is None or not fits(moving := with_moves(graph, early, link), save_set, budget):
        return None
    times = timing(moving, save_set, early, link)
    if times.moved_bytes > link.host_bytes:
        return None
    return Offload(graph, moving, save_set, early, times, times.end_us - step_time_us(graph))
