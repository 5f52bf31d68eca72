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
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

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
from autoac.planner.simulate import Instant, Timeline, live_at_peak, peak_bytes, simulate
from autoac.planner.units import bytes_from_gb

FIRST_WINDOWS = 40  # stretches of backward with a point to start from: three or so in each block of a dozen
MORE = 6  # points that a round adds at most
WINDOW = 0.1  # of backward: how early an op may run in the smaller program
UNSAVED = 1e-6  # a decision of the relaxation below this is to save nothing
FEW_NODES = 20  # around the relaxation: what is not found soon is not there
NODES = 300  # of a smaller program; a count, where a time would give another plan on a busy machine
SHARE = 0.98  # of the gap asked for that the solver may use up; the rest is for rounding


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
        return finished(graph.everything, math.inf, Stopped.OPTIMAL, 0)  # nothing takes less than that
    options = options or Options()
    f = facts(graph, merge=options.merge)
    if known.floor > budget:
        raise _infeasible(
            f, budget, known.floor, _floor(f, known.floor, min(time_limit_s, 10.0), 0.02, progress)
        )

    search = _Search(f, budget, gap, time_limit_s, options, progress)
    stopped = search.run()
    if stopped is Stopped.INFEASIBLE:
        proven = max(known.floor, budget + 1)
        raise _infeasible(f, budget, proven, _floor(f, proven, min(search.left, 10.0), 0.02, progress))
    if search.best is None:
        raise SolverOutOfTime(budget, time_limit_s)
    return finished(search.best[1], search.bound_us, stopped, search.rounds)


class _Search:
    """Candidates from ever larger programs, until one that the simulator accepts is proven good enough.

    Each round has two halves. The relaxation without integers is solved to its end: a fraction of a
    second, and a bound that is within a percent or two of the best plan. Then a candidate is looked for,
    first by rounding, then near the relaxation's decisions, then among plans in which an op runs again
    shortly before it is needed, where the program is a third as large, and only if nothing there is good
    enough among all.

    Source: docs/formulation.md, section 7.
    """

    def __init__(
        self,
        f: Facts,
        budget: int,
        gap: float,
        time_limit_s: float,
        options: Options,
        progress: OnProgress | None,
    ) -> None:
        self.f, self.budget, self.gap, self.options, self.progress = f, budget, gap, options, progress
        self.left, self.most_around = time_limit_s, time_limit_s / 5
        self.best: tuple[float, SaveSet] | None = None  # microseconds, and who takes them
        simple = candidates(f.graph)
        for save_set in simple:
            self._accept(save_set)
        likely = self.best[1] if self.best else _smallest(f.graph, simple)
        self.points = first_points(f, (f.graph.everything, likely))
        self.excluded: list[SaveSet] = []
        self.bound_us, self.rounds = 0.0, 0
        self.nearby_us = self.around_us = 0.0  # up to this the smaller programs have no plan

    @property
    def _done(self) -> bool:
        return self.best is not None and _gap(self.best[0], self.bound_us) <= self.gap

    def run(self) -> Stopped:
        """Why the search stopped. OPTIMAL: the best plan is proven to be within the gap."""
        efforts = [self._rounded, self._around, self._nearby, self._among_all]
        last = len(efforts) - 1
        at = 0
        built, relaxed = self._relaxation()
        while self.left > 0:
            outcome, of_all = relaxed, True
            if relaxed.stopped is Stopped.OPTIMAL and not self._done:
                outcome, of_all = efforts[at](built, relaxed), at == last
            if outcome.stopped is Stopped.INFEASIBLE and of_all:
                if self.best is None:
                    return Stopped.INFEASIBLE
                self.bound_us = self.best[0]  # all that fits is excluded, for having been found
            if outcome.stopped is Stopped.INTERRUPTED:
                return Stopped.INTERRUPTED
            if self._done:
                return Stopped.OPTIMAL
            if outcome.values is None:
                if at == last:
                    break
                at += 1
                continue
            if self._more_points(built, outcome):
                at = 1
            elif efforts[at] in (self._rounded, self._nearby):
                at += 1
                continue
            elif not self.options.lazy:
                # The candidate runs an op earlier than the runtime would, where no row forbids it yet.
                self.options = replace(self.options, apart=1, lazy=True)
            else:
                self.excluded.append(built.save_set(outcome.values))
            built, relaxed = self._relaxation()
        return Stopped.TIME_LIMIT

    def _relaxation(self) -> tuple[Built, Outcome]:
        """The program with the points so far, and its solution without integers."""
        self.rounds += 1
        built = build_program(self.f, self.budget, self.points, excluded=self.excluded, options=self.options)
        outcome = solve(built.program, time_limit_s=self.left, relaxed=True)
        self._learn(built, outcome)
        return built, outcome

    def _rounded(self, built: Built, relaxed: Outcome) -> Outcome:
        """The relaxation's decisions, rounded: seldom a plan, but they show where points are missing."""
        self._consider(built, relaxed)
        return relaxed

    def _around(self, built: Built, relaxed: Outcome) -> Outcome:
        """A candidate as good as the bound demands that saves only what the relaxation saves in part.

        Source: E. Danna, E. Rothberg, C. Le Pape, "Exploring relaxation induced neighborhoods to improve
        MIP solutions", Mathematical Programming 102 (2005); with no incumbent to agree with.
        """
        assert relaxed.values is not None
        if self.around_us >= self._target_us:
            return replace(relaxed, values=None)
        columns = built.saved.values()
        target = self._target_us / built.cost_scale
        outcome = solve(
            built.program.costing_at_most(target),
            time_limit_s=min(self.most_around, self.left),
            target=target,
            fixed={column: 0.0 for column in columns if relaxed.values[column] < UNSAVED},
            progress=_scaled(self.progress, built.cost_scale),
            options={"mip_heuristic_run_rens": False, "mip_max_nodes": FEW_NODES},
        )
        self.left -= outcome.seconds
        if outcome.values is None:
            self.around_us = target * built.cost_scale
        self._consider(built, outcome)
        return outcome

    def _nearby(self, whole: Built, relaxed: Outcome) -> Outcome:
        """A candidate as good as the bound demands in which an op runs again shortly before it is needed."""
        if self.nearby_us > self._target_us:
            return replace(relaxed, values=None)  # more points only make it slower
        built = build_program(
            self.f,
            self.budget,
            self.points,
            excluded=self.excluded,
            options=replace(self.options, near=WINDOW, apart=1 << 30),
            window=WINDOW,
        )
        # HiGHS searches it better without a candidate to start from: its heuristics would stay near.
        outcome = solve(
            built.program,
            time_limit_s=min(self.most_around, self.left),
            gap=self.gap / 5,
            target=self._target_us / built.cost_scale,
            progress=_scaled(self.progress, built.cost_scale),
            options={"mip_heuristic_run_rens": False, "mip_max_nodes": NODES},
        )
        self.left -= outcome.seconds
        self.nearby_us = outcome.bound * built.cost_scale
        self._consider(built, outcome)
        if outcome.values is None:
            return outcome
        values = np.zeros(len(whole.program.variables))
        for op, column in built.saved.items():
            values[whole.saved[op]] = outcome.values[column]
        return replace(outcome, values=values)

    def _among_all(self, built: Built, _relaxed: Outcome) -> Outcome:
        """A candidate from the whole program, and its bound."""
        outcome = solve(
            built.program,
            time_limit_s=self.left,
            gap=self.gap * SHARE,
            start=assignment(self.f, built, self.best[1]) if self.best else None,
            progress=_scaled(self.progress, built.cost_scale),
            options={"mip_heuristic_run_rins": False, "mip_heuristic_run_rens": False},
        )
        self._learn(built, outcome)
        self._consider(built, outcome)
        return outcome

    @property
    def _target_us(self) -> float:
        """A plan that takes no longer is proven to be good enough."""
        return self.bound_us / max(1 - self.gap * SHARE, 0.01)

    def _consider(self, built: Built, outcome: Outcome) -> None:
        if outcome.values is not None:
            found = built.save_set(outcome.values)
            self._accept(normalised(self.f.graph, found))
            self._accept(found)

    def _learn(self, built: Built, outcome: Outcome) -> None:
        self.left -= outcome.seconds
        if math.isfinite(outcome.bound):
            self.bound_us = max(self.bound_us, outcome.bound * built.cost_scale)

    def _accept(self, save_set: SaveSet) -> None:
        """Keep `save_set` if it fits and is faster than the best so far."""
        spent = recompute_us(self.f.graph, save_set)
        if (self.best is None or spent < self.best[0]) and peak_bytes(self.f.graph, save_set) <= self.budget:
            self.best = spent, save_set

    def _more_points(self, built: Built, outcome: Outcome) -> bool:
        """Add the points at which the candidate is too large; whether there were any new ones."""
        if outcome.values is None:
            return False
        found = _too_large(self.f, self.budget, built.save_set(outcome.values))
        new = [point for point in found if point not in self.points][:MORE]
        self.points.update(new)
        return bool(new)


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
    save_set = _smallest(graph, candidates(graph))
    found = peak_bytes(graph, save_set)
    points = first_points(f, (graph.everything, save_set))
    left, stopped = time_limit_s, Stopped.OPTIMAL
    excluded: list[SaveSet] = []
    slack = 0.04  # while points are missing it is not worth solving to the end
    while found - proven > gap * found:
        if left <= 0:
            return Floor(proven, found, save_set, Stopped.TIME_LIMIT)
        built = build_program(f, None, points, excluded=excluded, options=Options(lazy=True))
        target = max(gap * SHARE, slack)
        outcome = solve(
            built.program,
            time_limit_s=left,
            gap=target,
            start=assignment(f, built, save_set),
            progress=_scaled(progress, built.cost_scale),
        )
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
        new = [point for point in _too_large(f, reached, candidate) if point not in points][:MORE]
        if stopped is not Stopped.OPTIMAL:
            return Floor(proven, found, save_set, stopped)
        if new:
            points.update(new)
        elif target > gap * SHARE:
            slack = slack / 2 if slack > 0.005 else 0.0
        else:
            excluded.append(candidate)
    return Floor(proven, found, save_set, Stopped.OPTIMAL)


def first_points(f: Facts, save_sets: Iterable[SaveSet]) -> set[Point]:
    """Where peaks are likely: the fullest moments of forward and of stretches of backward, by save set."""
    graph = f.graph
    points: set[Point] = set()
    width = max(1, math.ceil(len(graph.steps) / FIRST_WINDOWS))
    for save_set in save_sets:
        forward: tuple[int, int] | None = None
        by_step = [0] * len(graph.steps)
        for instant in simulate(graph, save_set).instants:
            match instant.event:
                case Compute(op, _):
                    forward = max(forward or (0, 0), (instant.live_bytes, op))
                case Backward(step):
                    by_step[step] = instant.live_bytes
                case _:
                    pass
        if forward is not None:
            points.add(Forward(forward[1]))
        for begin in range(0, len(by_step), width):
            window = range(begin, min(begin + width, len(by_step)))
            points.add(Work(max(window, key=lambda j: (by_step[j], -j))))
    return points


def _too_large(f: Facts, budget: int, save_set: SaveSet) -> list[Point]:
    """Where `save_set` is over the budget, worst first: the worst moments of steps, at local maxima."""
    graph = f.graph
    n = len(graph.ops)
    start = starts(f, save_set)
    worst: dict[int, Instant] = {}
    for instant in simulate(graph, save_set).instants:
        if instant.event is not None and (
            instant.place not in worst or instant.live_bytes > worst[instant.place].live_bytes
        ):
            worst[instant.place] = instant
    points: list[Point] = []
    for place, instant in sorted(worst.items(), key=lambda item: -item[1].live_bytes):
        if instant.live_bytes <= budget:
            continue
        beside = (worst.get(place - 1), worst.get(place + 1))
        if any(other is not None and other.live_bytes > instant.live_bytes for other in beside):
            continue
        match instant.event:
            case Compute(op, _):
                points.append(Forward(op))
            case Recompute(op, _, _) if start[op] < NEVER:
                points.append(Burst(start[op], op))
            case _ if place >= n:
                points.append(Work(place - n))
    return points


def _scaled(progress: OnProgress | None, scale: float) -> OnProgress | None:
    """`progress`, told in the units of the Plan."""
    if progress is None:
        return None
    told = progress
    return lambda now: told(Progress(now.primal * scale, now.dual * scale, now.gap, now.seconds))


def _smallest(graph: Graph, save_sets: Iterable[SaveSet]) -> SaveSet:
    """The one with the smallest peak."""
    return min(save_sets, key=lambda save_set: peak_bytes(graph, save_set))


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
