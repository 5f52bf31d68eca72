"""Solve Checkmate's program: the least recompute time if an op may be recomputed any number of times.

P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020. Its
program has a stage for each node of the forward and backward graph and decides for each stage which ops run
(R) and which values stay in memory from the stage before (S). Here eager PyTorch runs forward, so the only
decision about forward is which values survive it. Stages are those of backward: one for each unpack, in
order; the last stage of a step ends with the step's work.

*How far it compares.* Bytes, run times, gradients, temporaries and workspace are the graph's, counted at
the same events as in `memory/simulate.py`. Checkmate may do all that our runtime does, and more: recompute
an op several times or earlier than needed, free a saved value before autograd does, and save some outputs
of an op without the others. Two rare cases are counted in its favor: memory that Python holds into backward
is free to use meanwhile, and an in-place op never needs a second buffer while it runs. So its optimum is
never above ours at the same budget. Where it recomputes no op twice, the difference is the price of our
runtime's simpler rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pulp

from autoac.planner.problem.graph import Graph, OpId, StepId, VersionId

MOST_OPS = 40  # larger programs take too long


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best schedule that the solver found within a budget."""

    recompute_us: float  # inf where none was found
    bound_us: float  # proven: no schedule takes less
    runs: dict[OpId, int]  # how often each op runs again

    @property
    def proven(self) -> bool:
        """Return True if time and bound are equal up to the solver's tolerance."""
        return self.recompute_us - self.bound_us <= 1e-4 * max(1.0, self.recompute_us)

    @property
    def twice(self) -> bool:
        """Return True if any op is recomputed more than once."""
        return any(count > 1 for count in self.runs.values())


@dataclass(frozen=True, slots=True)
class Stage:
    """One unpack of backward, or a step without unpacks."""

    step: StepId
    wants: VersionId | None  # is unpacked
    pinned: tuple[VersionId, ...]  # unpacked earlier in the same step
    works: bool  # True if the step's work follows


def stages(graph: Graph) -> list[Stage]:
    """Return the stages of backward."""
    found = []
    for step in graph.steps:
        values = list(dict.fromkeys(graph.saved_tensors[h].version for h in step.unpacks))
        for i, value in enumerate(values):
            found.append(Stage(step.id, value, tuple(values[:i]), i == len(values) - 1))
        if not values:
            found.append(Stage(step.id, None, (), works=True))
    return found


def optimum(graph: Graph, budget: int, *, time_limit_s: float = 60.0) -> Optimum | None:
    """Return the schedule of least recompute time within `budget` bytes, or None if none fits.

    Args:
        graph: should have at most MOST_OPS ops.
        budget: includes static bytes, as in `plan`.
        time_limit_s: seconds of HiGHS's clock.
    """
    program = _Program(graph, budget)
    return program.solve(time_limit_s)


class _Program:
    """The variables R and S of the paper, and its constraints."""

    def __init__(self, graph: Graph, budget: int) -> None:
        self.graph, self.stages = graph, stages(graph)
        self.scale = max(1, budget)
        self.problem = pulp.LpProblem("checkmate", pulp.LpMinimize)
        self.runs: dict[tuple[int, OpId], Any] = {}  # R
        self.stays: dict[tuple[int, VersionId], Any] = {}  # S
        self.lives: dict[str, Any] = {}  # in memory while some op runs
        self._add_variables()
        self.problem += pulp.lpSum(graph.ops[o].runtime_us * column for (_, o), column in self.runs.items())
        self._add_dependencies()
        self._limit_forward(budget)
        for j in range(len(self.stages)):
            self._limit_backward(j, budget)

    def _add_variables(self) -> None:
        """Add a variable for each run and each stay that something later can use."""
        useful: set[VersionId] = set()
        for j in reversed(range(len(self.stages))):
            stage = self.stages[j]
            useful |= {v for v in (stage.wants, *stage.pinned) if v is not None}
            for op in reversed(self.graph.ops):
                if any(w in useful for w in op.writes) and not op.must_save:
                    useful.update(op.reads)
                    self.runs[j, op.id] = self.problem.add_variable(f"R_{j}_{op.id}", 0, 1, cat="Integer")
            for v in useful:
                lost = j == 0 and self.graph.ops[self.graph.versions[v].op].must_recompute
                name = f"S_{j}_{v}"
                self.stays[j, v] = self.problem.add_variable(name, 0, 0 if lost else 1, cat="Integer")

    def _add_dependencies(self) -> None:
        """Require that an op's inputs, a value that stays, and a value that is unpacked are in memory."""
        graph = self.graph
        for (j, o), run in self.runs.items():
            for v in graph.ops[o].reads:
                self.problem += run <= self._available(j, v)
        for (j, v), stay in self.stays.items():
            if j:
                self.problem += stay <= self._available(j - 1, v)
        for j, stage in enumerate(self.stages):
            if stage.wants is not None:
                self.problem += self._available(j, stage.wants) >= 1
            for v in stage.pinned:
                self.problem += self.stays[j, v] >= 1

    def _available(self, j: int, v: VersionId) -> Any:
        return self.stays.get((j, v), 0) + self.runs.get((j, self.graph.versions[v].op), 0)

    def _limit_forward(self, budget: int) -> None:
        """Limit, at each op of forward, what forward holds and what stays for backward."""
        graph = self.graph
        for op in graph.ops:
            live: Any = graph.static_bytes + op.workspace_bytes + op.extra_bytes
            live += sum(
                storage.nbytes
                for storage in graph.storages
                if storage.versions
                and graph.versions[storage.versions[0]].op <= op.id
                and op.id < max(storage.released, graph.versions[storage.versions[-1]].op + 1)
            )
            terms = [
                graph.nbytes(v.id) * self.stays[0, v.id]
                for v in graph.versions
                if (0, v.id) in self.stays and self._free_at(v.id) <= op.id
            ]
            self._within(terms, live, budget)

    def _free_at(self, v: VersionId) -> int:
        """Return the moment from which neither forward nor Python holds `v`."""
        value = self.graph.versions[v]
        storage = self.graph.storages[value.storage]
        following = storage.versions.index(v) + 1
        if following < len(storage.versions):
            return self.graph.versions[storage.versions[following]].op
        return max(storage.released, value.op + 1)

    def _limit_backward(self, j: int, budget: int) -> None:
        """Limit memory at each op that stage `j` may run, and at the step's work."""
        graph, stage = self.graph, self.stages[j]
        moment = len(graph.ops) + stage.step
        held = graph.static_bytes + sum(s.nbytes for s in graph.storages if s.released > moment)
        wanted = {v for v in (stage.wants, *stage.pinned) if v is not None}
        ops = sorted(o for (at, o) in self.runs if at == j)
        step = graph.steps[stage.step]
        counted = [
            v for v in graph.versions if self._free_at(v.id) <= moment and (j, v.id) in self.stays
        ]  # values that can be in memory
        after: dict[VersionId, Any] = {}  # live from the last run on
        for value in counted:
            stays_on = self.stays.get((j + 1, value.id))
            after[value.id] = 1 if value.id in wanted else 0 if stays_on is None else stays_on
        for k in ops:
            terms = [graph.ops[k].workspace_bytes * self.runs[j, k]]
            for value in counted:
                in_place = value.op == k and value.previous is not None
                if not in_place:
                    terms.append(graph.nbytes(value.id) * self._live(j, value.id, k, after[value.id]))
            self._within(terms, held + step.extra_bytes_while_unpacking, budget)
        if stage.works:
            self._within(
                [graph.nbytes(v) * live for v, live in after.items()], held + step.extra_bytes_peak, budget
            )

    def _live(self, j: int, v: VersionId, k: OpId, after: Any) -> Any:
        """Return an expression that is 1 if `v` is in memory while op `k` runs in stage `j`.

        Before its own op, `v` is in memory if it stayed; afterwards, if a reader from `k` on runs, or `v`
        is unpacked, or stays on. Each reason implies that `v` is in memory, so no product of variables is
        needed.
        """
        graph = self.graph
        if graph.versions[v].op > k:
            return self.stays[j, v]
        readers = [r for r in graph.versions[v].readers if r >= k and (j, r) in self.runs]
        reasons = [self.runs[j, r] for r in readers] + [after]
        if graph.versions[v].op == k:
            reasons += [self.runs[j, k], self.stays[j, v]]
        if any(isinstance(reason, int) and reason == 1 for reason in reasons):
            return 1
        columns = [reason for reason in reasons if not isinstance(reason, int)]
        if len(columns) < 2:
            return columns[0] if columns else 0
        key = f"L_{j}_{v}_{'own' if graph.versions[v].op == k else readers[0] if readers else 'end'}"
        if key not in self.lives:
            self.lives[key] = self.problem.add_variable(key, 0, 1)
            for column in columns:
                self.problem += self.lives[key] >= column
        return self.lives[key]

    def _within(self, terms: Iterable[Any], constant: int, budget: int) -> None:
        """Add a row that limits bytes, scaled to be near one."""
        self.problem += pulp.lpSum(terms) * (1 / self.scale) <= (budget - constant) / self.scale

    def solve(self, time_limit_s: float) -> Optimum | None:
        """Solve, and read the status from HiGHS: PuLP reports a time-out with a candidate as optimal."""
        self.problem.solve(pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, gapRel=1e-6))
        highs = self.problem.solverModel
        if highs is None or "nfeasible" in highs.modelStatusToString(highs.getModelStatus()):
            return None
        info = highs.getInfo()
        found = info.primal_solution_status == 2  # HiGHS's kSolutionStatusFeasible
        runs: dict[OpId, int] = {}
        for (_, o), column in self.runs.items():
            if found and round(column.value() or 0):
                runs[o] = runs.get(o, 0) + 1
        spent = sum(self.graph.ops[o].runtime_us * count for o, count in runs.items())
        bound = info.mip_dual_bound
        return Optimum(
            recompute_us=spent if found else math.inf,
            bound_us=max(0.0, min(bound, spent) if math.isfinite(bound) else 0.0),
            runs=runs,
        )
