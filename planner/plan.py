"""Plan: find what to save within a budget, from a profile or a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoac.planner.budget import one_budget
from autoac.planner.errors import InfeasibleBudget, InvalidBudget, InvalidLimit, PlannerError, SolverOutOfTime
from autoac.planner.formats.base import MAX_INT
from autoac.planner.formats.constraints import UNCONSTRAINED, Constraints
from autoac.planner.formats.policy import (
    OFFLOAD,
    SAVE,
    THE_END,
    MovePoints,
    Policy,
    Predicted,
    decisions,
    planned_for,
    tool_versions,
)
from autoac.planner.formats.profile import Profile
from autoac.planner.infeasibility import infeasible, with_constraints
from autoac.planner.memory.clocks import Timing
from autoac.planner.memory.fragments import fragment_bytes
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import Timeline, instant_name, peak_of, simulate
from autoac.planner.minimum_peak import WORK_LIMIT as FLOOR_WORK_LIMIT
from autoac.planner.minimum_peak import search_minimum_peak, search_peak_within
from autoac.planner.problem.apply_constraints import constrained, with_forward_limit
from autoac.planner.problem.build import build, needed_until
from autoac.planner.problem.graph import Graph, OpId, SaveSet
from autoac.planner.problem.moves import Move, triggers
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves
from autoac.planner.problem.use_groups import later_runs
from autoac.planner.shared_code import shared_calls, with_few_variants
from autoac.planner.solver.bounds import bounds
from autoac.planner.solver.highs import OnProgress, Stopped
from autoac.planner.solver.incumbent import Goal
from autoac.planner.solver.search import Search
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance, Clock, Stopwatch, check_limits, relative_gap
from autoac.planner.solver.variables import Options, options_for
from autoac.planner.units import format_bytes

DEFAULT_GAP = 0.01
DEFAULT_WORK_LIMIT = 60.0  # see NOTE [ Work ] in highs.py
DEFAULT_TIME_LIMIT_S = math.inf  # work alone is limited, so that a busy machine finds the same plan
"""Defaults of a plan, also for requests to the service."""
STEP_SHARE = 0.1  # of the gap: the share of the step's time within which a plan is good enough, too
GROUPS_GAIN = 0.001  # of the step: use groups are tried where they may save more than this,
GROUPS_WORK = 1.0  # with so much work, or with as much as the search without groups took, if that is more
SHARED_WORK = 3.0  # if blocks share compiled code: the best plan has more variants than is allowed
EVIDENCE_WORK = 10.0  # to find what would fit, once the budget is proven not to
FLOOR_SHARE = 5.0  # of the work limit: most work for the smallest peak, searched where no start fits


@dataclass(frozen=True, slots=True)
class Plan:
    """The ops that a step saves and those that it recomputes, with the predicted peak and proven bounds.

    Sizes are in bytes and times in microseconds.
    """

    graph: Graph = field(repr=False)
    profile: Profile | None = field(repr=False)  # None: planned from a Graph
    budget: int  # the upper bound of the peak, headroom taken off
    save_set: SaveSet = field(repr=False)
    recompute_set: SaveSet = field(repr=False)  # ops that backward really runs again
    peak: int  # the simulator's
    peak_at: str
    ceiling: int  # the peak with nothing recomputed
    recompute_us: float
    bound_us: float  # proven: no plan considered takes less; docs/formulation.md, section 9
    stopped: Stopped
    rounds: int  # how many relaxations were solved
    solver_s: float = field(default=0.0, compare=False)  # seconds of the solver's own clock
    constraints: Constraints = UNCONSTRAINED  # that the plan obeys
    moves: tuple[Move, ...] = ()  # `graph` has them (NOTE [ Moves ])
    timing: Timing | None = None  # with moves: of the step
    unmoved: Graph | None = field(default=None, repr=False)  # with moves: `graph` without them
    why_unmoved: str = ""  # where moves were allowed, and there are none
    gained_us: float = math.inf  # with moves: the time that they save; infinite if no plan fits without them

    @property
    def stall_us(self) -> float:
        """Return the time that compute waits for copies."""
        return 0.0 if self.timing is None else self.timing.stall_us

    @property
    def extra_us(self) -> float:
        """Return the time that the step takes longer than with everything saved: recomputes and stalls."""
        return self.recompute_us + self.stall_us

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that the step moves to the host."""
        return 0 if self.timing is None else self.timing.moved_bytes

    @property
    def gap(self) -> float:
        """Return the share of the extra time that is not proven necessary: (time - bound) / time."""
        return relative_gap(self.extra_us, self.bound_us)

    @property
    def floor(self) -> int:
        """Return the proven bound of the peak, in bytes: no save set has a smaller peak."""
        return bounds(self.graph).floor

    @property
    def timeline(self) -> Timeline:
        """Return the bytes live at each event of the step."""
        return simulate(self.graph, self.save_set)

    def fragment_bytes(self, *, expandable_segments: bool = False) -> int | None:
        """Return by how much CUDA's allocator reserves more than it hands out, in a loop of such steps.

        Args:
            expandable_segments: as in PYTORCH_CUDA_ALLOC_CONF.

        Returns:
            Bytes; None if the plan has no profile with the temporaries of a step.
        """
        if self.profile is None or not self.profile.temporaries:
            return None
        return fragment_bytes(
            self.profile, self.graph, self.save_set, expandable_segments=expandable_segments
        )

    @property
    def step_us(self) -> float:
        """Return the time of forward and backward with nothing recomputed."""
        return step_time_us(self.graph)

    @property
    def moved(self) -> frozenset[OpId]:
        """Return the ops whose outputs move to the host."""
        return frozenset(move.op for move in self.moves)

    def policy(self) -> Policy:
        """Return the plan as the runtime loads it. The same plan gives the same text."""
        profile = self.profile
        if profile is None:
            raise PlannerError("a policy needs the Profile: call plan() with a Profile instead of a Graph")
        return Policy(
            model=profile.model,
            fingerprint=profile.fingerprint,
            profile_digest=profile.digest,
            inputs=profile.inputs,
            device=profile.environment.device_name,
            budget_bytes=self.budget + self.constraints.headroom_bytes,
            corrected_by_bytes=0,
            stopped=self.stopped.value,
            predicted=Predicted(
                peak_bytes=self.peak,
                peak_at=self.peak_at,
                save_all_peak_bytes=min(self.ceiling, MAX_INT),
                static_bytes=self.graph.static_bytes,
                recompute_us=self.recompute_us,
                recompute_bound_us=self.bound_us,
                step_us=self.step_us,
                gap=self.gap,
                stall_us=self.stall_us,
                moved_bytes=self.moved_bytes,
                microbatches=1 + self.graph.waiting_microbatches,
            ),
            tools=tool_versions() | planned_for(profile.environment),
            constraints=self.constraints,
            forward_ends=profile.forward_ends,
            **decided(profile, self.graph, self.save_set, self.moves),
        )


def step_time_us(graph: Graph) -> float:
    """Return the time of forward and backward with nothing recomputed."""
    return sum(op.runtime_us for op in graph.ops) + sum(step.runtime_us for step in graph.steps)


def plan(
    profile: Profile | Graph,
    *,
    budget_gb: float | None = None,
    budget_bytes: int | None = None,
    constraints: Constraints | None = None,
    gap: float = DEFAULT_GAP,
    work_limit: float = DEFAULT_WORK_LIMIT,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    clock: Clock | None = None,
    start: Iterable[SaveSet] = (),
    progress: OnProgress | None = None,
    options: Options | None = None,
    step_gap: float | None = None,
) -> Plan:
    """Find the save set that fits in the budget at the least recompute time.

    The same input gives the same plan on every machine, idle or busy, unless a `time_limit_s` is given and
    reached; then `stopped` says so. If everything fits, nothing is solved.

    Args:
        profile: one training step, or the Graph of one.
        budget_gb: GiB that the device may hold at any moment, everything included. Or:
        budget_bytes: the same in bytes.
        constraints: rules in addition to the budget. Bounds hold under these rules.
        gap: stop once the recompute time is proven to be within this fraction of the least, or
        step_gap: once it is proven to be within this fraction of the step's time, whichever comes first.
            None: a tenth of `gap`, so by default 1 % of the recompute or 0.1 % of the step.
        work_limit: units of work over all rounds, each about a second of one core; a count, not a clock.
            Where no start fits, the smallest peak is searched first, with up to five times as much.
        time_limit_s: seconds on `clock`; on the solver's own clock if that is None. By default there is no
            limit on time.
        clock: such as `time.monotonic`.
        start: save sets that are known already, such as that of a MinimumPeak or of an InfeasibleBudget.
        progress: called now and then while solving; returning True stops the solver.
        options: switches of the program, for tests.

    Raises:
        InvalidBudget: not exactly one budget, or one that is not positive and finite.
        InvalidLimit: `gap` is not from 0 to 1, or another limit is negative.
        InvalidConstraints: a pattern matches nothing, pins contradict each other, or the like.
        InfeasibleBudget: no save set fits.
        SolverOutOfTime: the given work and time gave neither a plan nor a proof that none exists. Not raised
            if `find_minimum_peak`, with its defaults, finds a save set that fits the budget.
    """
    check_limits(gap, time_limit_s, work_limit)
    if step_gap is not None and not 0 <= step_gap <= 1:
        raise InvalidLimit("step_gap", step_gap, "from 0 to 1")
    constraints = constraints or UNCONSTRAINED
    budget = one_budget(budget_gb, budget_bytes, constraints.headroom_bytes)
    forward = _forward_limit(constraints)
    graph = constrained(profile, constraints)
    options = options_for(profile, options)
    problem = SearchProblem(with_forward_limit(graph, budget, forward), options)
    shares_code = bool(shared_calls(problem.graph))
    if shares_code:
        work_limit = min(work_limit, SHARED_WORK)
    allowance = Allowance(work_limit, Stopwatch(time_limit_s, clock), progress)
    try:
        step_us = step_time_us(graph)
        goal = goal_of(gap, step_gap, step_us)
        chosen, save_set, search, stopped = _find_save_set(
            problem, budget, goal, step_us * GROUPS_GAIN, allowance, start
        )
    except InfeasibleBudget as error:
        raise with_constraints(error, constraints, forward) from None
    if shares_code:
        save_set = with_few_variants(chosen.graph, save_set, budget)
        spent = recompute_us(chosen.graph, save_set)
        allowed_us = max(gap * spent, goal.tolerance)
        if search and stopped is Stopped.OPTIMAL and spent - search.best.bound > allowed_us:
            stopped = Stopped.FEW_VARIANTS
    return plan_of(
        chosen if chosen.step is graph else SearchProblem(graph, chosen.options),
        None if isinstance(profile, Graph) else profile,
        budget,
        save_set,
        search,
        stopped,
        constraints=constraints,
    )


def goal_of(gap: float, step_gap: float | None, step_us: float) -> Goal:
    """Return the goal of a search, in the terms of `plan`, for a step that takes `step_us`."""
    return Goal(gap, step_us * (STEP_SHARE * gap if step_gap is None else step_gap))


def _find_save_set(
    problem: SearchProblem,
    budget: int,
    goal: Goal,
    groups_gain_us: float,
    allowance: Allowance,
    start: Iterable[SaveSet],
) -> tuple[SearchProblem, SaveSet, Search | None, Stopped]:
    """Return a save set that fits, its problem, its search, and the reason why the search stopped.

    The problem has use groups if they make the plan faster, or if no plan fits without them. Otherwise each
    op of the problem is recomputed at most once. The search is None if nothing was solved.

    Args:
        goal: when a plan is good enough.
        groups_gain_us: use groups that save less are not worth a search.

    Raises:
        InfeasibleBudget: no save set fits.
        SolverOutOfTime: the limits were reached before a save set was found.
    """
    once, graph, starts = problem.without_groups, problem.graph, tuple(start)
    if problem.ceiling <= budget:
        return once, once.graph.everything, None, Stopped.OPTIMAL
    if problem.bounds.floor > budget:
        raise infeasible(graph, budget, search_minimum_peak(problem, allowance.with_work(EVIDENCE_WORK)))
    if once is problem:
        return _search(problem, budget, goal, allowance, starts)
    of_step = [once.from_step(problem.to_step(save_set)) for save_set in starts]
    search = Search(once, budget, goal=goal, allowance=allowance, start=of_step)
    if search.best.save_set is None:
        return _search(problem, budget, goal, allowance, starts)
    work_before = allowance.work_left
    stopped = search.run()
    spent = work_before - allowance.work_left
    assert search.best.save_set is not None
    same = problem.from_step(once.to_step(search.best.save_set))
    if search.best.cost <= groups_gain_us:
        return once, search.best.save_set, search, stopped
    if allowance.over:
        return once, search.best.save_set, search, allowance.stopped
    enough = search.best.cost - groups_gain_us
    grouped = Search(
        problem,
        budget,
        goal=Goal(goal.gap, enough=enough),
        allowance=allowance.with_work_up_to(max(GROUPS_WORK, spent)),
        start=(*starts, same),
    )
    stopped_grouped = grouped.run()
    is_worth_it = grouped.best.bound <= enough  # as far as is proven
    if is_worth_it and not grouped.allowance.over:
        grouped.best.goal = goal
        stopped_grouped = grouped.run()
    if grouped.best.cost < search.best.cost - goal.tolerance:
        assert grouped.best.save_set is not None
        return problem, grouped.best.save_set, grouped, stopped_grouped
    if is_worth_it and stopped is Stopped.OPTIMAL:
        stopped = stopped_grouped
    return once, search.best.save_set, search, stopped


def _search(
    problem: SearchProblem, budget: int, goal: Goal, allowance: Allowance, start: Iterable[SaveSet]
) -> tuple[SearchProblem, SaveSet, Search | None, Stopped]:
    """Search `problem` alone; returns and raises as `_find_save_set` does.

    If no start fits, the smallest peak is searched first: its bound proves soonest that nothing fits.
    """
    search = Search(problem, budget, goal=goal, allowance=allowance, start=start)
    if search.best.save_set is None:
        floor_work = min(FLOOR_WORK_LIMIT, FLOOR_SHARE * max(allowance.work_left, 0.0))
        of_floor = allowance.with_work(floor_work)
        smallest = search_peak_within(search, of_floor)
        allowance.spend(floor_work - of_floor.work_left)
        if smallest.proven > budget:
            raise infeasible(problem.graph, budget, smallest)
        search.best.offer(smallest.save_set)
    stopped = search.run()
    if search.best.save_set is not None:
        return problem, search.best.save_set, search, stopped
    if stopped is Stopped.INFEASIBLE:
        evidence = replace(smallest, proven=max(smallest.proven, budget + 1))
        raise infeasible(problem.graph, budget, evidence)
    limit_s = None if math.isinf(allowance.time_limit_s) else allowance.time_limit_s
    raise SolverOutOfTime(budget, limit_s, smallest.proven, smallest.found)


def plan_of(
    problem: SearchProblem,
    profile: Profile | None,
    budget: int,
    save_set: SaveSet,
    search: Search | None = None,
    stopped: Stopped = Stopped.OPTIMAL,
    *,
    constraints: Constraints | None = None,
) -> Plan:
    """Return the Plan that saves `save_set`.

    Args:
        search: the finished search that found `save_set`; the Plan takes over its bound. None if nothing was
            solved: the recompute time of the Plan is then its own bound.
    """
    graph, save_set = problem.chosen(save_set)
    save_set = with_forced_saves(graph, save_set)  # a policy names them too: the runtime knows few by itself
    peak = peak_of(graph, save_set)
    again = recomputed_by_backward(graph, save_set)
    spent = recompute_us(graph, save_set)
    return Plan(
        graph=graph,
        profile=profile,
        budget=budget,
        save_set=save_set,
        recompute_set=frozenset(op.id for op in graph.ops if again[op.id]),
        peak=peak.live_bytes,
        peak_at=instant_name(graph, peak),
        ceiling=problem.ceiling,
        recompute_us=spent,
        bound_us=min(search.best.bound, spent) if search else spent,
        stopped=stopped,
        rounds=search.rounds if search else 0,
        solver_s=search.allowance.solver_s if search else 0.0,
        constraints=constraints or UNCONSTRAINED,
    )


def moving(
    plan: Plan, unmoved: Graph, graph: Graph, save_set: SaveSet, moves: Sequence[Move], times: Timing
) -> Plan:
    """Return `plan` with another save set, and with `moves`.

    Args:
        plan: of the same step without moves.
        unmoved: `graph` without `moves`.
        graph: of the step with `moves`.
        save_set: of `graph`; saves no moved op.
        times: of the step under both.
    """
    moved = {move.op for move in moves}
    peak = peak_of(graph, save_set)
    again = recomputed_by_backward(graph, save_set)
    return replace(
        plan,
        graph=graph,
        save_set=save_set,
        recompute_set=frozenset(op.id for op in graph.ops if again[op.id]) - moved,
        peak=peak.live_bytes,
        peak_at=instant_name(graph, peak),
        recompute_us=max(0.0, times.end_us - times.stall_us - step_time_us(graph)),
        moves=tuple(moves),
        timing=times,
        unmoved=unmoved,
    )


def _forward_limit(constraints: Constraints) -> int | None:
    """Return the budget of forward less the headroom, in bytes; None if forward has no budget of its own."""
    limit, headroom = constraints.forward_budget_bytes, constraints.headroom_bytes
    if limit is not None and limit <= headroom:
        raise InvalidBudget(
            f"the headroom of {format_bytes(headroom)} leaves nothing of forward's budget of "
            f"{format_bytes(limit)}: pass a smaller headroom, or a larger budget for forward"
        )
    return None if limit is None else limit - headroom


def decided(profile: Profile, graph: Graph, save_set: SaveSet, moves: Sequence[Move] = ()) -> dict[str, Any]:
    """Return the fields of a policy that hold decisions: `decisions`, and what belongs to them, if any.

    Args:
        graph: built from `profile`, perhaps with use groups and moves.
        moves: of ops that `save_set` does not save.
    """
    others = later_runs(graph)
    ops = (op.id for op in graph.ops if op.id not in others)
    key_of = dict(zip(ops, profile.keys(), strict=True))
    fates = decisions(profile, frozenset(i for i, op in enumerate(key_of) if op in save_set))
    use_groups = {}
    for row in () if graph.by_pass else graph.runs:
        if row[0] not in save_set:
            use_groups[key_of[row[0]]] = tuple(key_of[OpId(graph.ops[run].latest_use)] for run in row)
            if len(row) > 1:
                fates[key_of[row[0]]] = f"recompute@{len(row)}"
    points = {}
    keys = profile.keys()
    fetches = {step: keys[op] for step, op in triggers(build(profile)).items()} if moves else {}
    for move in moves:
        free = next((key for op, key in key_of.items() if op >= move.free), THE_END)
        assert move.fetch is not None
        points[key_of[move.op]] = MovePoints(free=free, fetch=fetches[move.fetch])
        fates[key_of[move.op]] = OFFLOAD
    needed = {
        keys[op]: keys[until] if until < len(keys) else THE_END
        for op, until in sorted(needed_until(profile).items())
        if fates[keys[op]] != SAVE
    }
    return {"decisions": fates, "use_groups": use_groups, "moves": points, "needed_until": needed}
