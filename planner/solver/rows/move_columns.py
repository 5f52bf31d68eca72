"""Write the columns and rows of moves: which ops move, and how many bytes can be on the host at a moment.

NOTE [ A bound with moves ]

The column `o` says that an op is moved. A moved op counts as saved (`o <= s`), since whatever reads its
outputs in backward finds them. But at some moments the host has these outputs, and the device does not. The
column `absent_m` is the number of such bytes at moment `m`. The row (13) of `m` subtracts it from the live
bytes, and all moved bytes once for each microbatch that waits: its copies are over when its forward ends.
These rows limit it:

    (17)  absent_m <= bytes of the moved ops that may be on the host at m
    (18)  absent_m <= bytes of those made before a      + out * (time from a to m + stalls)
    (19)  absent_m <= bytes of those first used after b + in  * (time from m to b + stalls + recompute)
    (20)  the bytes of all moved ops fit into the host's memory, as often as microbatches are in flight

`out` and `in` are the bytes that the link moves in a microsecond, to the host and back. What was made after a
time `a` can have left the device only between `a` and `m`, and what is used before a time `b` must come back
between `m` and `b`. Both hold for all times; there are rows for a few (`CUTS`). Times are those of the plain
step, which stalls (compute waits for copies) and recomputes lengthen. With `m` in backward, the time in (18)
ends where forward does: there, compute waits for all copies to the host.

No row says when a single copy runs. So every schedule of copies satisfies the rows, and the optimum of the
relaxation is a bound for all schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.problem.moves import Link, released
from autoac.planner.solver.arrays import Bools, Floats
from autoac.planner.solver.moments import position_in_step
from autoac.planner.solver.rows.sparse_rows import Codes, RowTable
from autoac.planner.solver.variables import Variables

CUTS = 10  # of the times before a moment, and of those after it


@dataclass(frozen=True, slots=True)
class MoveProblem:
    """The ops that may be moved, with the bytes of their outputs, and the link."""

    nbytes: Mapping[OpId, int]
    link: Link


class MoveColumns:
    """The columns of moves in a program, each from 0 to 1 (NOTE [ A bound with moves ]).

    Attributes:
        ops: the ops that may be moved.
        o: by op of `ops`: 1 if it is moved.
        absent: by moment: the bytes on the host and not on the device, as a share of the bytes of `ops`.
        recompute: the recompute time, as a share of the time to recompute everything.
        stalls: the time that compute waits for copies, as a share of the time to copy all `ops` out and in.
    """

    def __init__(self, variables: Variables, moves: MoveProblem) -> None:
        graph, link = variables.graph, moves.link
        self.ops = tuple(sorted(moves.nbytes))
        self.o = variables.new_columns(len(self.ops))
        self.absent = variables.new_columns(len(variables.moments))
        self.recompute, self.stalls = variables.new_columns(1), variables.new_columns(1)
        self._variables, self._link, self._rows = variables, link, np.array(self.ops, np.int64)
        nbytes = np.array([moves.nbytes[op] for op in self.ops], np.float64)
        self._all_nbytes = float(nbytes.sum())
        self._share = nbytes / self._all_nbytes
        self.all_stalls_us = sum(link.out_us(n) + link.in_us(n) for n in moves.nbytes.values())
        self._all_recompute_us = float(variables.arrays.cost_us.sum())
        times = [op.runtime_us for op in graph.ops] + [step.runtime_us for step in graph.steps]
        self._begins = np.concatenate([[0.0], np.cumsum(times)])
        self._made = self._begins[self._rows + 1]
        self._used = np.array([_first_use(graph, op) for op in self.ops], np.int64)  # steps
        self._released = np.array([min(released(graph, op)) for op in self.ops], np.int64)

    def absent_bytes(self, i: int) -> tuple[Codes, Floats]:
        """Return the codes of the bytes that are not on the device at moment `i`, and the coefficients.

        Those are bytes of the microbatch at work, and all that the waiting ones have moved.
        """
        waiting = self._variables.graph.waiting_microbatches
        codes, share = self.absent[i : i + 1], np.ones(1)
        if waiting:
            codes, share = np.r_[codes, self.o], np.r_[share, waiting * self._share]
        return codes, self._all_nbytes * share

    def moved(self, values: Floats) -> frozenset[OpId]:
        """Return the ops that `values` moves, by more than half."""
        return frozenset(op for op, o in zip(self.ops, values[self.o - 1], strict=True) if o > 0.5)

    def add_rows(self, table: RowTable, costs_us: Floats) -> None:
        """Add rows (17) to (20), and the one that defines the recompute time.

        Args:
            table: of the program.
            costs_us: by column so far: the recompute time that it stands for. The first is a constant.
        """
        variables, link = self._variables, self._link
        table.add_table([self.o, variables.s_of_op[self._rows]], [1.0, -1.0], 0.0)
        priced = np.flatnonzero(costs_us)
        table.add(
            np.zeros(len(priced) + 1),
            np.r_[priced + 1, self.recompute],
            np.r_[-costs_us[priced] / max(self._all_recompute_us, 1.0), 1.0],
            0.0,
        )
        table.add(np.zeros(len(self.o)), self.o, self._share, link.host_bytes / self._all_nbytes)
        n, forward_ends = len(variables.graph.ops), self._begins[variables.graph.model_end]
        used_at = self._begins[n + self._used]
        for moment, absent in zip(variables.moments, self.absent, strict=True):
            at = int(position_in_step(variables.windows, moment))
            begin = self._begins[at]
            may = (self._released <= at) & (self._used + n >= at)
            self._add(table, may, absent)
            until = min(begin, forward_ends)
            for a in _cuts(np.append(self._made[may & (self._made < until)], 0.0)):
                self._add(table, may & (self._made < a), absent, link.out_bytes_per_us, until - a)
            for b in _cuts(used_at[may & (used_at > begin)]):
                self._add(table, may & (used_at > b), absent, link.in_bytes_per_us, b - begin, True)

    def _add(
        self,
        table: RowTable,
        chosen: Bools,
        absent: int,
        bytes_per_us: float = 0.0,
        time_us: float = 0.0,
        with_recompute: bool = False,
    ) -> None:
        """Add a row: the absent bytes are of moved ops in `chosen`, or crossed the link in the time it had.

        Args:
            table: of the program.
            chosen: by op of `ops`: whose bytes need no time on the link.
            absent: the column of the moment.
            bytes_per_us: what the link moves in one direction. With 0, only `chosen` may be absent.
            time_us: that the link has in the plain step; stalls are added to it.
            with_recompute: recomputes are added to it, too.
        """
        per_us = bytes_per_us / self._all_nbytes
        again = self.recompute if with_recompute else self.recompute[:0]
        codes = np.concatenate([self.o[chosen], [absent], self.stalls, again])
        coefficients = np.concatenate(
            [
                -self._share[chosen],
                [1.0],
                [-per_us * self.all_stalls_us],
                np.full(len(again), -per_us * self._all_recompute_us),
            ]
        )
        table.add(np.zeros(len(codes)), codes, coefficients, per_us * time_us)


def _first_use(graph: Graph, op: OpId) -> int:
    return min(
        step
        for w in graph.ops[op].writes
        for h in graph.versions[w].saved_tensors
        for step in graph.saved_tensors[h].unpacked
    )


def _cuts(times: Floats) -> Floats:
    """Return a few of `times`, the least and the greatest among them."""
    if not len(times):
        return times
    result: Floats = np.unique(np.sort(times)[np.linspace(0, len(times) - 1, CUTS).round().astype(np.int64)])
    return result
