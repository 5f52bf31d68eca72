"""Graph + budget -> a mixed-integer program, and back. Equation numbers refer to docs/formulation.md.

The program is a relaxation of the simulator: every save set that fits, in its canonical form, satisfies
every row. So the solver's bound is a bound on what any plan can do, whatever points and states it was
given; more of them make it tighter. This module never runs the simulator.

Rows are written a family at a time, as arrays: `rows` says what a code is, `columns` how a graph is laid
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoac.planner.problem.graph import OpId, SaveSet, VersionId
from autoac.planner.problem.save_sets import carried_over
from autoac.planner.solver.arrays import Bools, Columns, Longs
from autoac.planner.solver.highs import Floats, Program
from autoac.planner.solver.recompute_windows import END, NEVER, Facts, Role, canonical, starts
from autoac.planner.solver.sparse_rows import ONE, ZERO, Codes, Largest, RowTable

FORWARD = -1  # in place of a moment: any in forward


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
    prices: bool = True  # (15) columns that the relaxation's prices rule out are fixed in advance
    likeness: bool = True  # (16) a point that is missing in one block is added in all that are built alike


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A program, and what its columns stand for."""

    program: Program
    ops: tuple[OpId, ...]  # that have a column of s
    saves: Longs  # these columns
    runs: Longs  # columns of x
    run_ops: Longs  # by column of x: the op
    run_states: Longs  # by column of x: the state; END is the last
    largest: tuple[Largest, ...]  # in the order in which they can be worked out
    peak: int | None  # column of the peak, if that is minimised
    cost_scale: float  # objective * cost_scale is microseconds (or bytes)

    def save_set(self, values: Floats) -> SaveSet:
        """The ops that an assignment saves. What must be saved is not named."""
        return frozenset(op for op, s in zip(self.ops, values[self.saves], strict=True) if s > 0.5)


@dataclass(slots=True)
class Sum:
    """Terms of one row: codes with coefficients, and a constant."""

    codes: list[Codes]
    coefficients: list[Floats]
    constant: float = 0.0

    def add(self, codes: Codes, coefficients: Floats | Longs) -> None:
        self.codes.append(codes)
        self.coefficients.append(np.asarray(coefficients, np.float64))


class Singles:
    """Rows `column >= expression` that come one at a time, each perhaps of the columns before it."""

    def __init__(self) -> None:
        self.columns: list[int] = []
        self.terms: list[tuple[int, int, float]] = []  # expression, code, coefficient
        self.constants: list[float] = []

    def add(self, column: int, expr: Iterable[tuple[int, float]], constant: float) -> None:
        """`column >= expr + constant`."""
        self.terms += [(len(self.columns), code, a) for code, a in expr if code != ZERO]
        self.columns.append(column)
        self.constants.append(constant)

    def finish(self, table: RowTable) -> Largest:
        """Hand the rows over."""
        of, codes, coefficients = (np.array(t) for t in zip(*self.terms, strict=True))
        columns, constants = np.array(self.columns), np.array(self.constants)
        table.add(
            np.concatenate([of, np.arange(len(columns))]),
            np.concatenate([codes, columns + 1]),
            np.concatenate([coefficients, np.full(len(columns), -1.0)]),
            -constants,
        )
        return Largest(columns, of, codes, coefficients, constants, in_turn=True)


class Builder:
    """Collects columns and rows. One method for each constraint family."""

    def __init__(self, c: Columns, budget: int | None, points: Iterable[Point], options: Options) -> None:
        self.c, self.f, self.graph, self.budget, self.options = c, c.facts, c.facts.graph, budget, options
        self.n = len(self.graph.ops)
        self.points = sorted(set(points), key=_order)
        f = self.f
        self.states = np.array(
            sorted({0, f.n_states, *(t for p in self.points for t in states_of(f, p))}), np.int64
        )
        self.end = len(self.states)  # position of END in the tables of x
        self.n_columns = 1  # column 0 is 1
        self.table = RowTable()
        self.largest: list[Largest] = []
        self.waiting: Sum | None = None  # what one other microbatch holds
        self.single = Singles()  # rows of `positive_part`
        self.held: dict[tuple[VersionId, int], int] = {}  # codes of (9)
        self.both: dict[tuple[int, int], int] = {}  # codes of (10): s and held

    def new(self, count: int) -> Codes:
        """Codes of `count` new columns."""
        self.n_columns += count
        return np.arange(self.n_columns - count + 1, self.n_columns + 1)

    # Columns

    def decide(self) -> None:
        """(1) `s`: whether a free op is saved."""
        c = self.c
        self.s = np.zeros(len(c.free), np.int64)
        self.s[~c.pinned] = self.new(int((~c.pinned).sum()))
        self.not_s = np.where(c.pinned, ONE, -self.s)
        self.s_of_op = np.where(c.saved, ONE, np.where(c.row >= 0, 0, ZERO))
        self.s_of_op[c.free] = self.s

    def resolve(self) -> None:
        """(2) `x`: whether a free op has run again by a state; by op and position in `states`, then END."""
        c, states = self.c, self.states
        first, latest, earliest = c.first[:, None], c.latest[:, None], c.earliest[:, None]
        need = np.where(first < NEVER, first, latest)
        position = np.arange(self.end)
        grid = (states >= need - self.options.near * self.f.n_states) | (position % self.options.apart == 0)
        too_early = states < earliest
        due = states >= first  # then x = 1 - s
        own = grid & ~too_early & ~due & (states < latest)
        at_grid = np.zeros(own.shape, np.int64)
        at_grid[own] = self.new(int(own.sum()))
        row, where = np.nonzero(own)

        never = (c.first == NEVER) & (c.earliest < NEVER)
        end = np.where(c.first < NEVER, self.not_s, ZERO)
        end[never] = self.new(int(never.sum()))
        at_grid = np.where(due, self.not_s[:, None], at_grid)
        at_grid = np.where(~too_early & ~due & (states >= latest), end[:, None], at_grid)
        self.runs = np.concatenate([at_grid[own], end[never]]) - 1
        self.run_rows = np.concatenate([row, np.flatnonzero(never)])
        self.run_states = np.concatenate([states[where], np.full(int(never.sum()), END)])

        # By state: the value at the grid state before it, and at the one after it. The last line of each
        # is for ops that never run again.
        before = np.maximum.accumulate(np.where(grid, position, 0), axis=1)
        after = np.minimum.accumulate(np.where(grid, position, self.end)[:, ::-1], axis=1)[:, ::-1]
        full = np.concatenate([at_grid, end[:, None]], axis=1)
        rows = np.arange(len(c.free))[:, None]
        nothing = np.zeros((1, self.end + 1), np.int64)
        self.in_grid = np.concatenate([grid, np.zeros((1, self.end), bool)])
        self.x = np.concatenate([np.concatenate([full[rows, before], end[:, None]], axis=1), nothing])
        self.x_after = np.concatenate([np.concatenate([full[rows, after], end[:, None]], axis=1), nothing])

    def x_end(self, op: int) -> int:
        """Whether `op` runs again at all."""
        return int(self.x[self.c.row[op], self.end])

    # Constraint families

    def order(self) -> None:
        """(4) What has been run again stays so: x grows with the state, and only unsaved ops run."""
        x = self.x[:-1]
        row, at = np.nonzero((x[:, :-1] != x[:, 1:]) & (x[:, :-1] != ZERO))
        self.table.add_table([x[row, at], x[row, at + 1]], [1.0, -1.0], 0.0)
        never = self.c.first == NEVER
        self.table.add_table([x[never, self.end], self.s[never]], [1.0, 1.0], 1.0)

    def chain(self) -> None:
        """(5) An op runs again only when all that it reads is saved or has been run again."""
        c = self.c
        for begin in range(0, len(c.edge_op), 4096):
            op, source = c.edge_op[begin : begin + 4096], c.edge_source[begin : begin + 4096]
            need, have = self.x[op], self.x[source]
            told = np.concatenate([self.in_grid[source], np.ones((len(source), 1), bool)], axis=1)
            open_ = told & (need != ZERO) & (have >= 0) & (have != ONE)
            edge, at = np.nonzero(open_)
            need, have = need[edge, at], have[edge, at]
            same = (np.diff(edge, prepend=-1) == 0) & (np.diff(need, prepend=-1) == 0)
            new = ~(same & (np.diff(have, prepend=-1) == 0))  # equal pairs stand together: x only grows
            self.table.add_table([need[new], self.s[source[edge[new]]], have[new]], [1.0, -1.0, -1.0], 0.0)

    def lazy(self) -> None:
        """(6) Nothing runs again before an unpack or a reader asks for it."""
        c, readers = self.c, self.f.readers
        for row, op in enumerate(c.free):
            late = np.flatnonzero(
                self.in_grid[row] & (self.states < c.first[row]) & (self.x[row, :-1] != ZERO)
            )
            by = c.row[list(readers[op])].astype(np.int64)
            self.table.add_table(
                [self.x[row, late], *(self.x_after[r, late] for r in by)], [1.0, *[-1.0] * len(by)], 0.0
            )

    def wanted(self) -> None:
        """(7) In canonical form an op without saved tensors is saved only if a reader runs again."""
        c, values = self.c, self.graph.versions
        of, codes, coefficients, count = [], [], [], 0
        for row, op in enumerate(c.free.tolist()):
            packed = any(values[w].saved_tensors for w in self.graph.ops[op].writes)
            if not packed and not self.f.lost[op]:
                terms = [int(self.s[row]), *(self.x_end(r) for r in self.f.readers[op])]
                of += [count] * len(terms)
                codes += terms
                coefficients += [1.0] + [-1.0] * (len(terms) - 1)
                count += 1
        self.table.add(of, np.array(codes, np.int64), coefficients, np.zeros(count))

    def in_place(self) -> None:
        """(8) An op that only writes over saved values is saved, so it does not run again.

        Nor does one whose output is carried by a saved version.
        """
        values = self.graph.versions
        for op in self.graph.ops:
            if self.f.role[op.id] not in (Role.FREE, Role.FOLLOWS):
                continue
            previous = [values[w].previous for w in op.writes]
            writers = sorted({values[p].op for p in previous if p is not None})
            if None not in previous and writers:
                codes = [self.x_end(op.id), *(int(self.s_of_op[w]) for w in writers)]
                self.table.add([0] * len(codes), np.array(codes), 1.0, len(writers))
        for op in self.c.free.tolist():
            for source in carried_over(self.graph, self.graph.ops[op]):
                if self.f.role[source] in (Role.FREE, Role.FOLLOWS):
                    codes = [self.x_end(source), int(self.s_of_op[op])]
                    self.table.add([0, 0], np.array(codes), 1.0, 1)

    def hold(self, value: VersionId, moment: int) -> int:
        """(9) Whether something unsaved that is made from `value` is needed at `moment` or later."""
        f, graph, held = self.f, self.graph, self.held
        if moment < self.n and f.dropped[value] <= moment < f.until[value]:
            if (value, FORWARD) not in held:  # whatever reads it again does so after forward
                readers = [
                    [(self.x_end(r), 1.0)] for r in graph.versions[value].readers if not self.c.saved[r]
                ]
                held[value, FORWARD] = self.positive_part(readers, 0.0)
            return held[value, FORWARD]
        stack = [value]
        while stack:
            v = stack[-1]
            if (v, moment) in held:
                stack.pop()
            elif f.dropped[v] > moment or f.until[v] <= moment:
                held[v, moment] = ONE if f.dropped[v] > moment else ZERO
            else:
                reasons: list[list[tuple[int, float]]] = []
                waiting = False
                for r in graph.versions[v].readers:
                    if self.c.saved[r]:
                        continue
                    if any(f.dropped[w] > moment for w in graph.ops[r].writes):
                        reasons.append([(self.x_end(r), 1.0)])
                        continue
                    for w in graph.ops[r].writes:
                        if f.until[w] > moment:
                            if (w, moment) not in held:
                                stack.append(w)
                                waiting = True
                            else:
                                reasons.append([(held[w, moment], 1.0), (int(self.s_of_op[r]), -1.0)])
                if not waiting:
                    held[v, moment] = self.positive_part(reasons, 0.0)
                    stack.pop()
        return held[value, moment]

    def positive_part(self, exprs: Sequence[Sequence[tuple[int, float]]], constant: float) -> int:
        """The code of a column that is at least 0 and each of `exprs` with `constant` added."""
        kept = [e for e in exprs if constant + sum(max(_most(code, a), 0.0) for code, a in e if code) > 1e-9]
        if not kept:
            return ZERO
        column = self.n_columns
        self.n_columns += 1
        for expr in kept:
            self.single.add(column, expr, constant)
        return column + 1

    def at_least(self, group: Longs, of: Longs, codes: Codes, coefficients: Floats, constant: float) -> Codes:
        """Codes of new columns, one for each group of expressions: each at least all of its group and 0.

        Args:
            group: by expression: which group, from 0 without gaps.
            of: by term: which expression.
            codes, coefficients: by term.
            constant: added to every expression.
        """
        columns = self.new(int(group.max(initial=-1)) + 1)
        mine = columns[group]
        self.largest.append(Largest(mine - 1, of, codes, coefficients, np.full(len(group), constant)))
        self.table.add(
            np.concatenate([of, np.arange(len(group))]),
            np.concatenate([codes, mine]),
            np.concatenate([coefficients, np.full(len(group), -1.0)]),
            np.full(len(group), -constant),
        )
        return columns

    def saved_bytes(self, moment: int, total: Sum) -> None:
        """(10) Bytes at `moment` that are held because they were saved, beside what is held anyway."""
        c = self.c
        live = (c.nbytes > 0) & (c.op <= moment) & (c.extra_from <= moment) & (c.until > moment)
        fixed = c.saved[c.op] & ~c.idle[c.op]
        free = ~c.saved[c.op] & (self.s_of_op[c.op] != ZERO)
        total.constant += float(c.nbytes[live & fixed & (c.dropped > moment)].sum())
        sure = live & free & ((c.sure_until > moment) | (c.dropped > moment))
        total.add(self.s_of_op[c.op[sure]], c.nbytes[sure])
        codes: list[int] = []
        sizes: list[int] = []
        for v in np.flatnonzero(live & (fixed | free) & ~sure & (c.dropped <= moment)).tolist():
            held = self.hold(VersionId(v), moment)
            if free[v] and held != ZERO:
                both = (int(self.s_of_op[c.op[v]]), held)
                if both not in self.both:
                    self.both[both] = self.positive_part([[(both[0], 1.0), (held, 1.0)]], -1.0)
                held = self.both[both]
            codes.append(held)
            sizes.append(int(c.nbytes[v]))
        total.add(np.array(codes, np.int64), np.array(sizes))

    def waiting_bytes(self, total: Sum) -> None:
        """(10) Bytes that the other microbatches in flight hold: each those of this one at forward's end."""
        if self.waiting is None:
            self.waiting = Sum([], [], self.forward_bytes(self.n))
            self.saved_bytes(self.n, self.waiting)
        others = self.graph.waiting_microbatches
        total.constant += others * self.waiting.constant
        for codes, coefficients in zip(self.waiting.codes, self.waiting.coefficients, strict=True):
            total.add(codes, others * coefficients)

    def forward_bytes(self, moment: int) -> int:
        """Bytes of forward's own allocations at `moment`, whatever is saved."""
        c = self.c
        return int(c.base_nbytes[(c.base_from <= moment) & (moment < c.base_until)].sum())

    def recomputed_bytes(self, step: int, before: int, after: int, at: int, total: Sum) -> None:
        """(11) Bytes of recomputed values that are live in `step`.

        Ops before `at` are in state `after` and later ones in `before` (positions in `states`); op `at`
        has its outputs and still needs its inputs. In the work of a step both states are the same.
        """
        c = self.c
        row = c.row[c.op]
        made = self.x[row, np.where(c.op <= at, after, before)]
        live = (c.nbytes > 0) & (row >= 0) & (made != ZERO)
        due = live & (c.last_use >= step)
        total.add(made[due], c.nbytes[due])

        # Past its last unpack a value is live only while an op that reads it is still to run ...
        rest = live & ~due
        v, r = c.pair_value, c.pair_reader
        mine = rest[v]
        v, r, into = v[mine], r[mine], c.pair_into[mine]
        by = c.row[r]
        over = np.where(into, r <= at, r < at)
        where = np.where(over, after, before)
        end, read = self.x[by, self.end], self.x_after[by, where]
        other = by != row[v]
        late = other & (self.states[where] < c.latest[by]) & (end != ZERO) & (end != read)
        pending = np.unique(np.stack([v[late], end[late], read[late]], axis=1), axis=0)
        waits = np.zeros(len(c.nbytes), bool)
        waits[v[late]] = True

        # ... and within a group only within the burst that makes it: the difference of two states of the
        # group is never negative (4).
        begun, ended = self.x[row, after], self.x[row, before]
        within = np.zeros(len(c.nbytes), bool)
        if before != after:
            within[v[~other & ~over]] = True
            within |= rest & (c.op == at)
            within &= self.told(row, before, after) & (begun != ended)
        alone = within & ~waits
        total.add(begun[alone], c.nbytes[alone])
        total.add(ended[alone], -c.nbytes[alone])
        both = np.flatnonzero(within & waits)
        self.pending_bytes(pending, made, both, begun, ended, total)

    def pending_bytes(
        self, pending: Longs, made: Codes, both: Longs, begun: Codes, ended: Codes, total: Sum
    ) -> None:
        """The columns of (11): `made + x_end - read - 1` of `pending`, `begun - ended` of `both`."""
        if not len(pending):
            return
        values, group = np.unique(np.concatenate([pending[:, 0], both]), return_inverse=True)
        m, k = len(pending), len(both)
        wait, burst = np.arange(m), np.arange(m, m + k)
        columns = self.at_least(
            group,
            np.concatenate([wait, wait, wait, wait, burst, burst]),
            np.concatenate(
                [made[pending[:, 0]], pending[:, 1], pending[:, 2], np.full(m, ONE), begun[both], ended[both]]
            ),
            np.repeat([1.0, 1.0, -1.0, -1.0, 1.0, -1.0], [m, m, m, m, k, k]),
            0.0,
        )
        total.add(columns, self.c.nbytes[values])

    def told(self, row: Longs, before: int, after: int) -> Bools:
        """Whether the grids of these rows tell two states apart."""
        both: Bools = self.in_grid[row, before] & self.in_grid[row, after]
        return both

    def bytes_at(self, point: Point) -> Sum:
        """(12) All bytes live at `point`."""
        f, graph, n = self.f, self.graph, self.n
        total = Sum([], [], graph.static_bytes)
        if graph.waiting_microbatches:
            self.waiting_bytes(total)
        match point:
            case Forward(i):
                op = graph.ops[i]
                total.constant += self.forward_bytes(i) + op.workspace_bytes + op.extra_bytes
                self.saved_bytes(i, total)
            case Work(j):
                state = self.position(f.state_after[j])
                total.constant += self.forward_bytes(n + j) + graph.steps[j].extra_bytes_peak
                self.saved_bytes(n + j, total)
                self.recomputed_bytes(j, state, state, END, total)
            case Burst(state, i):
                j = f.unpacks[state - 1][0]
                step = graph.steps[j]
                sure = min(step.extra_bytes_while_unpacking, step.extra_bytes_peak)
                total.constant += self.forward_bytes(n + j) + sure
                self.saved_bytes(n + j, total)
                before, after = self.position(state - 1), self.position(state)
                self.recomputed_bytes(j, before, after, i, total)
                beside = graph.ops[i].workspace_bytes + step.extra_bytes_while_unpacking - sure
                row = self.c.row[i : i + 1]
                if beside and row[0] >= 0 and self.told(row, before, after)[0]:
                    total.add(self.x[row, after], np.array([beside]))
                    total.add(self.x[row, before], np.array([-beside]))
        return total

    def position(self, state: int) -> int:
        return int(np.searchsorted(self.states, state))

    def within_budget(self, point: Point, scale: float, peak: Codes) -> None:
        """(13) What is live at `point` fits. `peak`: the code of its column, where that is minimised."""
        live = self.bytes_at(point)
        codes = np.concatenate([*live.codes, peak])
        coefficients = np.concatenate([*live.coefficients, np.full(len(peak), -scale)]) / scale
        limit = 0.0 if self.budget is None else self.budget
        self.table.add(np.zeros(len(codes)), codes, coefficients, (limit - live.constant) / scale)

    def without(self, save_set: SaveSet) -> None:
        """(14) Not this save set, which the simulator has found too large."""
        inside = np.array([op in save_set for op in self.c.free.tolist()], bool)
        self.table.add(np.zeros(len(self.s)), self.s, np.where(inside, 1.0, -1.0), float(inside.sum()) - 1.0)


def build_program(
    c: Columns,
    budget: int | None,
    points: Iterable[Point],
    *,
    excluded: Iterable[SaveSet] = (),
    options: Options | None = None,
) -> Built:
    """The least recompute time within `budget`, or with no budget the least peak.

    Args:
        c: the graph with its facts, laid out.
        budget: bytes; None to minimise the peak.
        points: moments at which the budget is written as a row. Backward is resolved at their states.
        excluded: save sets that are ruled out.
        options: switches of the valid inequalities.
    """
    options = options or Options()
    f = c.facts
    builder = Builder(c, budget, points, options)
    builder.decide()
    builder.resolve()
    scale = _power_of_two(max((s.nbytes for s in f.graph.storages), default=1) / 64)
    peak = builder.new(0 if budget is not None else 1)
    for point in builder.points:
        builder.within_budget(point, scale, peak)
    builder.order()
    builder.chain()
    if options.lazy:
        builder.lazy()
    if options.wanted:
        builder.wanted()
    builder.in_place()
    for save_set in excluded:
        builder.without(save_set)
    if builder.single.columns:
        builder.largest.insert(0, builder.single.finish(builder.table))

    n = builder.n_columns
    lower, upper, integer, costs = np.zeros(n), np.ones(n), np.zeros(n, bool), np.zeros(n)
    lower[0] = 1.0
    saves = builder.s[builder.s > 0] - 1
    integer[saves] = True
    cost_scale = scale
    if budget is None:
        costs[peak - 1], upper[peak - 1] = 1.0, math.inf
    else:
        cost_scale = _power_of_two(float(c.cost_us.sum()) / 4096, whole=c.cost_us.sum() >= 1)
        again, price = builder.x[:-1, builder.end], c.cost_us / cost_scale
        constant = (again < 0) | (again == ONE)
        costs[0] = price[constant].sum()
        kept = (again != ZERO) & (again != ONE)
        np.add.at(costs, np.abs(again[kept]) - 1, np.sign(again[kept]) * price[kept])
    return Built(
        program=Program(costs, lower, upper, integer, builder.table.finish()),
        ops=tuple(OpId(op) for op in c.free[builder.s > 0].tolist()),
        saves=saves,
        runs=builder.runs,
        run_ops=c.free[builder.run_rows],
        run_states=builder.run_states,
        largest=tuple(builder.largest),
        peak=int(peak[0]) - 1 if len(peak) else None,
        cost_scale=cost_scale,
    )


def assignment(f: Facts, built: Built, save_set: SaveSet) -> Floats:
    """The values of all columns under `save_set`: what the runtime does when it saves that."""
    values = np.zeros(built.program.n_columns)
    values[0] = 1.0
    save_set = canonical(f, save_set)
    values[built.saves] = [op in save_set for op in built.ops]
    start = np.array(starts(f, save_set), np.int64)[built.run_ops]
    values[built.runs] = np.where(built.run_states == END, start < NEVER, start <= built.run_states)
    for largest in built.largest:
        largest.assign(values)
    if built.peak is not None:
        rows = built.program.rows
        of_row = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
        activity = np.bincount(of_row, rows.coefficients * values[rows.columns], len(rows))
        is_peak = np.unique(of_row[rows.columns == built.peak])
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


def _order(point: Point) -> tuple[int, int, int]:
    match point:
        case Forward(op):
            return (0, op, 0)
        case Work(step):
            return (1, step, 0)
        case Burst(state, op):
            return (2, state, op)


def _most(code: int, coefficient: float) -> float:
    """The most that a term can come to, for codes other than `ZERO`."""
    return coefficient if code == ONE else max(coefficient, 0.0)


def _power_of_two(x: float, *, whole: bool = True) -> float:
    """A scale that changes no mantissa, so that a budget met to the byte stays met; `whole`: at least 1."""
    return float(2.0 ** max(round(math.log2(x)), 0 if whole else -1000)) if x > 0 else 1.0
