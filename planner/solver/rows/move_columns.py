"""Write the columns and rows of moves: which outputs are on the host, and what the link has time for.

NOTE [ A bound with moves ]

A moved op counts as saved, so that everything that reads it in backward finds it, and `o <= s`. Where it may
be on the host, its bytes are taken off the row of the moment again. How many may be is all that the link
limits; nothing is said of single copies, so every real schedule satisfies the rows, and the relaxation's
optimum is a bound for all of them:

    (18)  absent_m <= sum of bytes of the moved ops that may be on the host at m
    (19)  absent_m <= those made before a  +  out * (from a to m + stalls [+ recompute, in backward])
    (20)  absent_m <= those used after b   +  in  * (from m to b + stalls + recompute)
    (21)  the bytes of all moved ops fit into the host's memory
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.problem.moves import Link, released
from autoac.planner.solver.arrays import Bools, Floats
from autoac.planner.solver.moments import DuringForward, position_in_step
from autoac.planner.solver.rows.sparse_rows import Codes, RowTable
from autoac.planner.solver.variables import Variables

CUTS = 10  # of the times before a moment, and of those after it


@dataclass(frozen=True, slots=True)
class MoveProblem:
    """The ops that may be moved, with the bytes of their outputs, and the link."""

    nbytes: Mapping[OpId, int]
    link: Link


class MoveColumns:
    """The columns of moves in a program, each from 0 to 1.

    Attributes:
        ops: that may be moved.
        o: by op of `ops`: it is moved.
        absent: by moment: the share of all their bytes that is on the host, and not on the device.
        recompute: the recompute time, as a share of that of everything.
        stalls: the time in which compute waits, as a share of that of copying everything out and in.
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

    def absent_bytes(self, i: int) -> tuple[Codes, float]:
        """Return the code of the bytes that are on the host at moment `i`, and the coefficient."""
        return self.absent[i : i + 1], self._all_nbytes

    def moved(self, values: Floats) -> frozenset[OpId]:
        """Return the ops that `values` moves, by more than half."""
        return frozenset(op for op, o in zip(self.ops, values[self.o - 1], strict=True) if o > 0.5)

    def add_rows(self, table: RowTable, costs_us: Floats) -> None:
        """Add rows (18) to (21), and the one that defines the recompute time.

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
        n = len(variables.graph.ops)
        used_at = self._begins[n + self._used]
        for moment, absent in zip(variables.moments, self.absent, strict=True):
            at = int(position_in_step(variables.windows, moment))
            begin, end = self._begins[at], self._begins[at + 1]
            may = (self._released <= at) & (self._used + n >= at)
            self._add(table, may, absent)
            until = begin if isinstance(moment, DuringForward) else end
            for a in _cuts(np.append(self._made[may & (self._made < until)], 0.0)):
                room = link.out_bytes_per_us, until - a, at >= n
                self._add(table, may & (self._made < a), absent, *room)
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
        """Add: what is absent is moved and of `chosen`, or went over the link in `time_us` or in stalls."""
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
