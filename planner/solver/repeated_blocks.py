"""Which parts of a graph are built alike: repeated blocks, found by structure and never by name.

Two ops are alike if their outputs have the same sizes and uses, and what they read and what reads them is
alike, and so on for a few steps around. Run times play no part: they are measured and never repeat.

Source: colour refinement (B. Weisfeiler, A. Leman, "The reduction of a graph to canonical form", 1968),
stopped after `ROUNDS` rounds, since blocks at the ends of a model differ from the others in what lies
far away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoac.planner.problem.graph import Graph
from autoac.planner.solver.program import Burst, Forward, Point, Work
from autoac.planner.solver.recompute_windows import Facts

ROUNDS = 4


class Likeness:
    """Classes of ops and of backward steps, and from a point the points like it."""

    def __init__(self, f: Facts) -> None:
        graph = f.graph
        self.f = f
        self.kind = op_kinds(graph)
        self.ops: dict[int, list[int]] = defaultdict(list)
        for op, kind in enumerate(self.kind):
            self.ops[kind].append(op)
        self.step_kind: list[tuple[int, ...]] = []
        self.steps: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for step in graph.steps:
            unpacked = [graph.versions[graph.saved_tensors[h].version].op for h in step.unpacks]
            kinds = tuple(self.kind[op] for op in unpacked)
            self.step_kind.append(kinds)
            self.steps[kinds].append(step.id)
        self.first_state = [0] * len(graph.steps)
        for i, (step_id, _) in reversed(list(enumerate(f.unpacks))):
            self.first_state[step_id] = i + 1

    def like(self, point: Point) -> list[Point]:
        """The points of other blocks that are like `point`. None of a step that unpacks nothing."""
        match point:
            case Forward(op):
                return [Forward(other) for other in self.ops[self.kind[op]] if other != op]
            case Work(step):
                if not self.step_kind[step]:
                    return []
                return [Work(other) for other in self.steps[self.step_kind[step]] if other != step]
            case Burst(state, op):
                step, value = self.f.unpacks[state - 1]
                far = op - self.f.graph.versions[value].op
                found: list[Point] = []
                for other in self.steps[self.step_kind[step]]:
                    there = self.first_state[other] + state - self.first_state[step]
                    moved = self.f.graph.versions[self.f.unpacks[there - 1][1]].op + far
                    if other != step and 0 <= moved < len(self.kind) and self.kind[moved] == self.kind[op]:
                        found.append(Burst(there, moved))
                return found


def op_kinds(graph: Graph) -> list[int]:
    """By op: a number that ops built alike share."""
    values = graph.versions
    now = _numbered(
        [
            (
                tuple(
                    (
                        graph.nbytes(w),
                        values[w].previous is not None,
                        len(values[w].readers),
                        tuple(len(graph.saved_tensors[h].unpacked) for h in values[w].saved_tensors),
                    )
                    for w in op.writes
                ),
                len(op.reads),
                op.workspace_bytes,
                bool(op.must_save),
            )
            for op in graph.ops
        ]
    )
    for _ in range(ROUNDS):
        now = _numbered(
            [
                (
                    now[op.id],
                    tuple(now[values[v].op] for v in op.reads),
                    tuple(tuple(now[r] for r in values[w].readers) for w in op.writes),
                )
                for op in graph.ops
            ]
        )
    return now


def _numbered(keys: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
