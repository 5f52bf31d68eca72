"""Graph + budget -> a mixed-integer program, and back. Equation numbers refer to docs/formulation.md.

The program is a relaxation of the simulator: every save set that fits, in its canonical form, satisfies
every row. So the solver's bound is a bound on what any plan can do, whatever points and states it was
given; more of them make it tighter. This module never runs the simulator.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pulp

from autoac.planner.facts import END, NEVER, Facts, Role, canonical, starts
from autoac.planner.graph import OpId, SaveSet, ValueId
from autoac.planner.highs import Floats, Program, Rows


@dataclass(frozen=True, slots=True, order=True)
class Forward:
    """While forward runs `op`."""

    op: int


@dataclass(frozen=True, slots=True, order=True)
class Work:
    """While backward does the work of `step`."""

    step: int


@dataclass(frozen=True, slots=True, order=True)
class Burst:
    """While the unpack that leads to `state` runs `op` again."""

    state: int
    op: int


Point = Forward | Work | Burst
"""A moment at which the budget is written as a row."""


@dataclass(frozen=True, slots=True)
class Options:
    """Switches of what is valid but not needed. The answers are the same with each off."""

    merge: bool = True  # (3) followers: read by `facts`, kept here so that one value names every switch
    lazy: bool = False  # (6) nothing runs again before something asks for it
    wanted: bool = True  # (7) only what may be wanted is saved
    near: float = 1 / 6  # (2) before an op is first needed, all grid states in this share of backward count
    apart: int = 4  # (2) and of the earlier ones every so many; 1: all


@dataclass(slots=True)
class Expr:
    """A linear expression: column -> coefficient, and a constant."""

    terms: dict[int, float] = field(default_factory=dict)
    constant: float = 0.0

    def add(self, other: Expr, factor: float = 1.0) -> Expr:
        """Add `factor * other` in place."""
        terms = self.terms
        for column, coefficient in other.terms.items():
            total = terms.get(column, 0.0) + factor * coefficient
            if total:
                terms[column] = total
            else:
                terms.pop(column, None)
        self.constant += factor * other.constant
        return self

    def value(self, values: Sequence[float] | Floats) -> float:
        """The expression at an assignment."""
        return self.constant + sum(c * values[j] for j, c in self.terms.items())


@dataclass(frozen=True, slots=True)
class Built:
    """A program, and what its columns stand for."""

    program: Program
    saved: Mapping[OpId, int]  # column of s, by free op
    runs: Mapping[tuple[OpId, int], int]  # column of x, by (op, state); state END is the last
    auxiliary: tuple[tuple[int, tuple[Expr, ...]], ...]  # column -> it is the largest of these and 0
    peak: int | None  # column of the peak, if that is minimised
    cost_scale: float  # objective * cost_scale is microseconds (or bytes)

    def save_set(self, values: Floats) -> SaveSet:
        """The ops that an assignment saves. What must be saved is not named."""
        return frozenset(op for op, column in self.saved.items() if values[column] > 0.5)


class Builder:
    """Collects columns and rows. One method for each constraint family."""

    def __init__(
        self,
        f: Facts,
        budget: int | None,
        points: Iterable[Point],
        options: Options,
        window: float | None,
    ) -> None:
        self.f, self.graph, self.budget, self.options = f, f.graph, budget, options
        self.n = len(self.graph.ops)
        self.window = window
        self.points = sorted(set(points), key=_order)
        self.states = sorted({0, f.n_states, *(t for p in self.points for t in states_of(f, p))})
        self.grids: dict[OpId, list[int]] = {}
        self.begins: dict[OpId, float] = {}  # state before which x is not allowed
        self.columns: list[tuple[str, float, bool]] = []  # name, upper bound, integer
        self.saved: dict[OpId, int] = {}
        self.runs: dict[tuple[OpId, int], int] = {}
        self.auxiliary: list[tuple[int, tuple[Expr, ...]]] = []
        self.held: dict[tuple[ValueId, int], Expr] = {}
        self.rows: list[tuple[Expr, float]] = []  # expression <= bound
        self.peak: int | None = None

    # Columns

    def _column(self, name: str, upper: float = 1.0, *, integer: bool = False) -> int:
        self.columns.append((name, upper, integer))
        return len(self.columns) - 1

    def s(self, op: OpId) -> Expr:
        """(1) Whether `op` is saved."""
        match self.f.role[op]:
            case Role.SAVED | Role.IDLE:
                return Expr(constant=1.0)
            case Role.FOLLOWS:
                return Expr()
            case Role.FREE if self.graph.ops[op].must_recompute:
                return Expr()
            case Role.FREE:
                if op not in self.saved:
                    self.saved[op] = self._column(f"s{op}", integer=True)
                return Expr({self.saved[op]: 1.0})

    def grid(self, op: OpId) -> list[int]:
        """(2) The states at which x of a leader is told apart: all near its first need, some before."""
        if op not in self.grids:
            need = self.f.first[op] if self.f.first[op] < NEVER else self.f.latest[op]
            all_of_them = need - self.options.near * self.f.n_states
            self.grids[op] = [
                t for i, t in enumerate(self.states) if t >= all_of_them or i % self.options.apart == 0
            ]
            self.begins[op] = 0 if self.window is None else need - self.window * self.f.n_states
        return self.grids[op]

    def x(self, op: OpId, state: int, *, after: bool = False) -> Expr:
        """(2) Whether `op` has run again by the state of its grid at or before `state`, or at or after."""
        f = self.f
        op = f.leader[op]
        if f.role[op] is not Role.FREE:
            return Expr()
        at = END
        if state < END:
            grid = self.grid(op)
            at = grid[bisect_right(grid, state) - 1]
            if after and at < state:
                at = next((t for t in grid if t > state), END)
            if at < self.begins[op]:
                return Expr()
        if at < f.earliest[op]:
            return Expr()
        if f.first[op] <= at:
            return Expr(constant=1.0).add(self.s(op), -1.0)
        key = (op, END if at >= f.latest[op] else at)
        if key not in self.runs:
            self.runs[key] = self._column(f"x{op}_{'end' if key[1] == END else key[1]}")
        return Expr({self.runs[key]: 1.0})

    def at_most(self, expr: Expr, bound: float) -> None:
        """The row `expr <= bound`, unless every assignment of numbers in [0, 1] satisfies it."""
        if expr.constant + sum(max(c, 0.0) for c in expr.terms.values()) > bound + 1e-12:
            self.rows.append((expr, bound))

    def positive_part(self, *exprs: Expr) -> Expr:
        """A column that is at least each of `exprs` and 0."""
        exprs = tuple(e for e in exprs if e.constant + sum(max(c, 0.0) for c in e.terms.values()) > 1e-9)
        if not exprs:
            return Expr()
        column = self._column(f"p{len(self.columns)}")
        self.auxiliary.append((column, exprs))
        for expr in exprs:
            self.at_most(Expr({column: -1.0}).add(expr), 0.0)
        return Expr({column: 1.0})

    # Constraint families

    def order(self, op: OpId) -> None:
        """(4) What has been run again stays so: x grows with the state, and only unsaved ops run."""
        previous: Expr | None = None
        for state in [*self.grid(op), END]:
            now = self.x(op, state)
            if previous is not None and previous.terms != now.terms:
                self.at_most(Expr().add(previous).add(now, -1.0), 0.0)
            previous = now
        if self.f.first[op] == NEVER:
            self.at_most(Expr().add(self.x(op, END)).add(self.s(op)), 1.0)

    def chain(self, op: OpId) -> None:
        """(5) An op runs again only when all that it reads is saved or has been run again."""
        for source in self.f.sources[op]:
            if self.f.role[source] is not Role.FREE:
                continue
            seen: list[tuple[dict[int, float], dict[int, float]]] = []
            for state in [*(self.grid(source) if self.window is None else self.states), END]:
                need, have = self.x(op, state), self.x(source, state)
                if (need.terms, have.terms) in seen:
                    continue
                seen.append((need.terms, have.terms))
                self.at_most(Expr().add(need).add(self.s(source), -1.0).add(have, -1.0), 0.0)

    def lazy(self, op: OpId) -> None:
        """(6) Nothing runs again before an unpack or a reader asks for it."""
        for state in self.grid(op):
            if state < self.f.first[op]:
                late = self.x(op, state)
                if late.terms:
                    for reader in self.f.readers[op]:
                        late.add(self.x(reader, state, after=True), -1.0)
                    self.at_most(late, 0.0)

    def wanted(self, op: OpId) -> None:
        """(7) In canonical form an op without saved tensors is saved only if a reader runs again."""
        packed = any(self.graph.values[w].handles for w in self.graph.ops[op].writes)
        if not packed and not self.f.lost[op]:
            saved = self.s(op)
            for reader in self.f.readers[op]:
                saved.add(self.x(reader, END), -1.0)
            self.at_most(saved, 0.0)

    def in_place(self, op: OpId) -> None:
        """(8) An op that only writes over saved values is saved, so it does not run again."""
        values = self.graph.values
        previous = [values[w].previous for w in self.graph.ops[op].writes]
        writers = {values[p].op for p in previous if p is not None}
        if None not in previous and writers:
            row = Expr().add(self.x(op, END))
            for writer in sorted(writers):
                row.add(self.s(writer))
            self.at_most(row, len(writers))

    def hold(self, v: ValueId, moment: int) -> Expr:
        """(9) Whether something unsaved that is made from `v` is needed at `moment` or later."""
        f, graph = self.f, self.graph
        if f.dropped[v] > moment:
            return Expr(constant=1.0)
        if f.until[v] <= moment:
            return Expr()
        key = (v, moment)
        if key not in self.held:
            reasons = []
            for r in graph.values[v].readers:
                if f.role[r] in (Role.SAVED, Role.IDLE):
                    continue
                if moment < self.n or any(f.dropped[w] > moment for w in graph.ops[r].writes):
                    reasons.append(self.x(r, END))
                    continue
                for w in graph.ops[r].writes:
                    if f.until[w] > moment:
                        reasons.append(Expr().add(self.hold(w, moment)).add(self.s(r), -1.0))
            self.held[key] = self.positive_part(*reasons)
        return self.held[key]

    def saved_bytes(self, moment: int) -> Expr:
        """(10) Bytes at `moment` that are held because they were saved, beside what is held anyway."""
        f, total = self.f, Expr()
        for value in self.graph.values:
            v, op = value.id, value.op
            nbytes = self.graph.nbytes(v)
            role = f.role[op]
            if not nbytes or op > moment or f.extra_from[v] > moment or f.until[v] <= moment:
                continue
            if role in (Role.FOLLOWS, Role.IDLE):
                continue  # never saved; or saved for nothing, and then not held
            if role is Role.FREE and (f.sure_until[v] > moment or f.dropped[v] > moment):
                total.add(self.s(op), nbytes)
            elif role is Role.SAVED:
                total.add(self.hold(v, moment), nbytes)
            else:
                both = Expr(constant=-1.0).add(self.s(op)).add(self.hold(v, moment))
                total.add(self.positive_part(both), nbytes)
        return total

    def forward_bytes(self, moment: int) -> int:
        """Bytes of forward's own allocations at `moment`, whatever is saved."""
        f = self.f
        return sum(
            storage.nbytes
            for storage in self.graph.storages
            if storage.values
            and self.graph.values[storage.values[0]].op <= moment < f.base_release[storage.id]
        )

    def recomputed_bytes(self, step: int, before: int, after: int, at: int) -> Expr:
        """(11) Bytes of recomputed values that are live in `step`.

        Ops before `at` are in state `after` and later ones in `before`; op `at` has its outputs and
        still needs its inputs. In the work of a step both states are the same.
        """
        f, graph, total = self.f, self.graph, Expr()
        for value in graph.values:
            v, op = value.id, value.op
            nbytes = graph.nbytes(v)
            if not nbytes or f.role[op] in (Role.SAVED, Role.IDLE):
                continue
            made = self.x(op, after if op <= at else before)
            if not made.terms and not made.constant:
                continue
            if f.last_use[v] >= step:
                total.add(made, nbytes)
                continue
            pending = []  # each: an op that reads v is still to run
            within = Expr()  # v is only needed within the burst that makes it
            for r in value.readers:
                if f.role[r] in (Role.SAVED, Role.IDLE):
                    continue
                into_same_buffer = any(graph.values[w].previous == v for w in graph.ops[r].writes)
                over = r <= at if into_same_buffer and not value.handles else r < at
                read = self.x(r, after if over else before, after=True)
                if f.leader[r] == f.leader[op]:
                    # Of one group: they run in one burst, so v is live only between the two, and the
                    # difference of two states of the group is never negative (4).
                    within = within if within.terms or over else self.between(op, before, after)
                elif (after if over else before) < f.latest[f.leader[r]]:
                    late = Expr(constant=-1.0).add(made).add(self.x(r, END)).add(read, -1.0)
                    pending.append(late)
            if op == at:
                within = self.between(op, before, after)
            if pending:
                total.add(
                    self.positive_part(*_distinct(pending), *([within] if within.terms else [])), nbytes
                )
            else:
                total.add(within, nbytes)
        return total

    def between(self, op: OpId, before: int, after: int) -> Expr:
        """Whether `op` runs between two states. 0, which is never too much, where its grid does not tell."""
        grid = self.grid(self.f.leader[op])
        if before == after or before not in grid or after not in grid:
            return Expr()
        return Expr().add(self.x(op, after)).add(self.x(op, before), -1.0)

    def bytes_at(self, point: Point) -> Expr:
        """(12) All bytes live at `point`."""
        f, graph, n = self.f, self.graph, self.n
        match point:
            case Forward(i):
                op = graph.ops[i]
                fixed = graph.static_bytes + self.forward_bytes(i) + op.workspace + op.other
                return Expr(constant=fixed).add(self.saved_bytes(i))
            case Work(j):
                state = f.state_after[j]
                fixed = graph.static_bytes + self.forward_bytes(n + j) + graph.steps[j].peak
                total = Expr(constant=fixed).add(self.saved_bytes(n + j))
                return total.add(self.recomputed_bytes(j, state, state, END))
            case Burst(state, i):
                j = f.unpacks[state - 1][0]
                step = graph.steps[j]
                sure = min(step.other, step.peak)
                fixed = graph.static_bytes + self.forward_bytes(n + j) + sure
                total = Expr(constant=fixed).add(self.saved_bytes(n + j))
                total.add(self.recomputed_bytes(j, state - 1, state, i))
                beside = graph.ops[i].workspace + step.other - sure
                if beside:
                    total.add(self.between(OpId(i), state - 1, state), beside)
                return total

    def within_budget(self, point: Point, scale: float) -> None:
        """(13) What is live at `point` fits."""
        live = self.bytes_at(point)
        if self.budget is None:
            assert self.peak is not None
            row = Expr({self.peak: -1.0}).add(live, 1.0 / scale)
            self.rows.append((row, 0.0))
        else:
            self.at_most(Expr().add(live, 1.0 / scale), self.budget / scale)

    def without(self, save_set: SaveSet) -> None:
        """(14) Not this save set, which the simulator has found too large."""
        row = Expr()
        for op in self.graph.ops:
            if self.f.role[op.id] is Role.FREE:
                saved = self.s(op.id)
                if op.id in save_set:
                    row.add(saved).add(Expr(constant=1.0), -1.0)
                else:
                    row.add(saved, -1.0)
        row.constant += 1.0
        self.rows.append((row, 0.0))


def build_program(
    f: Facts,
    budget: int | None,
    points: Iterable[Point],
    *,
    excluded: Iterable[SaveSet] = (),
    options: Options | None = None,
    window: float | None = None,
) -> Built:
    """The least recompute time within `budget`, or with no budget the least peak.

    Args:
        f: facts of the graph.
        budget: bytes; None to minimise the peak.
        points: moments at which the budget is written as a row. Backward is resolved at their states.
        excluded: save sets that are ruled out.
        options: switches of the valid inequalities.
        window: the share of backward before its first need in which an op may start. Makes the program
            small, and its bound no bound on plans in which one starts earlier.
    """
    options = options or Options()
    builder = Builder(f, budget, points, options, window)
    free = [op.id for op in f.graph.ops if f.role[op.id] is Role.FREE]
    for leader in free:
        builder.s(leader)
    scale = _power_of_two(max((s.nbytes for s in f.graph.storages), default=1) / 64)
    if budget is None:
        builder.peak = builder._column("peak", math.inf)
    for point in builder.points:
        builder.within_budget(point, scale)
    for leader in free:
        builder.order(leader)
        builder.chain(leader)
        if options.lazy:
            builder.lazy(leader)
        if options.wanted:
            builder.wanted(leader)
    for op in f.graph.ops:
        if f.role[op.id] in (Role.FREE, Role.FOLLOWS):
            builder.in_place(op.id)
    for save_set in excluded:
        builder.without(save_set)
    costs = Expr()
    for leader in free:
        costs.add(builder.x(leader, END), f.cost_us[leader])
    cost_scale = scale
    if budget is not None:
        cost_scale = _power_of_two(max(sum(f.cost_us[op] for op in free), 1e-9) / 4096)
        objective = Expr().add(costs, 1.0 / cost_scale)
    else:
        assert builder.peak is not None
        objective = Expr({builder.peak: 1.0})
    return Built(
        program=_program(builder, objective),
        saved=builder.saved,
        runs=builder.runs,
        auxiliary=tuple(builder.auxiliary),
        peak=builder.peak,
        cost_scale=cost_scale,
    )


def assignment(f: Facts, built: Built, save_set: SaveSet) -> Floats:
    """The values of all columns under `save_set`: what the runtime does when it saves that."""
    values = np.zeros(len(built.program.variables))
    values[-1] = 1.0
    save_set = canonical(f, save_set)
    start = starts(f, save_set)
    for op, column in built.saved.items():
        values[column] = op in save_set
    for (op, state), column in built.runs.items():
        values[column] = start[op] < NEVER if state == END else start[op] <= state
    for column, exprs in built.auxiliary:
        values[column] = max(0.0, *(expr.value(values) for expr in exprs))
    if built.peak is not None:
        rows = built.program.rows
        width = np.diff(rows.starts)
        of_row = np.repeat(np.arange(len(rows)), width)
        activity = np.bincount(of_row, rows.coefficients * values[rows.columns], len(rows))
        is_peak = np.zeros(len(rows), bool)
        is_peak[of_row[(rows.columns == built.peak)]] = True
        values[built.peak] = max((activity[is_peak] - rows.upper[is_peak]).max(initial=0.0), 0.0)
    return values


def states_of(f: Facts, point: Point) -> tuple[int, ...]:
    """The states that the row of `point` speaks of."""
    match point:
        case Forward(_):
            return ()
        case Work(step):
            return (f.state_after[step],)
        case Burst(state, _):
            return (state - 1, state)


def _program(builder: Builder, objective: Expr) -> Program:
    problem = pulp.LpProblem("plan", pulp.LpMinimize)
    variables = [
        problem.add_variable(
            name,
            0,
            None if math.isinf(upper) else upper,
            cat=pulp.LpInteger if integer else pulp.LpContinuous,
        )
        for name, upper, integer in builder.columns
    ]
    # PuLP's HiGHS drops an objective's constant silently (3.3.2), so it goes into a column.
    variables.append(problem.add_variable("one", 1, 1))
    costs = np.zeros(len(variables))
    for column, coefficient in objective.terms.items():
        costs[column] = coefficient
    costs[-1] = objective.constant
    problem.setObjective(
        pulp.LpAffineExpression([(v, float(c)) for v, c in zip(variables, costs, strict=True) if c])
    )
    starts = np.zeros(len(builder.rows) + 1, np.int32)
    columns: list[int] = []
    coefficients: list[float] = []
    upper = np.empty(len(builder.rows))
    for i, (expr, bound) in enumerate(builder.rows):
        for column, coefficient in expr.terms.items():
            if coefficient:
                columns.append(column)
                coefficients.append(coefficient)
        starts[i + 1] = len(columns)
        upper[i] = bound - expr.constant
    rows = Rows(
        starts,
        np.array(columns, np.int32),
        np.array(coefficients, np.float64),
        np.full(len(upper), -np.inf),
        upper,
    )
    return Program(problem, tuple(variables), costs, rows)


def _order(point: Point) -> tuple[int, int, int]:
    match point:
        case Forward(op):
            return (0, op, 0)
        case Work(step):
            return (1, step, 0)
        case Burst(state, op):
            return (2, state, op)


def _distinct(exprs: Iterable[Expr]) -> list[Expr]:
    kept: list[Expr] = []
    for expr in exprs:
        if all(expr.terms != other.terms or expr.constant != other.constant for other in kept):
            kept.append(expr)
    return kept


def _power_of_two(x: float) -> float:
    """A scale that changes no mantissa, so that a budget met to the byte stays met."""
    return float(2.0 ** max(round(math.log2(x)), 0)) if x > 0 else 1.0
