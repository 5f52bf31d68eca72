"""Profile + budget -> Plan: solve, simulate, and accept or say more precisely where the memory goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Integral

from autoac.planner.allowance import check_limits, relative_gap
from autoac.planner.bounds import bounds
from autoac.planner.budget import budget_in_bytes
from autoac.planner.constraints import Constraints, blamed, constrained, held_back
from autoac.planner.errors import Holding, InfeasibleBudget, InvalidBudget, PlannerError, SolverOutOfTime
from autoac.planner.floor import Floor, FloorSearch
from autoac.planner.graph import Graph, OpId, SaveSet, build, needed, recompute_us
from autoac.planner.highs import OnProgress, Stopped
from autoac.planner.ilp import Options
from autoac.planner.lives import live_at_peak
from autoac.planner.policy import Policy, Predicted, decisions, tool_versions
from autoac.planner.profile import Profile
from autoac.planner.schedule import Recompute
from autoac.planner.search import Problem, Search
from autoac.planner.simulate import Instant, Timeline, peak_bytes, simulate
from autoac.planner.units import format_bytes

DEFAULT_GAP = 0.01
DEFAULT_TIME_LIMIT_S = 60.0
"""What a plan gets where the call does not say; the service's requests too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to save, with the evidence for it. Bytes and microseconds."""

    graph: Graph = field(repr=False)
    profile: Profile | None = field(repr=False)  # None: planned from a Graph
    budget: int  # what the peak may be, headroom taken off
    headroom: int
    save_set: SaveSet = field(repr=False)
    recompute_set: SaveSet = field(repr=False)  # ops that backward really runs again
    peak: int  # the simulator's
    peak_at: str
    ceiling: int  # the peak with nothing recomputed
    floor: int  # no save set has a smaller peak (proven)
    recompute_us: float
    bound_us: float  # proven: no plan within the budget recomputes less
    stopped: Stopped
    rounds: int  # how many relaxations were solved
    solver_s: float = field(default=0.0, compare=False)  # seconds of the solver's own clock
    constraints: Constraints | None = None  # what it was planned under

    @property
    def gap(self) -> float:
        """How much of the recompute time is not proven to be necessary: (time - bound) / time."""
        return relative_gap(self.recompute_us, self.bound_us)

    @property
    def timeline(self) -> Timeline:
        """The bytes live at each event of the step."""
        return simulate(self.graph, self.save_set)

    @property
    def step_us(self) -> float:
        """Forward and backward with nothing recomputed."""
        return _step_us(self.graph)

    def policy(self) -> Policy:
        """The plan as the runtime loads it. The same plan gives the same text."""
        profile = self.profile
        if profile is None:
            raise PlannerError("a policy needs the Profile: call plan() with one, not with a Graph")
        return Policy(
            model=profile.model,
            fingerprint=profile.fingerprint,
            profile_digest=profile.digest,
            inputs=profile.inputs,
            device=profile.environment.device_name,
            budget_bytes=self.budget + self.headroom,
            stopped=self.stopped.value,
            predicted=Predicted(
                peak_bytes=self.peak,
                peak_at=self.peak_at,
                save_all_peak_bytes=self.ceiling,
                static_bytes=self.graph.static_bytes,
                recompute_us=self.recompute_us,
                recompute_bound_us=self.bound_us,
                step_us=self.step_us,
                gap=self.gap,
            ),
            tools=tool_versions(),
            constraints=self.constraints,
            decisions=decisions(profile, self.save_set),
        )


def plan(
    profile: Profile | Graph,
    *,
    budget_gb: float | None = None,
    budget_bytes: int | None = None,
    headroom_bytes: int = 0,
    constraints: Constraints | None = None,
    gap: float = DEFAULT_GAP,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: OnProgress | None = None,
    options: Options | None = None,
) -> Plan:
    """The save set that fits in the budget at the least recompute time.

    Args:
        profile: one training step, or the Graph of one.
        budget_gb: GiB that the device may hold at any moment, everything included. Or:
        budget_bytes: the same in bytes.
        headroom_bytes: of the budget, what to leave unused.
        constraints: what must hold beside the budget. Bounds and floors are those under them.
        gap: stop once the recompute time is proven to be within this fraction of the least.
        time_limit_s: seconds of the solver's own clock, over all rounds.
        progress: called now and then while solving; returning True stops the solver.
        options: switches of the program, for tests.

    Raises:
        InvalidBudget: not exactly one budget, or one that is not positive and finite.
        InvalidLimit: `gap` is not from 0 to 1, or `time_limit_s` is negative.
        InvalidConstraints: a pattern stands for nothing, pins contradict each other, or the like.
        InfeasibleBudget: no save set fits. InfeasibleConstraints: because of the constraints.
        SolverOutOfTime: neither a plan nor a proof that there is none was found in time.
    """
    budget = _budget(budget_gb, budget_bytes, headroom_bytes)
    check_limits(gap, time_limit_s)
    if constraints is not None and constraints != Constraints():

        def on_graph(graph: Graph) -> Plan:
            return plan(
                graph,
                budget_bytes=budget + headroom_bytes,
                headroom_bytes=headroom_bytes,
                gap=gap,
                time_limit_s=time_limit_s,
                progress=progress,
                options=options,
            )

        return _under(constraints, profile, budget, headroom_bytes, on_graph)
    graph, observed = (profile, None) if isinstance(profile, Graph) else (build(profile), profile)
    options = options or Options()
    problem = Problem.of(graph, options)
    known = problem.bounds
    if known.ceiling <= budget:
        return plan_of(problem, observed, budget, graph.everything, headroom=headroom_bytes)
    if known.floor > budget:
        smallest = FloorSearch(problem, known.floor, min(time_limit_s, 10.0), 0.02, progress).run()
        raise _infeasible(graph, budget, known.floor, smallest)

    search = Search(problem, budget, gap=gap, time_limit_s=time_limit_s, options=options, progress=progress)
    stopped = search.run()
    if stopped is Stopped.INFEASIBLE:
        proven = max(known.floor, budget + 1)
        smallest = FloorSearch(problem, proven, min(search.allowance.left, 10.0), 0.02, progress).run()
        raise _infeasible(graph, budget, proven, smallest)
    if search.best is None:
        raise SolverOutOfTime(budget, time_limit_s)
    return plan_of(problem, observed, budget, search.best[1], search, stopped, headroom_bytes)


def _under(
    constraints: Constraints,
    profile: Profile | Graph,
    budget: int,
    headroom: int,
    planned: Callable[[Graph], Plan],
) -> Plan:
    """The plan of the graph that `constraints` make of `profile`, told as one of that profile."""
    forward = constraints.forward_budget_bytes
    if forward is not None:
        forward -= headroom
        if forward <= 0:
            raise InvalidBudget(
                f"the headroom of {format_bytes(headroom)} leaves nothing of forward's budget of "
                f"{format_bytes(forward + headroom)}: pass a smaller headroom, or a larger budget for forward"
            )
    graph = constrained(profile, constraints)
    searched = held_back(graph, budget, forward)
    try:
        made = planned(searched)
    except InfeasibleBudget as error:
        raise blamed(error, profile, constraints, forward) from None
    peak = simulate(graph, made.save_set).peak
    return replace(
        made,
        graph=graph,
        profile=None if isinstance(profile, Graph) else profile,
        peak=peak.live_bytes,
        peak_at=_where(graph, peak),
        ceiling=peak_bytes(graph, graph.everything),
        floor=made.floor if searched is graph else bounds(graph).floor,
        constraints=constraints,
    )


def plan_of(
    problem: Problem,
    profile: Profile | None,
    budget: int,
    save_set: SaveSet,
    search: Search | None = None,
    stopped: Stopped = Stopped.OPTIMAL,
    headroom: int = 0,
) -> Plan:
    """The Plan of a save set, with the evidence of the search that found it; none: nothing is recomputed."""
    graph = problem.graph
    peak = simulate(graph, save_set).peak
    spent = recompute_us(graph, save_set)
    return Plan(
        graph=graph,
        profile=profile,
        budget=budget,
        headroom=headroom,
        save_set=save_set,
        recompute_set=_recompute_set(graph, save_set),
        peak=peak.live_bytes,
        peak_at=_where(graph, peak),
        ceiling=problem.bounds.ceiling,
        floor=problem.bounds.floor,
        recompute_us=spent,
        bound_us=min(search.bound_us, spent) if search else spent,
        stopped=stopped,
        rounds=search.rounds if search else 0,
        solver_s=search.allowance.spent if search else 0.0,
    )


def _budget(budget_gb: float | None, budget_bytes: int | None, headroom_bytes: int) -> int:
    if (budget_gb is None) == (budget_bytes is None):
        raise InvalidBudget("pass exactly one of budget_gb and budget_bytes")
    if headroom_bytes < 0:
        raise InvalidBudget(f"headroom_bytes must not be negative, got {headroom_bytes!r}")
    if budget_gb is not None:
        nbytes = budget_in_bytes(budget_gb)
    elif isinstance(budget_bytes, Integral) and not isinstance(budget_bytes, bool) and budget_bytes > 0:
        nbytes = int(budget_bytes)
    else:
        raise InvalidBudget(f"budget_bytes must be a positive whole number, got {budget_bytes!r}")
    if nbytes - headroom_bytes <= 0:
        raise InvalidBudget(
            f"the headroom of {format_bytes(headroom_bytes)} leaves nothing of a budget of "
            f"{format_bytes(nbytes)}: pass a smaller headroom or a larger budget"
        )
    return nbytes - headroom_bytes


def _infeasible(graph: Graph, budget: int, proven: int, smallest: Floor) -> InfeasibleBudget:
    peak = simulate(graph, smallest.save_set).peak
    live: list[Holding] = live_at_peak(graph, smallest.save_set)
    return InfeasibleBudget(budget, max(proven, smallest.proven), smallest.found, _where(graph, peak), live)


def _where(graph: Graph, instant: Instant) -> str:
    match instant.event:
        case Recompute(op, _, step):
            return f"{graph.ops[op].name}, run again in backward step {step} ({graph.steps[step].name})"
        case _:
            return graph.moment_name(instant.place)


def _recompute_set(graph: Graph, save_set: SaveSet) -> SaveSet:
    return frozenset(OpId(op) for op, run in enumerate(needed(graph, save_set)) if run)


def _step_us(graph: Graph) -> float:
    return sum(op.runtime_us for op in graph.ops) + sum(step.runtime_us for step in graph.steps)
