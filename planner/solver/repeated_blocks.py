"""Find the parts of a graph that are built alike: repeated blocks, by structure and never by name.

Two ops are alike if their outputs have the same sizes and uses, and if the ops that they read from and those
that read them are alike, for a few steps around. Run times play no part: they are measured and never repeat.

Source: color refinement (B. Weisfeiler, A. Leman, "The reduction of a graph to canonical form", 1968),
stopped after `ROUNDS` rounds, since blocks at the ends of a model differ from the others in what lies
far away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autoac.planner.problem.graph import Graph
from autoac.planner.solver.moments import ConstrainedMoment, DuringBurst, DuringForward, DuringStep
from autoac.planner.solver.recompute_windows import Windows

ROUNDS = 4


class RepeatedBlocks:
    """Finds ops, and steps of backward, that repeat: the same op in each block of a model, for example."""

    def __init__(self, windows: Windows) -> None:
        graph = windows.graph
        self._windows = windows
        self._kind = op_kinds(graph)
        self._ops: dict[int, list[int]] = defaultdict(list)  # by kind
        for op, kind in enumerate(self._kind):
            self._ops[kind].append(op)
        self._step_kind: list[tuple[int, ...]] = []  # by step: the kinds of the ops whose outputs it unpacks
        self._steps: dict[tuple[int, ...], list[int]] = defaultdict(list)  # by kind
        for step in graph.steps:
            unpacked = [graph.versions[graph.saved_tensors[h].version].op for h in step.unpacks]
            kinds = tuple(self._kind[op] for op in unpacked)
            self._step_kind.append(kinds)
            self._steps[kinds].append(step.id)
        self._first_state = [0] * len(graph.steps)
        for i, (step_id, _) in reversed(list(enumerate(windows.unpacks))):
            self._first_state[step_id] = i + 1

    def counterparts(self, moment: ConstrainedMoment) -> list[ConstrainedMoment]:
        """Return the same moment in all other blocks built alike; none for a step that unpacks nothing."""
        match moment:
            case DuringForward(op):
                return [DuringForward(other) for other in self._ops[self._kind[op]] if other != op]
            case DuringStep(step):
                if not self._step_kind[step]:
                    return []
                return [DuringStep(other) for other in self._steps[self._step_kind[step]] if other != step]
            case DuringBurst(state, op):
                return self._bursts_like(state, op)

    def _bursts_like(self, state: int, op: int) -> list[ConstrainedMoment]:
        versions, unpacks = self._windows.graph.versions, self._windows.unpacks
        step, version = unpacks[state - 1]
        distance = op - versions[version].op
        result: list[ConstrainedMoment] = []
        for other in self._steps[self._step_kind[step]]:
            other_state = self._first_state[other] + state - self._first_state[step]
            other_op = versions[unpacks[other_state - 1][1]].op + distance
            in_graph = 0 <= other_op < len(self._kind)
            if other != step and in_graph and self._kind[other_op] == self._kind[op]:
                result.append(DuringBurst(other_state, other_op))
        return result


def op_kinds(graph: Graph) -> list[int]:
    """Return a number for each op. Ops have the same number if sizes, readers and neighbors are the same."""
    versions = graph.versions
    kind = _numbered(
        [
            (
                tuple(
                    (
                        graph.nbytes(w),
                        versions[w].previous is not None,
                        len(versions[w].readers),
                        tuple(len(graph.saved_tensors[h].unpacked) for h in versions[w].saved_tensors),
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
        kind = _numbered(
            [
                (
                    kind[op.id],
                    tuple(kind[versions[v].op] for v in op.reads),
                    tuple(tuple(kind[r] for r in versions[w].readers) for w in op.writes),
                )
                for op in graph.ops
            ]
        )
    return kind


def _numbered(keys: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
