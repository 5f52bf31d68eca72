"""The search for a save set that is proven good enough: relax, look near the relaxation, simulate, refine.

NOTE [ What is proven ]

The program that HiGHS solves is a relaxation (docs/formulation.md): every save set that fits satisfies its
rows. So its bound holds for every plan, in every round, and the largest one counts. A plan is accepted
only on the simulator's word. Where the simulator finds a peak above the budget, the row of that moment is
added, and where the row is there already, that save set alone is ruled out; neither cuts off a plan that
fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice

import numpy as np

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import fits, peak_bytes, simulate
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.arrays import Columns, columns
from autoac.planner.solver.bounds import Bounds, bounds_of
from autoac.planner.solver.constrained_moments import first_points, too_large
from autoac.planner.solver.heuristics import candidates, filled, greedy
from autoac.planner.solver.highs import Outcome, Program, Stopped
from autoac.planner.solver.program import Built, Options, Point, assignment, build_program
from autoac.planner.solver.recompute_windows import Facts, facts
from autoac.planner.solver.repeated_blocks import Likeness
from autoac.planner.solver.time_limit import Allowance, relative_gap

NEIGHBOURHOODS = ((0.05, 1.0), (0.2, 2.0))  # see Search._near
FEW_NODES = 20  # in a neighbourhood: what is not found soon is not there
UNDECIDED = 1e-6  # a decision of the relaxation is open if it is so far from both
POLISH_SHARES = (0.25, 0.5, 1.0)  # of what is left between bound and plan: what a change may cost
MANY_UNDECIDED = 100  # decisions that the relaxation leaves open: so many say little, see Search._in_turn
TILT = 0.01  # see Search._in_turn
FEW_UNDECIDED = 10  # decisions that the relaxation leaves between save and not: more are not worth polishing
POLISHED = 0.0005  # a plan within this of the bound is not worth improving
SHARE = 0.98  # of the gap asked for that the solver may use up; the rest is for rounding


Effort = Callable[[Built, Outcome], Outcome]


class Problem:
    """A graph, and what is known of it without a budget: worked out once, when first asked for."""

    def __init__(self, graph: Graph, options: Options | None = None) -> None:
        self.graph = graph
        self.options = options or Options()

    @cached_property
    def ceiling(self) -> int:
        """The peak with nothing recomputed: all that a budget needs in which everything fits."""
        return peak_bytes(self.graph, self.graph.everything)

    @cached_property
    def facts(self) -> Facts:
        """The windows outside which a decision plays no part."""
        return facts(self.graph, merge=self.options.merge)

    @cached_property
    def columns(self) -> Columns:
        """The facts as arrays."""
        return columns(self.facts)

    @cached_property
    def bounds(self) -> Bounds:
        """The range in which a budget is worth planning for."""
        return bounds_of(self.facts)

    @cached_property
    def likeness(self) -> Likeness | None:
        """Which parts are built alike; None if that is switched off."""
        return Likeness(self.facts) if self.options.likeness else None

    @cached_property
    def simple(self) -> tuple[tuple[float, SaveSet], ...]:
        """The simple save sets with their recompute times, the fastest first."""
        timed = [(recompute_us(self.graph, save_set), save_set) for save_set in candidates(self.graph)]
        return tuple(sorted(timed, key=lambda item: item[0]))


class Search:
    """Candidates from ever wider neighbourhoods of the relaxation, until one is proven good enough.

    Each round begins with the relaxation without integers, solved to its end: a fraction of a second, and
    a bound that is within a percent or two of the best plan. Nearly all of its decisions are whole
    already, and its prices (reduced costs) say what each column would cost if it were changed. So a
    candidate is looked for by rounding; then with all columns fixed that are dear to change; and at last
    with only those fixed that no plan as good as asked for can change, which is a proof if there is none.

    Source: docs/formulation.md, section 7.
    """

    def __init__(
        self,
        problem: Problem,
        budget: int,
        *,
        gap: float,
        allowance: Allowance,
        start: Iterable[SaveSet] = (),
        points: Iterable[Point] = (),
        bound_us: float = 0.0,
        polish: bool = True,
    ) -> None:
        """Args as in `plan`, and what a neighbouring budget has left: save sets, points, a valid bound."""
        self.polish = polish
        self.problem, self.f, self.graph = problem, problem.facts, problem.graph
        self.budget, self.gap, self.options = budget, gap, problem.options
        self.allowance = allowance
        self.best: tuple[float, SaveSet] | None = None  # recompute time, and the save set that takes it
        self.excluded: list[SaveSet] = []
        self.bound_us, self.rounds = bound_us, 0
        self.dearest_us = float(problem.columns.cost_us.sum())  # what running everything again takes
        self.slack = 0.0  # microseconds above the bound that the next cutoff allows
        self.cutoff_us = 0.0  # the last one
        self.missing: list[Point] | None = None  # where the last candidate is too large; None: nowhere
        for save_set in start:
            self._accept(save_set)
        self.points = set(points) or first_points(self.f, (self.graph.everything, self._likely()))

    def run(self) -> Stopped:
        """Why the search stopped. OPTIMAL: the best plan is proven to be within the gap."""
        stopped = self._run()
        if stopped is Stopped.OPTIMAL and self.polish:
            self._polish()
            if self.best is not None and relative_gap(self.best[0], self.bound_us) > 0:
                self._accept(greedy(self.graph, self.best[0]))
            if self.allowance.out_of_time:
                return Stopped.TIME_LIMIT  # good enough, but another machine may polish it further
        return stopped

    def _run(self) -> Stopped:
        near = [partial(self._near, share, reach) for share, reach in NEIGHBOURHOODS]
        efforts: list[Effort] = [self._rounded, self._in_turn, *near, self._among_all]
        at = 0
        built, relaxed = self._relaxation()
        while True:
            if self._done:
                return Stopped.OPTIMAL
            if self.allowance.over or relaxed.stopped not in (Stopped.OPTIMAL, Stopped.INFEASIBLE):
                self._fall_back()
                if self._done:
                    return Stopped.OPTIMAL
                return self.allowance.stopped if self.allowance.over else Stopped.FAILED
            if relaxed.stopped is Stopped.INFEASIBLE:
                return self._nothing_else()
            effort = min(at, len(efforts) - 1)
            outcome = efforts[effort](built, relaxed)
            if self._done or self.allowance.over:
                continue
            if outcome.values is None:
                of_all = effort == len(efforts) - 1
                if of_all and outcome.stopped is Stopped.INFEASIBLE and math.isinf(self.cutoff_us):
                    return self._nothing_else()
                if of_all and outcome.stopped is Stopped.FAILED:
                    self._fall_back()
                    return Stopped.OPTIMAL if self._done else Stopped.FAILED
                at += 1
                continue
            if self._more_points():
                at = 1
            elif effort < len(efforts) - 1 and (effort == 0 or self.missing is None):
                at += 1
                continue
            elif not self.options.lazy:
                # The candidate runs an op earlier than the runtime would, where no row forbids it yet.
                self.options = replace(self.options, apart=1, lazy=True)
            else:
                self.excluded.append(built.save_set(outcome.values))
            built, relaxed = self._relaxation()

    def _polish(self) -> None:
        """A better plan than the one that was good enough, if one is found soon.

        Only columns that a better plan can have elsewhere are left free (15). The effort is a count of
        nodes, so the same problem gives the same plan.
        """
        if self.best is None or self.allowance.over:
            return
        if relative_gap(self.best[0], self.bound_us) <= POLISHED:
            return
        built, relaxed = self.last
        if relaxed.values is None or _undecided(built, relaxed) > FEW_UNDECIDED:
            return
        for share in POLISH_SHARES:
            before = self.best[0]
            cutoff = before * (1 - POLISHED / 2) / built.cost_scale
            slack = cutoff - relaxed.bound
            if slack <= 0:
                return
            outcome = self.allowance.solve(
                priced_out(built.program.costing_at_most(cutoff), relaxed, share * slack),
                built.cost_scale,
                target=self.bound_us / (1 - POLISHED) / built.cost_scale,
                options={"mip_max_nodes": FEW_NODES},
            )
            self._consider(built, outcome)
            if share == 1:
                self._learn(min(outcome.bound, cutoff) * built.cost_scale)
            if self.best[0] < before:
                return

    @property
    def _done(self) -> bool:
        return self.best is not None and relative_gap(self.best[0], self.bound_us) <= self.gap

    def _nothing_else(self) -> Stopped:
        """No save set beside those that were ruled out satisfies the rows, or none that is better."""
        if self.best is None:
            self._fall_back()
        if self.best is None:
            return Stopped.INFEASIBLE
        self.bound_us = self.best[0]
        return Stopped.OPTIMAL

    def _fall_back(self) -> None:
        """Try the simple save sets, so that no plan is slower than what people do by hand; fill the best."""
        for spent, save_set in self.problem.simple:
            if self.best is not None and spent >= self.best[0]:
                break
            if fits(self.graph, save_set, self.budget):
                self._keep(save_set)
                break
        if self.best is not None and not (self._done or self.allowance.out_of_time):
            self._accept(filled(self.graph, self.best[1], self.budget))

    def _likely(self) -> SaveSet:
        """A save set with peaks where a plan is likely to have them: the second simple one."""
        if self.best is not None:
            return self.best[1]
        return next(islice(candidates(self.graph), 1, None), self.graph.everything)

    # What a round does

    def _relaxation(self) -> tuple[Built, Outcome]:
        """The program with the points so far, and its solution without integers."""
        self.rounds += 1
        built = build_program(
            self.problem.columns, self.budget, self.points, excluded=self.excluded, options=self.options
        )
        outcome = self.allowance.solve(built.program, built.cost_scale, relaxed=True)
        self._learn(outcome.bound * built.cost_scale)
        self.slack = max(self._target_us - self.bound_us, 1e-4 * self.dearest_us)
        self.last = built, outcome
        return built, outcome

    def _rounded(self, built: Built, relaxed: Outcome) -> Outcome:
        """The relaxation's decisions, rounded: seldom a plan, but they show where points are missing."""
        self._consider_rounded(built, relaxed)
        if relaxed.values is not None and _undecided(built, relaxed) >= MANY_UNDECIDED:
            self.missing = None  # where that is too large says little
        return relaxed

    def _in_turn(self, built: Built, relaxed: Outcome) -> Outcome:
        """A candidate from the relaxation of costs that rise a little along the model.

        Of many blocks built alike a relaxation may leave each half decided one way and half the other, since
        that saves the cost of the one place where the ways would meet. That says nothing, and rounds badly.
        Where what is run again costs a little more in each block than in the one before, the blocks are
        decided in turn, and a handful of decisions stays open. Tilting the costs is the perturbation that
        solvers use against degenerate bases, only larger, and the bound is not taken from it.
        """
        if _undecided(built, relaxed) < MANY_UNDECIDED:
            return replace(relaxed, values=None)
        outcome = self.allowance.solve(tilted(built, len(self.graph.ops)), built.cost_scale, relaxed=True)
        self._consider_rounded(built, outcome)
        return outcome

    def _near(self, share: float, reach: float, built: Built, relaxed: Outcome) -> Outcome:
        """A candidate in which nothing is changed that is dear to change.

        With the slack as the distance from the bound to what is asked for: `share` of it is what a change
        may cost, and the candidate may be `reach` times as far from the bound.
        """
        target = self._target_us / built.cost_scale
        slack = max(target - relaxed.bound, 0.0)
        outcome = self.allowance.solve(
            priced_out(built.program.costing_at_most(relaxed.bound + reach * slack), relaxed, share * slack),
            built.cost_scale,
            target=target,
            options={"mip_max_nodes": FEW_NODES},
        )
        self._consider(built, outcome)
        return outcome

    def _among_all(self, built: Built, relaxed: Outcome) -> Outcome:
        """A candidate from the whole program up to a cutoff, or the proof that there is none.

        The cutoff starts at what is asked for and moves away twice as far each time.
        """
        best = self.best[0] if self.best is not None else math.inf
        cutoff_us = self.bound_us + self.slack
        if cutoff_us >= self.dearest_us:
            cutoff_us = math.inf
        self.cutoff_us = cutoff_us = min(cutoff_us, best)
        self.slack *= 2
        cutoff = cutoff_us / built.cost_scale
        program = built.program
        if math.isfinite(cutoff):
            program = program.costing_at_most(cutoff)
            if self.options.prices:
                program = priced_out(program, relaxed, cutoff - relaxed.bound)
        start = assignment(self.f, built, self.best[1]) if self.best and cutoff_us >= best else None
        outcome = self.allowance.solve(
            program,
            built.cost_scale,
            gap=self.gap * SHARE,
            target=self._target_us / built.cost_scale,
            start=start,
        )
        self._learn(min(outcome.bound * built.cost_scale, cutoff_us))
        self._consider(built, outcome)
        return outcome

    @property
    def _target_us(self) -> float:
        """A plan that takes no longer is proven to be good enough."""
        return self.bound_us / max(1 - self.gap * SHARE, 0.01)

    # What comes of it

    def _learn(self, bound_us: float) -> None:
        if math.isfinite(bound_us):
            self.bound_us = max(self.bound_us, bound_us)
        self.allowance.tell(self.best[0] if self.best else None, self.bound_us)

    def _consider(self, built: Built, outcome: Outcome) -> None:
        """Simulate what an assignment saves; whether it fits and what it lacks is remembered."""
        self.missing = None
        if outcome.values is None:
            return
        found = built.save_set(outcome.values)
        tidy = without_cost_free_recomputes(self.graph, found)
        if peak_bytes(self.graph, tidy) <= self.budget:
            self._keep(tidy)
            return
        timeline = simulate(self.graph, found)  # rarely takes less than with what nothing needs saved as well
        if timeline.peak.live_bytes <= self.budget:
            self._keep(found)
        else:
            self.missing = too_large(self.f, self.budget, found, timeline, self.problem.likeness)

    def _consider_rounded(self, built: Built, outcome: Outcome) -> None:
        self._consider(built, outcome)
        if self.missing is not None and outcome.values is not None:
            # Without what it saves only in part: takes less memory, and in a large model hardly more time.
            self._accept(
                without_cost_free_recomputes(self.graph, built.save_set(np.floor(outcome.values + UNDECIDED)))
            )

    def _accept(self, save_set: SaveSet) -> None:
        """Keep `save_set` if it fits and is faster than the best so far."""
        faster = self.best is None or recompute_us(self.graph, save_set) < self.best[0]
        if faster and fits(self.graph, save_set, self.budget):
            self._keep(save_set)

    def _keep(self, save_set: SaveSet) -> None:
        spent = recompute_us(self.graph, save_set)
        if self.best is None or spent < self.best[0]:
            self.best = spent, save_set
        self.allowance.reserved_s = 0.0  # nobody has to look for a first one

    def _more_points(self) -> bool:
        """Add the points at which the last candidate is too large; whether there were any new ones."""
        new = [point for point in self.missing or () if point not in self.points]
        self.points.update(new)
        return bool(new)


def _undecided(built: Built, relaxed: Outcome) -> int:
    assert relaxed.values is not None
    saved = relaxed.values[built.saves]
    return int(((saved > UNDECIDED) & (saved < 1 - UNDECIDED)).sum())


def tilted(built: Built, n_ops: int) -> Program:
    """The program with costs that rise by `TILT` from the first op to the last."""
    costs = built.program.costs.copy()
    costs[built.saves] *= 1 + TILT * np.array(built.ops) / n_ops
    costs[built.runs] *= 1 + TILT * built.run_ops / n_ops
    return replace(built.program, costs=costs)


def priced_out(program: Program, relaxed: Outcome, slack: float) -> Program:
    """`program` without the columns that cost more than `slack` to move from where the relaxation has them.

    (15) A solution that costs at most `slack` more than the relaxation has none of them moved (reduced
    cost fixing; L. Wolsey, "Integer Programming", section 7.3).
    """
    assert relaxed.values is not None
    assert relaxed.reduced_costs is not None
    dear = slack * (1 + 1e-6) + 1e-9
    low = (relaxed.reduced_costs > dear) & (relaxed.values <= program.lower + 1e-9)
    high = (relaxed.reduced_costs < -dear) & (relaxed.values >= program.upper - 1e-9)
    columns_ = np.flatnonzero(low | high)
    return program.fixed(columns_, np.where(low, program.lower, program.upper)[columns_])
