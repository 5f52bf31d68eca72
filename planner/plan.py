"""Profile + budget -> Plan: solve, simulate, and accept or say more precisely where the memory goes.

NOTE [ What is proven ]

The program that HiGHS solves is a relaxation (docs/formulation.md): every save set that fits satisfies its
rows. So its bound holds for every plan, in every round, and the largest one counts. A plan is accepted
only on the simulator's word. Where the simulator finds a peak above the budget, the row of that moment is
added, and where the row is there already, that save set alone is ruled out; neither cuts off a plan that
fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autoac.planner.bounds import bounds
from autoac.planner.candidates import candidates
from autoac.planner.errors import Holding, InfeasibleBudget, InvalidBudget, PlannerError, SolverOutOfTime
from autoac.planner.facts import NEVER, Facts, facts, starts
from autoac.planner.graph import Graph, OpId, SaveSet, build, needed, normalised, recompute_us
from autoac.planner.highs import OnProgress, Outcome, Progress, Stopped, solve
from autoac.planner.ilp import Built, Burst, Forward, Options, Point, Work, assignment, build_program
from autoac.planner.policy import Policy, Predicted, decisions, tool_versions
from autoac.planner.profile import Profile
from autoac.planner.schedule import Backward, Compute, Recompute
from autoac.planner.simulate import Instant, Timeline, live_at_peak, simulate
from autoac.planner.units import bytes_from_gb

FIRST_WINDOWS = 50  # points to start from: enough for two or three in each block of a dozen
SHARE = 0.9  # of the gap asked for that the solver may use up; the rest is for rounding


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
    rounds: int  # how many programs were solved

    @property
    def gap(self) -> float:
        """How much of the recompute time is not proven to be necessary: (time - bound) / time."""
        return _gap(self.recompute_us, self.bound_us)

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
            decisions=decisions(profile, self.save_set),
        )


@dataclass(frozen=True, slots=True)
class Floor:
    """The smallest peak, in bytes: no save set beats `proven`, and `save_set` reaches `found`."""

    proven: int
    found: int
    save_set: SaveSet = field(repr=False)
    stopped: Stopped


def plan(
    profile: Profile | Graph,
    *,
    budget_gb: float | None = None,
    budget_bytes: int | None = None,
    headroom_bytes: int = 0,
    gap: float = 0.01,
    time_limit_s: float = 60.0,
    progress: OnProgress | None = None,
    options: Options | None = None,
) -> Plan:
    """The save set that fits in the budget at the least recompute time.

    Args:
        profile: one training step, or the Graph of one.
        budget_gb: GiB that the device may hold at any moment, everything included. Or:
        budget_bytes: the same in bytes.
        headroom_bytes: of the budget, what to leave unused.
        gap: stop once the recompute time is proven to be within this fraction of the least.
        time_limit_s: seconds of the solver's own clock, over all rounds.
        progress: called now and then while solving; returning True stops the solver.
        options: switches of the program, for tests.

    Raises:
        InvalidBudget: not exactly one budget, or one that is not positive and finite.
        InfeasibleBudget: no save set fits.
        SolverOutOfTime: neither a plan nor a proof that there is none was found in time.
    """
    graph, observed = (profile, None) if isinstance(profile, Graph) else (build(profile), profile)
    budget = _budget(budget_gb, budget_bytes, headroom_bytes)
    known = bounds(graph)

    def finished(save_set: SaveSet, bound_us: float, stopped: Stopped, rounds: int) -> Plan:
        peak = simulate(graph, save_set).peak
        spent = recompute_us(graph, save_set)
        return Plan(
            graph=graph,
            profile=observed,
            budget=budget,
            headroom=headroom_bytes,
            save_set=save_set,
            recompute_set=_recompute_set(graph, save_set),
            peak=peak.live_bytes,
            peak_at=_where(graph, peak),
            ceiling=known.ceiling,
            floor=known.floor,
            recompute_us=spent,
            bound_us=min(bound_us, spent),
            stopped=stopped,
            rounds=rounds,
        )

    if known.ceiling <= budget:
        return finished(graph.everything, 0.0, Stopped.OPTIMAL, 0)
    options = options or Options()
    f = facts(graph, merge=options.merge)
    if known.floor > budget:
        raise _infeasible(
            f, budget, known.floor, _floor(f, known.floor, min(time_limit_s, 10.0), 0.02, progress)
        )

    best: tuple[float, SaveSet] | None = None
    for save_set in candidates(graph):
        best = _better(graph, budget, best, save_set)
    points = first_points(f)
    excluded: list[SaveSet] = []
    bound, left, rounds = 0.0, time_limit_s, 0
    stopped = Stopped.TIME_LIMIT
    while left > 0:
        rounds += 1
        built = build_program(f, budget, points, excluded=excluded, options=options)
        outcome = _solve(f, built, best[1] if best else None, left, gap * SHARE, progress)
        left -= outcome.seconds
        bound = max(bound, outcome.bound * built.cost_scale)
        stopped = outcome.stopped
        if stopped is Stopped.INFEASIBLE:
            if best is not None:
                # Rounding in the solver: what the simulator accepts does fit, and nothing better was left.
                return finished(best[1], best[0], Stopped.OPTIMAL, rounds)
            proven = max(known.floor, budget + 1)
            raise _infeasible(f, budget, proven, _floor(f, proven, min(left, 10.0), 0.02, progress))
        if outcome.values is not None:
            candidate = built.save_set(outcome.values)
            best = _better(graph, budget, best, normalised(graph, candidate))
            best = _better(graph, budget, best, candidate)
            if best is None or _gap(best[0], bound) > gap:
                new = _too_large(f, budget, candidate) - points
                if new:
                    points |= new
                else:
                    excluded.append(candidate)
        if best is not None and _gap(best[0], bound) <= gap:
            return finished(best[1], bound, Stopped.OPTIMAL, rounds)
        if stopped is not Stopped.OPTIMAL:
            break
    if best is None:
        raise SolverOutOfTime(budget, time_limit_s)
    return finished(best[1], bound, stopped if stopped is not Stopped.OPTIMAL else Stopped.TIME_LIMIT, rounds)


def floor(
    profile: Profile | Graph,
    *,
    time_limit_s: float = 15.0,
    gap: float = 0.01,
    progress: OnProgress | None = None,
) -> Floor:
    """The smallest peak that any save set has, as far as it can be found and proven in the time.

    Args:
        profile: one training step, or the Graph of one.
        time_limit_s: seconds of the solver's own clock.
        gap: stop once `found` is proven to be within this fraction of the smallest.
        progress: called now and then while solving; returning True stops the solver.
    """
    graph = profile if isinstance(profile, Graph) else build(profile)
    return _floor(facts(graph), bounds(graph).floor, time_limit_s, gap, progress)


def _floor(f: Facts, proven: int, time_limit_s: float, gap: float, progress: OnProgress | None) -> Floor:
    graph = f.graph
    found, save_set = min(
        ((simulate(graph, s).peak.live_bytes, s) for s in candidates(graph)), key=lambda pair: pair[0]
    )
    points, left, stopped = first_points(f), time_limit_s, Stopped.OPTIMAL
    excluded: list[SaveSet] = []
    slack = 0.04  # while points are missing it is not worth solving to the end
    while found - proven > gap * found:
        if left <= 0:
            return Floor(proven, found, save_set, Stopped.TIME_LIMIT)
        built = build_program(f, None, points, excluded=excluded, options=Options(lazy=True))
        target = max(gap * SHARE, slack)
        outcome = _solve(f, built, save_set, left, target, progress)
        left -= outcome.seconds
        stopped = outcome.stopped
        if math.isfinite(outcome.bound):
            proven = max(proven, min(found, math.ceil(outcome.bound * built.cost_scale * (1 - 1e-9))))
        if outcome.values is None:
            return Floor(proven, found, save_set, stopped)
        candidate = built.save_set(outcome.values)
        for s in (normalised(graph, candidate), candidate):
            peak = simulate(graph, s).peak.live_bytes
            if peak < found:
                found, save_set = peak, s
        reached = math.ceil((outcome.objective or 0.0) * built.cost_scale)
        new = _too_large(f, reached, candidate) - points
        if stopped is not Stopped.OPTIMAL:
            return Floor(proven, found, save_set, stopped)
        if new:
            points |= new
        elif target > gap * SHARE:
            slack = slack / 2 if slack > 0.005 else 0.0
        else:
            excluded.append(candidate)
    return Floor(proven, found, save_set, Stopped.OPTIMAL)


def first_points(f: Facts) -> set[Point]:
    """Where peaks are likely: the end of forward, and the fullest step in each of about fifty windows."""
    graph = f.graph
    save_all = simulate(graph, graph.everything)
    forward, by_step = (0, 0), [0] * len(graph.steps)
    for instant in save_all.instants:
        match instant.event:
            case Compute(op, _):
                forward = max(forward, (instant.live_bytes, op))
            case Backward(step):
                by_step[step] = instant.live_bytes
            case _:
                pass
    points: set[Point] = {Forward(forward[1])} if graph.ops else set()
    width = max(1, math.ceil(len(by_step) / FIRST_WINDOWS))
    for begin in range(0, len(by_step), width):
        window = range(begin, min(begin + width, len(by_step)))
        points.add(Work(max(window, key=lambda j: (by_step[j], -j))))
    return points


def _too_large(f: Facts, budget: int, save_set: SaveSet) -> set[Point]:
    """Where `save_set` is over the budget: the worst moment of each step, where it is a local maximum."""
    graph = f.graph
    n = len(graph.ops)
    start = starts(f, save_set)
    worst: dict[int, Instant] = {}
    for instant in simulate(graph, save_set).instants:
        if instant.event is not None and (
            instant.place not in worst or instant.live_bytes > worst[instant.place].live_bytes
        ):
            worst[instant.place] = instant
    points: set[Point] = set()
    for place, instant in worst.items():
        if instant.live_bytes <= budget:
            continue
        beside = (worst.get(place - 1), worst.get(place + 1))
        if any(other is not None and other.live_bytes > instant.live_bytes for other in beside):
            continue
        match instant.event:
            case Compute(op, _):
                points.add(Forward(op))
            case Recompute(op, _, _) if start[op] < NEVER:
                points.add(Burst(start[op], op))
            case _ if place >= n:
                points.add(Work(place - n))
    return points


def _solve(
    f: Facts, built: Built, start: SaveSet | None, left: float, gap: float, progress: OnProgress | None
) -> Outcome:
    """Solve, with progress told in the units of the Plan."""

    def report(now: Progress) -> bool | None:
        assert progress is not None
        scale = built.cost_scale
        return progress(Progress(now.primal * scale, now.dual * scale, now.gap, now.seconds))

    return solve(
        built.program,
        time_limit_s=left,
        gap=gap,
        start=assignment(f, built, start) if start is not None else None,
        progress=report if progress is not None else None,
    )


def _better(
    graph: Graph, budget: int, best: tuple[float, SaveSet] | None, save_set: SaveSet
) -> tuple[float, SaveSet] | None:
    """The faster of `best` and `save_set`, if that fits."""
    spent = recompute_us(graph, save_set)
    if best is not None and spent >= best[0]:
        return best
    if simulate(graph, save_set).peak.live_bytes > budget:
        return best
    return spent, save_set


def _gap(spent: float, bound: float) -> float:
    return max(0.0, (spent - bound) / spent) if spent > 0 else 0.0


def _budget(budget_gb: float | None, budget_bytes: int | None, headroom_bytes: int) -> int:
    if (budget_gb is None) == (budget_bytes is None):
        raise InvalidBudget("pass exactly one of budget_gb and budget_bytes")
    given = budget_gb if budget_gb is not None else budget_bytes
    name = "budget_gb" if budget_gb is not None else "budget_bytes"
    if (
        isinstance(given, bool)
        or not isinstance(given, (int, float))
        or not math.isfinite(given)
        or given <= 0
    ):
        raise InvalidBudget(f"{name} must be a positive number, not {given!r}")
    if headroom_bytes < 0:
        raise InvalidBudget(f"headroom_bytes must not be negative, not {headroom_bytes!r}")
    nbytes = bytes_from_gb(given) if budget_gb is not None else int(given)
    if nbytes - headroom_bytes <= 0:
        raise InvalidBudget(
            f"the headroom of {headroom_bytes} bytes leaves nothing of a budget of {nbytes} bytes"
        )
    return nbytes - headroom_bytes


def _infeasible(f: Facts, budget: int, proven: int, smallest: Floor) -> InfeasibleBudget:
    graph = f.graph
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
