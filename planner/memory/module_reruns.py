"""Choose the module calls that backward runs again as a whole, at the peak that op by op recomputing has.

Running a module again as a whole costs less of the host's time than recording and replaying each of its ops
(rule i in `schedule.py`). But it holds memory at other moments, and runs ops that nothing needs. So a call is
chosen only if its ops are recomputed, if hardly any other op runs, and if the peak of the step stays the same
to the byte. So the predicted peak also holds for a runtime that records some of the chosen calls op by op.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoac.planner.formats.op_key import OpKey, spans_by_module
from autoac.planner.memory.schedule import Span, rerun_until, unsaved_in
from autoac.planner.memory.simulate import Instant, simulate
from autoac.planner.problem.graph import Graph, OpId, SaveSet, VersionId
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves

LEAST_OPS = 3
"""Recomputed ops from which on a call is cheaper to run again than to record."""

MOST_EXTRA = 0.02
"""Run time of ops that nothing needs, as a fraction of the run time of the recomputed ops of a call."""


def module_reruns(graph: Graph, save_set: SaveSet) -> tuple[Span, ...]:
    """Return disjoint calls of modules that may run again as a whole under `save_set`, in forward order."""
    if any(len(set(saved.unpacked)) > 1 for saved in graph.saved_tensors):
        return ()  # rule g
    if any(op.compiled for op in graph.ops):
        return ()  # rule h
    if graph.runs:
        return ()  # rule j: a call has one run
    candidates = list(Candidates(graph, save_set).outermost())
    if not candidates:
        return ()
    peaks = _peaks(graph, save_set, ())
    chosen: list[Span] = []
    stack = [candidates]
    while stack:
        spans = stack.pop()
        if _peaks(graph, save_set, (*chosen, *spans)) == peaks:
            chosen += spans
        elif len(spans) > 1:
            half = len(spans) // 2
            stack += [spans[half:], spans[:half]]
    return tuple(sorted(chosen))


def _peaks(graph: Graph, save_set: SaveSet, reruns: tuple[Span, ...]) -> tuple[int, int]:
    """Return the peak of forward, and of the step."""
    instants: tuple[Instant, ...] = simulate(graph, save_set, reruns).instants
    forward = (instant.live_bytes for instant in instants if instant.moment < len(graph.ops))
    return max(forward, default=0), max(instant.live_bytes for instant in instants)


class Candidates:
    """The module calls of a graph, judged one by one."""

    def __init__(self, graph: Graph, save_set: SaveSet) -> None:
        self._graph = graph
        self._save_set = with_forced_saves(graph, save_set)
        self._recomputed = recomputed_by_backward(graph, save_set)

    def outermost(self) -> Iterator[Span]:
        """Yield the calls that may run again as a whole and lie inside of no other such call."""
        modules = [OpKey.parse(op.name).module for op in self._graph.ops]
        spans = {(OpId(b), OpId(e)) for calls in spans_by_module(modules).values() for b, e in calls}
        reached = 0
        for span in sorted(spans, key=lambda span: (span[0], -span[1])):
            if span[0] >= reached and self._qualifies(span):
                reached = span[1]
                yield span

    def _qualifies(self, span: Span) -> bool:
        """Return True if a rerun of `span` saves host time and can follow rule i."""
        graph, (begin, end) = self._graph, span
        recomputed = [op for op in graph.ops[begin:end] if self._recomputed[op.id]]
        written = [w for op in graph.ops[begin:end] for w in op.writes]
        if len(recomputed) < LEAST_OPS or not all(self._can_rerun(w, span) for w in written):
            return False
        unsaved = unsaved_in(graph, self._save_set, span)
        stop = rerun_until(graph, [w for w in unsaved if self._is_needed(w, end)], span)
        extra_us = sum(op.runtime_us for op in graph.ops[begin:stop] if not self._recomputed[op.id])
        saved_us = sum(MOST_EXTRA * op.runtime_us + op.replay_us / 2 for op in recomputed)
        return extra_us <= saved_us

    def _can_rerun(self, w: VersionId, span: Span) -> bool:
        graph, (begin, end) = self._graph, span
        value = graph.versions[w]
        storage = graph.storages[value.storage]
        first, last = storage.versions[0], storage.versions[-1]
        if graph.versions[first].op < begin or graph.versions[last].op >= end:
            return False  # memory that other ops write too
        if w != last and self._is_needed(w, end):
            return False
        # What is saved must be what the call returns.
        return value.op not in self._save_set or not self._is_needed(w, end) or storage.released >= end

    def _is_needed(self, w: VersionId, end: OpId) -> bool:
        """Return True if autograd or a recomputed op after the call needs `w`."""
        value = self._graph.versions[w]
        return any(
            self._graph.saved_tensors[h].dropped > len(self._graph.ops) for h in value.saved_tensors
        ) or any(reader >= end and self._recomputed[reader] for reader in value.readers)
