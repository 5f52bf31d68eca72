"""Write the bytes live at a moment as a row of the program.

Equation numbers refer to docs/formulation.md. In the example of recompute_windows.py, the budget of 9 bytes
gives these rows; what forward itself holds is gone by then:

    step d'    4 s_a + 2 s_c + 4 x_a1 + 2 x_c1 + 3           <= 9    d is there either way: 3 bytes
    step c'    4 s_a + 4 x_a2 + 2                            <= 9    c is there either way
    b again    4 s_a + 2 s_c + 3 s_d + 4 x_a1 + 6 x_c1       <= 9    for the unpack of d

In the last row, x_c1 stands for b's 6 bytes: b follows c, and its output lives only within the burst.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoac.planner.problem.graph import OpId, VersionId
from autoac.planner.solver.arrays import Bools, Floats, Ints
from autoac.planner.solver.moments import ConstrainedMoment, DuringBurst, DuringForward, DuringStep
from autoac.planner.solver.recompute_windows import END
from autoac.planner.solver.rows.sparse_rows import (
    ONE,
    ZERO,
    Codes,
    LinearSum,
    MaximumColumns,
    RowTable,
    SequentialMaxima,
)
from autoac.planner.solver.variables import Variables

IN_FORWARD = -1  # stands for any moment of forward


class MemoryConstraints:
    """Rows for the bytes live at moments, and the columns that they need.

    These columns are maxima of other columns: `maxima` says how to compute their values. The *code* of a
    statement (sparse_rows.py) stands for 1 if the statement is true, and for 0 if not.
    """

    def __init__(self, variables: Variables, table: RowTable) -> None:
        self.variables, self.arrays, self.windows = variables, variables.arrays, variables.windows
        self.graph, self.n_ops, self.table = variables.graph, variables.n_ops, table
        self.maxima: list[MaximumColumns] = []
        self._sequential = SequentialMaxima()  # of `_maximum`
        self._needed: dict[tuple[VersionId, int], int] = {}  # codes of (9)
        self._both_of: dict[tuple[int, int], int] = {}  # codes of `_both`
        self._first_run = {run: row[0] for row in self.graph.runs for run in row}
        self._versions_of_runs = {  # of an output, by that of the first run
            versions[0]: versions
            for row in self.graph.runs
            for versions in zip(*(self.graph.ops[run].writes for run in row), strict=True)
        }
        self._kept_runs: dict[int, int] = {}  # codes of (16), by run
        self._waiting: LinearSum | None = None  # bytes of one waiting microbatch

    def add_row(
        self, moment: ConstrainedMoment, budget: int | None, scale: float, less: Codes, less_nbytes: Floats
    ) -> None:
        """(13) Add the row: what is live at `moment`, without `less_nbytes` times `less`, fits in `budget`.

        Without a budget the limit is 0, and `less` is the column of the peak.
        """
        live = self.bytes_at(moment)
        codes = np.concatenate([*live.codes, less])
        coefficients = np.concatenate([*live.coefficients, -less_nbytes]) / scale
        limit = 0.0 if budget is None else budget
        self.table.add(np.zeros(len(codes)), codes, coefficients, (limit - live.constant) / scale)

    def finish(self) -> None:
        """Add the rows of the columns that were defined one at a time."""
        if self._sequential.columns:
            self.maxima.insert(0, self._sequential.finish(self.table))

    def bytes_at(self, moment: ConstrainedMoment) -> LinearSum:
        """(12) Return all bytes live at `moment`."""
        windows, graph, n = self.windows, self.graph, self.n_ops
        total = LinearSum([], [], graph.static_bytes)
        if graph.waiting_microbatches:
            self._add_waiting_bytes(total)
        match moment:
            case DuringForward(i):
                op = graph.ops[i]
                total.constant += self._forward_bytes(i) + op.workspace_bytes + op.extra_bytes
                self._add_saved_bytes(i, total)
            case DuringStep(j):
                state = self.variables.position(windows.state_after[j])
                total.constant += self._forward_bytes(n + j) + graph.steps[j].extra_bytes_peak
                self._add_saved_bytes(n + j, total)
                self._add_recomputed_bytes(j, state, state, END, total)
            case DuringBurst(state, i):
                j = windows.unpacks[state - 1][0]
                step = graph.steps[j]
                certain = min(step.extra_bytes_while_unpacking, step.extra_bytes_peak)
                total.constant += self._forward_bytes(n + j) + certain
                self._add_saved_bytes(n + j, total)
                before, after = self.variables.position(state - 1), self.variables.position(state)
                self._add_recomputed_bytes(j, before, after, i, total)
                kernel = graph.ops[i].workspace_bytes + step.extra_bytes_while_unpacking - certain
                row = self.arrays.row[i : i + 1]
                if kernel and row[0] >= 0 and self.variables.states_differ(row, before, after)[0]:
                    total.add(self.variables.x[row, after], np.array([kernel]))
                    total.add(self.variables.x[row, before], np.array([-kernel]))
        return total

    def _forward_bytes(self, moment: int) -> int:
        """Return the bytes that forward itself holds at `moment`. They do not depend on the save set."""
        arrays = self.arrays
        return int(arrays.base_nbytes[(arrays.base_from <= moment) & (moment < arrays.base_until)].sum())

    def _add_saved_bytes(self, moment: int, total: LinearSum) -> None:
        """(10) Add the bytes at `moment` that are held only because they were saved."""
        arrays, s_of_op = self.arrays, self.variables.s_of_op
        live = (
            (arrays.nbytes > 0)
            & (arrays.kept_from < 0)
            & (arrays.op <= moment)
            & (arrays.extra_from <= moment)
            & (arrays.held_at_most > moment)
        )
        fixed = arrays.saved[arrays.op] & ~arrays.unused[arrays.op]
        free = ~arrays.saved[arrays.op] & (s_of_op[arrays.op] != ZERO)
        dropped_later = arrays.dropped > moment
        total.constant += float(arrays.nbytes[live & fixed & dropped_later].sum())
        certain = live & free & ((arrays.held_at_least > moment) | dropped_later)
        total.add(s_of_op[arrays.op[certain]], arrays.nbytes[certain])
        codes: list[int] = []
        nbytes: list[int] = []
        for v in np.flatnonzero(live & (fixed | free) & ~certain & ~dropped_later).tolist():
            # A saved op has the uses of all its runs.
            of_runs = self._versions_of_runs.get(VersionId(v), (VersionId(v),))
            needs = {self._is_needed_at(w, moment) for w in of_runs}
            code = needs.pop() if len(needs) == 1 else self._maximum([[(n, 1.0)] for n in sorted(needs)], 0.0)
            if free[v] and code != ZERO:
                code = self._both(int(s_of_op[arrays.op[v]]), code)
            codes.append(code)
            nbytes.append(int(arrays.nbytes[v]))
        total.add(np.array(codes, np.int64), np.array(nbytes))

    def _is_needed_at(self, version: VersionId, moment: int) -> int:
        """(9) Return the code of "an unsaved op that depends on `version` is needed at `moment` or later"."""
        windows, graph, known = self.windows, self.graph, self._needed
        x_end, saved = self.variables.x_end, self.arrays.saved
        if moment < self.n_ops and windows.dropped[version] <= moment < windows.held_at_most[version]:
            if (version, IN_FORWARD) not in known:  # whatever reads it again does so after forward
                readers = [[(x_end(r), 1.0)] for r in graph.versions[version].readers if not saved[r]]
                known[version, IN_FORWARD] = self._maximum(readers, 0.0)
            return known[version, IN_FORWARD]
        stack = [version]
        while stack:
            v = stack[-1]
            if (v, moment) in known:
                stack.pop()
            elif windows.dropped[v] > moment or windows.held_at_most[v] <= moment:
                known[v, moment] = ONE if windows.dropped[v] > moment else ZERO
            else:
                reasons: list[list[tuple[int, float]]] = []
                unknown: list[VersionId] = []
                for r in graph.versions[v].readers:
                    if saved[r]:
                        continue
                    if any(windows.dropped[w] > moment for w in graph.ops[r].writes):
                        reasons.append([(x_end(r), 1.0)])
                        continue
                    for w in graph.ops[r].writes:
                        if windows.held_at_most[w] > moment:
                            if (w, moment) not in known:
                                unknown.append(w)
                            else:
                                reasons.append(
                                    [(known[w, moment], 1.0), (int(self.variables.s_of_op[r]), -1.0)]
                                )
                stack += unknown
                if not unknown:
                    known[v, moment] = self._maximum(reasons, 0.0)
                    stack.pop()
        return known[version, moment]

    def _add_waiting_bytes(self, total: LinearSum) -> None:
        """(10) Add what the waiting microbatches hold: each as much as this one at the end of forward."""
        if self._waiting is None:
            self._waiting = LinearSum([], [], self._forward_bytes(self.n_ops))
            self._add_saved_bytes(self.n_ops, self._waiting)
        count = self.graph.waiting_microbatches
        total.constant += count * self._waiting.constant
        for codes, coefficients in zip(self._waiting.codes, self._waiting.coefficients, strict=True):
            total.add(codes, count * coefficients)

    def _add_recomputed_bytes(self, step: int, before: int, after: int, at: int, total: LinearSum) -> None:
        """(11) Add the bytes of recomputed versions that are live in `step`.

        While a burst runs op `at`, ops up to it are in state `after`, and later ops in state `before` (both
        are positions in `states`). Op `at` has its outputs and still needs its inputs. In the work of a step,
        both states are the same.
        """
        arrays, variables = self.arrays, self.variables
        x = variables.x
        row = arrays.row[arrays.op]
        recomputed = x[row, np.where(arrays.op <= at, after, before)]
        live = (arrays.nbytes > 0) & (row >= 0) & (recomputed != ZERO)
        due = live & (arrays.last_use >= step)
        total.add(recomputed[due], arrays.nbytes[due])

        # Past its last unpack a version is live only while an op that reads it is still to run ...
        rest = live & ~due
        mine = rest[arrays.pair_version]
        v, reader = arrays.pair_version[mine], arrays.pair_reader[mine]
        reader_row = arrays.row[reader]
        over = np.where(arrays.pair_overwrites[mine], reader <= at, reader < at)
        state = np.where(over, after, before)
        end, read = x[reader_row, variables.end], variables.x_after[reader_row, state]
        other = reader_row != row[v]
        late = other & (variables.states[state] < arrays.latest[reader_row]) & (end != ZERO) & (end != read)
        pending = np.unique(np.stack([v[late], end[late], read[late]], axis=1), axis=0)
        none = np.full((len(pending), 1), ZERO)
        begun_now = recomputed[pending[:, :1]]
        pending = np.hstack(
            [pending[:, :1], begun_now, pending[:, 1:2], none, pending[:, 2:], none + ONE, none, none]
        )
        kept = self._add_kept_bytes(pending, step, total)
        pending = np.concatenate([pending, kept, self._passed_on(rest, recomputed, pending, step)])
        waits = np.zeros(len(arrays.nbytes), bool)
        waits[pending[:, 0]] = True

        # ... and within a group only within the burst that makes it: the difference of two states of the
        # group is never negative (4).
        begun, ended = x[row, after], x[row, before]
        within = np.zeros(len(arrays.nbytes), bool)
        if before != after:
            within[v[~other & ~over & (arrays.op[v] <= at)]] = True
            within |= rest & (arrays.op == at)
            within &= variables.states_differ(row, before, after) & (begun != ended)
        alone = within & ~waits
        total.add(begun[alone], arrays.nbytes[alone])
        total.add(ended[alone], -arrays.nbytes[alone])
        self._add_pending_bytes(pending, np.flatnonzero(within & waits), begun, ended, total)

    def _add_kept_bytes(self, pending: Ints, step: int, total: LinearSum) -> Ints:
        """(16) Add the bytes of versions that are kept for their use group, up to its last unpack.

        Return the rows of `pending` that have such versions, for the case that they are kept, not recomputed.
        """
        arrays = self.arrays
        kept = (arrays.kept_from >= 0) & (arrays.nbytes > 0) & (arrays.row[arrays.op] >= 0)
        kept &= arrays.extra_from <= self.n_ops + step
        due = np.flatnonzero(kept & (arrays.last_use >= step)).tolist()
        total.add(np.array([self._kept(v) for v in due], np.int64), arrays.nbytes[due])
        waiting = pending[kept[pending[:, 0]]].copy()
        waiting[:, 1] = [self._kept(v) for v in waiting[:, 0].tolist()]
        return waiting

    def _passed_on(self, rest: Bools, recomputed: Codes, pending: Ints, step: int) -> Ints:
        """(16) Return rows, as of `pending`, of what is kept for a later use group before it counts there."""
        arrays, s_of_op, x = self.arrays, self.variables.s_of_op, self.variables.x
        begun = arrays.extra_from <= self.n_ops + step
        early = (arrays.kept_from >= 0) & (arrays.nbytes > 0) & (arrays.row[arrays.op] >= 0) & ~begun
        readers: dict[int, list[list[int]]] = {}  # by version: what says that a reader waits
        for v, _, end, _, read, *_ in pending.tolist():
            readers.setdefault(v, []).append([end, read, ONE])
        rows = []
        for v in np.flatnonzero(early).tolist():
            needs = [[ZERO] * 3] if arrays.last_use[v] >= step else readers.get(v, [])
            source, home, together = int(arrays.kept_from[v]), -1, self._kept(v)
            while needs and source >= 0 and not (begun[source] and arrays.last_use[source] >= step):
                # Kept by all runs after `source`, but not by `source`, which does not start later.
                home = source if home < 0 and begun[source] else home  # counts with what waits there
                saved = s_of_op[arrays.op[source]]
                if rest[source]:
                    end = x[arrays.row[arrays.op[source]], self.variables.end]
                    start = [source if home < 0 else home, together, recomputed[source]]
                    rows += [[*start, need, saved, end, *less] for need, *less in needs]
                together = self._both(together, int(saved))
                source = int(arrays.kept_from[source])
        return np.array(rows, np.int64).reshape(-1, 8)

    def _kept(self, version: int) -> int:
        """(16) Return the code of "the outputs of the run are kept, and its op is not saved"."""
        run = OpId(int(self.arrays.op[version]))
        if run not in self._kept_runs:
            s = self.variables.s_of_op[[run, self._first_run[run]]].tolist()
            self._kept_runs[run] = self._maximum([[(s[0], 1.0), (s[1], -1.0)]], 0.0)
        return self._kept_runs[run]

    def _both(self, code: int, other: int) -> int:
        """Return the code of "both codes are 1"."""
        if (code, other) not in self._both_of:
            self._both_of[code, other] = self._maximum([[(code, 1.0), (other, 1.0)]], -1.0)
        return self._both_of[code, other]

    def _add_pending_bytes(
        self, pending: Ints, both: Ints, begun: Codes, ended: Codes, total: LinearSum
    ) -> None:
        """Add the bytes of (11) past the last unpack: maxima over waiting readers, and over the burst.

        A row of `pending` has a version, then three codes that are added and four that are subtracted. `both`
        has the versions that also count within the burst: their code in `begun` less that in `ended`.
        """
        if not len(pending):
            return
        versions, group = np.unique(np.concatenate([pending[:, 0], both]), return_inverse=True)
        m, k = len(pending), len(both)
        wait, burst = np.arange(m), np.arange(m, m + k)
        expression = np.concatenate([np.tile(wait, 7), burst, burst])
        codes = np.concatenate([*pending[:, 1:].T, begun[both], ended[both]])
        coefficients = np.repeat([1.0, -1.0, 1.0, -1.0], [3 * m, 4 * m, k, k])
        used = codes != ZERO
        expression, codes, coefficients = expression[used], codes[used], coefficients[used]
        columns = self._maxima_of_groups(group, expression, codes, coefficients)
        total.add(columns, self.arrays.nbytes[versions])

    def _maximum(self, expressions: Sequence[Sequence[tuple[int, float]]], constant: float) -> int:
        """Return the code of a new column that is at least 0 and each of `expressions` plus `constant`."""
        positive = [
            e for e in expressions if constant + sum(max(_most(code, a), 0.0) for code, a in e if code) > 1e-9
        ]
        if not positive:
            return ZERO
        (code,) = self.variables.new_columns(1).tolist()
        for expression in positive:
            self._sequential.add(code - 1, expression, constant)
        return int(code)

    def _maxima_of_groups(self, group: Ints, expression: Ints, codes: Codes, coefficients: Floats) -> Codes:
        """Return the codes of new columns, one for each group: at least 0 and each expression of the group.

        Args:
            group: by expression, from 0 without gaps.
            expression: by term.
            codes, coefficients: by term.
        """
        columns = self.variables.new_columns(int(group.max(initial=-1)) + 1)
        mine = columns[group]
        constants = np.zeros(len(group))
        self.maxima.append(MaximumColumns(mine - 1, expression, codes, coefficients, constants))
        self.table.add(
            np.concatenate([expression, np.arange(len(group))]),
            np.concatenate([codes, mine]),
            np.concatenate([coefficients, np.full(len(group), -1.0)]),
            constants,
        )
        return columns


def _most(code: int, coefficient: float) -> float:
    """Return the most that a term can be, for codes other than `ZERO`."""
    return coefficient if code == ONE else max(coefficient, 0.0)
