"""Solve Checkmate's program under HiGHS, with a cap on time.

P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020. Stage
t ends with the first run of op t. R[t, k] is 1 if op k runs in stage t, S[t, v] if value v is live when the
stage begins, F[t, v, k] if v is freed right after op k, and U is the memory. Two changes leave the optimum as
it is: F has one row for each reason not to free a value, which is tighter than one row for all of them, and
needs no integers then; and variables exist only where something can still need the op or value.
"""

from __future__ import annotations

import math

import numpy as np

from autoac.planner.solver.highs import Program, Rows, solve
from benchmarks.public.planners.published import Stages, events_of_stages
from benchmarks.public.step_graph import Event, NoSchedule, Planner, StepGraph

MOST_OPS = 160  # larger programs take too long to come by a first schedule


class _Columns:
    """The columns and rows of a program while it grows."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.least: list[float] = []
        self.integer: list[bool] = []
        self.starts, self.terms, self.coefficients = [0], list[int](), list[float]()
        self.bounds: list[float] = []

    def column(self, cost: float = 0.0, *, integer: bool = False, least: float = 0.0) -> int:
        """Add a column between `least` and 1, and return its number."""
        self.costs.append(cost)
        self.integer.append(integer)
        self.least.append(least)
        return len(self.costs) - 1

    def at_most(self, bound: float, terms: list[tuple[int, float]]) -> None:
        """Add the row: the sum of terms (column, coefficient) is at most `bound`."""
        self.terms += [column for column, _ in terms]
        self.coefficients += [a for _, a in terms]
        self.starts.append(len(self.terms))
        self.bounds.append(bound)

    def program(self) -> Program:
        rows = Rows(
            np.array(self.starts, np.int32),
            np.array(self.terms, np.int32),
            np.array(self.coefficients),
            np.full(len(self.bounds), -np.inf),
            np.array(self.bounds),
        )
        return Program(
            np.array(self.costs), np.array(self.least), np.ones(len(self.costs)), np.array(self.integer), rows
        )


class _Checkmate:
    """The program of one graph and budget. Bytes are in units of the budget."""

    def __init__(self, graph: StepGraph, budget: int) -> None:
        self.graph, self.budget = graph, budget
        self.columns = _Columns()
        self.runs: dict[tuple[int, int], int] = {}  # R
        self.stays: dict[tuple[int, int], int] = {}  # S
        needed = graph.needed_until
        for t in range(len(graph.ops)):
            for k in range(t + 1):
                op = graph.ops[k]
                if k == t or (op.repeatable and any(needed[w] >= t for w in graph.writes[k])):
                    self.runs[t, k] = self.columns.column(op.us, integer=True, least=float(k == t))
            for v, value in enumerate(graph.values):
                if value.op < t <= needed[v]:
                    self.stays[t, v] = self.columns.column(integer=True)
        self._add_dependencies()
        for t in range(len(graph.ops)):
            self._limit_memory(t)

    def _available(self, t: int, v: int) -> list[tuple[int, float]]:
        """Return the terms of S[t, v] + R[t, op of v], negated."""
        found = (self.stays.get((t, v)), self.runs.get((t, self.graph.values[v].op)))
        return [(column, -1.0) for column in found if column is not None]

    def _add_dependencies(self) -> None:
        for (t, k), run in self.runs.items():
            for v in self.graph.ops[k].reads:
                self.columns.at_most(0.0, [(run, 1.0), *self._available(t, v)])
        for (t, v), stay in self.stays.items():
            self.columns.at_most(0.0, [(stay, 1.0), *self._available(t - 1, v)])
        last = len(self.graph.ops) - 1
        for v in self.graph.keep:
            self.columns.at_most(-1.0, self._available(last, v))

    def _limit_memory(self, t: int) -> None:
        """Chain the memory over the ops of stage `t`; U has a column of its own for each."""
        graph = self.graph
        before: list[tuple[int, float]] = [
            (column, graph.values[v].nbytes / self.budget)
            for v in range(len(graph.values))
            if (column := self.stays.get((t, v))) is not None
        ]
        for k in range(t + 1):
            run = self.runs.get((t, k))
            if run is None:
                continue
            over = {graph.values[w].previous for w in graph.writes[k]}
            frees = [(v, self._freed(t, v, k, run)) for v in graph.ops[k].reads]
            op = graph.ops[k]
            outputs = sum(graph.values[w].nbytes for w in graph.writes[k])
            memory = self.columns.column()
            freed = [(v, f, -graph.values[v].nbytes / self.budget) for v, f in frees if f is not None]
            terms = [*before, (run, outputs / self.budget), (memory, -1.0)]
            self.columns.at_most(0.0, terms + [(f, nbytes) for v, f, nbytes in freed if v in over])
            extra = op.workspace_bytes + (op.first_bytes if k == t else graph.ops[t].before_bytes)
            room = 1.0 - graph.static_bytes / self.budget
            self.columns.at_most(room, [(memory, 1.0), (run, extra / self.budget)])
            before = [(memory, 1.0), *((f, nbytes) for v, f, nbytes in freed if v not in over)]

    def _freed(self, t: int, v: int, k: int, run: int) -> int | None:
        """Return the column of F[t, v, k]; None if stage t cannot free the value there."""
        graph = self.graph
        if t == len(graph.ops) - 1 and v in graph.keep:
            return None
        column = self.columns.column()
        self.columns.at_most(0.0, [(column, 1.0), (run, -1.0)])
        later = [self.runs.get((t, reader)) for reader in graph.readers[v] if k < reader <= t]
        for reason in (self.stays.get((t + 1, v)), *later):
            if reason is not None:
                self.columns.at_most(1.0, [(column, 1.0), (reason, 1.0)])
        return column

    def solve(self, time_limit_s: float) -> Stages:
        outcome = solve(self.columns.program(), time_limit_s=time_limit_s, gap=1e-4)
        if outcome.values is None:
            proven = "infeasible" if math.isinf(outcome.bound) and outcome.bound > 0 else "nothing found"
            raise NoSchedule(f"{proven} ({outcome.stopped.value}, cap {time_limit_s:g} s)")
        stages: Stages = [(set(), set()) for _ in self.graph.ops]
        for (t, k), column in self.runs.items():
            if outcome.values[column] > 0.5:
                stages[t][0].add(k)
        for (t, v), column in self.stays.items():
            if outcome.values[column] > 0.5:
                stages[t][1].add(v)
        return stages


def with_cap(time_limit_s: float) -> Planner:
    """Return the planner that stops HiGHS after so many seconds of its clock."""

    def plan(graph: StepGraph, budget: int) -> list[Event]:
        if len(graph.ops) > MOST_OPS:
            raise NoSchedule(f"not tried: more than {MOST_OPS} ops")
        return events_of_stages(graph, _Checkmate(graph, budget).solve(time_limit_s))

    return plan
