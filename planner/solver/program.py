"""Write a Graph and a budget as a mixed-integer program, and read save sets off its solutions.

The program is a relaxation of the simulator: every save set that fits, in its canonical form, satisfies
every row. So the solver's bound holds for every plan, with any moments and states; more of them make it
tighter. This module never runs the simulator.

Equation numbers refer to docs/formulation.md. In the example of recompute_windows.py the rows are, besides
those of memory_constraints.py:

    order (4)    x_a1 <= x_a2        x_a2 + s_a <= 1        x_c1 + s_c <= 1
    chain (5)    x_c1 <= s_a + x_a1       1 - s_c <= s_a + x_a2       1 - s_d <= s_c + x_c1

and the objective, in microseconds, is 4 (1 - s_a) + 5 (1 - s_c) + 1 (1 - s_d).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.problem.save_sets import carried_over
from autoac.planner.solver.arrays import GraphArrays, Ints
from autoac.planner.solver.highs import Floats, Outcome, Program
from autoac.planner.solver.moments import ConstrainedMoment
from autoac.planner.solver.recompute_windows import (
    END,
    NEVER,
    Role,
    Windows,
    canonical,
    first_runs,
    reads_overwritten,
)
from autoac.planner.solver.rows.memory_constraints import MemoryConstraints
from autoac.planner.solver.rows.move_columns import MoveColumns, MoveProblem
from autoac.planner.solver.rows.sparse_rows import ONE, ZERO, Codes, MaximumColumns, RowTable
from autoac.planner.solver.variables import Options, Variables

EDGES_AT_A_TIME = 4096  # so that the tables of (5) stay small
UNDECIDED = 1e-6  # a decision of the relaxation is open if it is farther than this from both 0 and 1


@dataclass(frozen=True, slots=True, eq=False)
class BuiltProgram:
    """A program, and what its columns stand for."""

    program: Program
    ops: tuple[OpId, ...]  # that have a column of s
    s_columns: Ints
    x_columns: Ints
    x_ops: Ints  # by column of x
    x_states: Ints  # by column of x; END is the last
    maxima: tuple[MaximumColumns, ...]  # in the order in which they can be worked out
    peak_column: int | None  # if the peak is minimised
    cost_scale: float  # objective * cost_scale is microseconds (or bytes)
    moves: MoveColumns | None = None

    def decisions(self, values: Floats) -> Floats:
        """Return by op of `ops` its column of `s` in `values`: 1 if the op is saved, 0 if not."""
        return values[self.s_columns]

    def rounded(self, decisions: Floats, more_than: float = 0.5) -> SaveSet:
        """Return the ops with a decision above `more_than`, without those that every save set saves."""
        return frozenset(op for op, saved in zip(self.ops, decisions, strict=True) if saved > more_than)

    def save_set(self, values: Floats) -> SaveSet:
        """Return the ops that `values` saves, without those that every save set saves."""
        return self.rounded(self.decisions(values))

    def undecided(self, relaxed: Outcome) -> int:
        """Return the number of decisions that the relaxation leaves open."""
        assert relaxed.values is not None
        saved = self.decisions(relaxed.values)
        return int(((saved > UNDECIDED) & (saved < 1 - UNDECIDED)).sum())


def build_program(
    arrays: GraphArrays,
    budget: int | None,
    moments: Iterable[ConstrainedMoment],
    *,
    excluded: Iterable[SaveSet] = (),
    options: Options | None = None,
    moves: MoveProblem | None = None,
) -> BuiltProgram:
    """Return the program for the least recompute time within `budget`; without a budget, for the least peak.

    Args:
        arrays: the graph.
        budget: bytes; None to minimise the peak.
        moments: those at which the budget is written as a row. Only their states have columns of `x`.
        excluded: save sets that are ruled out.
        options: switches of the valid inequalities.
        moves: what may be moved to the host; only with a budget.
    """
    options = options or Options()
    graph = arrays.windows.graph
    variables, table = Variables(arrays, moments, options), RowTable()
    memory = MemoryConstraints(variables, table)
    scale = _power_of_two(max((s.nbytes for s in graph.storages), default=1) / 64)
    peak = variables.new_columns(0 if budget is not None else 1)
    moved = None if moves is None else MoveColumns(variables, moves)
    for i, moment in enumerate(variables.moments):
        less = (peak, np.full(len(peak), scale)) if moved is None else moved.absent_bytes(i)
        memory.add_row(moment, budget, scale, *less)
    _add_order_rows(variables, table)
    _add_chain_rows(variables, table)
    if options.lazy_rows:
        _add_lazy_rows(variables, table)
    if options.canonical_rows:
        _add_canonical_rows(variables, table)
    _add_in_place_rows(variables, table)
    _add_use_group_rows(variables, table)
    for save_set in excluded:
        _exclude_save_set(variables, table, save_set)
    memory.finish()

    n = variables.n_columns
    lower, upper, integer, costs = np.zeros(n), np.ones(n), np.zeros(n, bool), np.zeros(n)
    lower[0] = 1.0
    s_columns = variables.s[variables.s > 0] - 1
    integer[s_columns] = True
    if budget is None:
        cost_scale = scale
        costs[peak - 1], upper[peak - 1] = 1.0, math.inf
    else:
        cost_scale = _power_of_two(float(arrays.cost_us.sum()) / 4096, whole=arrays.cost_us.sum() >= 1)
        again, price = variables.x[:-1, variables.end], arrays.cost_us / cost_scale
        costs[0] = price[(again < 0) | (again == ONE)].sum()
        priced = (again != ZERO) & (again != ONE)
        np.add.at(costs, np.abs(again[priced]) - 1, np.sign(again[priced]) * price[priced])
        if moved is not None:
            moved.add_rows(table, costs * cost_scale)
            integer[moved.o - 1] = True
            costs[moved.stalls - 1] = moved.all_stalls_us / cost_scale
    return BuiltProgram(
        program=Program(costs, lower, upper, integer, table.finish()),
        ops=tuple(OpId(op) for op in arrays.free[variables.s > 0].tolist()),
        s_columns=s_columns,
        x_columns=variables.x_columns,
        x_ops=arrays.free[variables.x_rows],
        x_states=variables.x_states,
        maxima=tuple(memory.maxima),
        peak_column=int(peak[0]) - 1 if len(peak) else None,
        cost_scale=cost_scale,
        moves=moved,
    )


def assignment(windows: Windows, built: BuiltProgram, save_set: SaveSet) -> Floats:
    """Return the values of all columns under `save_set`, as the runtime runs ops again under it."""
    values = np.zeros(built.program.n_columns)
    values[0] = 1.0
    save_set = canonical(windows, save_set)
    values[built.s_columns] = [op in save_set for op in built.ops]
    start = np.array(first_runs(windows, save_set), np.int64)[built.x_ops]
    values[built.x_columns] = np.where(built.x_states == END, start < NEVER, start <= built.x_states)
    for maximum in built.maxima:
        maximum.assign(values)
    if built.peak_column is not None:
        rows = built.program.rows
        has_peak = np.unique(rows.of_term[rows.columns == built.peak_column])
        excess = (rows.activity(values) - rows.upper)[has_peak]
        values[built.peak_column] = max(excess.max(initial=0.0), 0.0)
    return values


def _add_order_rows(variables: Variables, table: RowTable) -> None:
    """(4) Once an op has run again, it has done so in all later states. Only unsaved ops run again."""
    x = variables.x[:-1]
    row, at = np.nonzero((x[:, :-1] != x[:, 1:]) & (x[:, :-1] != ZERO))
    table.add_table([x[row, at], x[row, at + 1]], [1.0, -1.0], 0.0)
    never = variables.arrays.first_needed == NEVER
    table.add_table([x[never, variables.end], variables.s[never]], [1.0, 1.0], 1.0)


def _add_chain_rows(variables: Variables, table: RowTable) -> None:
    """(5) An op runs again only when all that it reads is saved or has run again."""
    edge_op, edge_source = variables.arrays.edge_op, variables.arrays.edge_source
    for begin in range(0, len(edge_op), EDGES_AT_A_TIME):
        op = edge_op[begin : begin + EDGES_AT_A_TIME]
        source = edge_source[begin : begin + EDGES_AT_A_TIME]
        need, have = variables.x[op], variables.x[source]
        resolved = np.concatenate([variables.in_grid[source], np.ones((len(source), 1), bool)], axis=1)
        edge, at = np.nonzero(resolved & (need != ZERO) & (have >= 0) & (have != ONE))
        need, have = need[edge, at], have[edge, at]
        same = (np.diff(edge, prepend=-1) == 0) & (np.diff(need, prepend=-1) == 0)
        new = ~(same & (np.diff(have, prepend=-1) == 0))  # equal pairs stand together: x only grows
        s_of_source = variables.s[source[edge[new]]]
        table.add_table([need[new], s_of_source, have[new]], [1.0, -1.0, -1.0], 0.0)


def _add_lazy_rows(variables: Variables, table: RowTable) -> None:
    """(6) Nothing runs again before an unpack or a reader asks for it."""
    arrays, x = variables.arrays, variables.x
    for row, op in enumerate(arrays.free):
        early = variables.states < arrays.first_needed[row]
        at = np.flatnonzero(variables.in_grid[row] & early & (x[row, :-1] != ZERO))
        readers = arrays.row[list(variables.windows.readers[op])].astype(np.int64)
        requests = [variables.x_after[reader, at] for reader in readers]
        table.add_table([x[row, at], *requests], [1.0, *[-1.0] * len(requests)], 0.0)


def _add_canonical_rows(variables: Variables, table: RowTable) -> None:
    """(7) In canonical form, an op without saved tensors is saved only for a reader, or to avoid a copy."""
    windows, versions = variables.windows, variables.graph.versions
    rows: list[Codes] = []
    passed_on = {run for runs in variables.graph.runs for run in runs[:-1]}  # kept for later use groups
    for row, op in enumerate(variables.arrays.free.tolist()):
        packed = any(versions[w].saved_tensors for w in variables.graph.ops[op].writes)
        spares_copy = reads_overwritten(variables.graph, variables.graph.ops[op])
        if not (packed or spares_copy or windows.may_not_run[op] or op in passed_on):
            readers = [variables.x_end(r) for r in windows.readers[op]]
            rows.append(np.array([int(variables.s[row]), *readers], np.int64))
    if rows:
        lengths = [len(codes) for codes in rows]
        starts = np.cumsum([0, *lengths[:-1]])
        coefficients = np.full(sum(lengths), -1.0)
        coefficients[starts] = 1.0
        table.add(
            np.repeat(np.arange(len(rows)), lengths), np.concatenate(rows), coefficients, np.zeros(len(rows))
        )


def _add_in_place_rows(variables: Variables, table: RowTable) -> None:
    """(8) An op that only writes over saved versions is saved, so it does not run again.

    An op does not run again either if a saved version carries its saved tensor.
    """
    graph, role = variables.graph, variables.windows.role
    for op in graph.ops:
        if role[op.id] not in (Role.FREE, Role.FOLLOWS):
            continue
        previous = [graph.versions[w].previous for w in op.writes]
        writers = sorted({graph.versions[p].op for p in previous if p is not None})
        if None not in previous and writers:
            codes = [variables.x_end(op.id), *(int(variables.s_of_op[w]) for w in writers)]
            table.add([0] * len(codes), np.array(codes), 1.0, len(writers))
    for op_id in variables.arrays.free.tolist():
        for source in carried_over(graph, graph.ops[op_id]):
            if role[source] in (Role.FREE, Role.FOLLOWS):
                codes = [variables.x_end(source), int(variables.s_of_op[op_id])]
                table.add([0, 0], np.array(codes), 1.0, 1)


def _add_use_group_rows(variables: Variables, table: RowTable) -> None:
    """(16) A saved op does not run again for any use group. Outputs are kept only once they exist.

    A run without unpacks of its own runs for a reader, and not to be kept.
    """
    windows = variables.windows
    for first, *others in variables.graph.runs:
        saved, before = int(variables.s_of_op[first]), first
        for run in others:
            if variables.arrays.row[run] < 0:
                continue
            table.add([0, 0], np.array([variables.x_end(run), saved]), 1.0, 1)
            if windows.role[run] is Role.FREE:
                kept = [int(variables.s_of_op[run]), int(variables.s_of_op[before]), variables.x_end(before)]
                table.add([0] * 3, np.array(kept), [1.0, -1.0, 0.0 if variables.graph.by_pass else -1.0], 0)
            before = run
        for run in (first, *others):
            is_for_readers = windows.first_needed[run] == NEVER and not windows.may_not_run[run]
            if is_for_readers and windows.role[run] is Role.FREE:
                codes = [variables.x_end(run), *map(variables.x_end, windows.readers[run])]
                table.add([0] * len(codes), np.array(codes), [1.0, *[-1.0] * (len(codes) - 1)], 0)


def _exclude_save_set(variables: Variables, table: RowTable, save_set: SaveSet) -> None:
    """(14) Rule out `save_set`, which the simulator has found too large."""
    inside = np.array([op in save_set for op in variables.arrays.free.tolist()], bool)
    bound = float(inside.sum()) - 1.0
    table.add(np.zeros(len(inside)), variables.s, np.where(inside, 1.0, -1.0), bound)


def _power_of_two(x: float, *, whole: bool = True) -> float:
    """Return the power of two nearest to `x`, by which sizes are scaled without rounding.

    With `whole`, the result is at least 1.
    """
    return float(2.0 ** max(round(math.log2(x)), 0 if whole else -1000)) if x > 0 else 1.0
