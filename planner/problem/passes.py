"""Give each op a run for every pass of backward that may need it: a pass recomputes afresh.

A step may differentiate one graph several times: two losses with `retain_graph=True`, losses that are
weighted by their gradients at one layer, one backward for each output. What a pass recomputes is gone when
the pass ends, so the next one starts from what is saved. In the graph, passes are like use groups whose
outputs nothing keeps (`Graph.by_pass`): a saved tensor is one of its own in each pass in which autograd holds
it, and an op has a run for each pass that may ask for its outputs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from autoac.planner.problem.graph import Graph, Moment, OpId, SavedTensor, SavedTensorId, pass_position
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.problem.use_groups import with_runs


def with_passes(graph: Graph) -> Graph:
    """Return `graph`, which has no runs, with runs for each pass; the same graph if there is only one."""
    if not graph.pass_ends:
        return graph
    n, spans = len(graph.ops), list(pairwise((0, *graph.pass_ends, len(graph.steps))))
    split: list[SavedTensor] = []
    ids: dict[tuple[SavedTensorId, int], SavedTensorId] = {}  # by saved tensor and pass
    of_version: list[list[SavedTensorId]] = [[] for _ in graph.versions]

    def add(saved: SavedTensor) -> SavedTensorId:
        id = SavedTensorId(len(split))
        split.append(replace(saved, id=id))
        of_version[saved.version].append(id)
        return id

    for saved in graph.saved_tensors:
        if saved.dropped <= n:
            add(saved)
        for number, (begin, end) in enumerate(spans):
            if saved.dropped > n + begin:
                own = tuple(step for step in saved.unpacked if begin <= step < end)
                until = Moment(min(saved.dropped, n + end))
                ids[saved.id, number] = add(replace(saved, unpacked=own, dropped=until, of_pass=number))
    drops: list[list[SavedTensorId]] = [[] for _ in graph.steps]
    for saved in split:
        if saved.dropped > n:
            drops[saved.dropped - n - 1].append(saved.id)
    steps = [
        replace(step, unpacks=tuple(ids[h, number] for h in step.unpacks), drops=tuple(drops[step.id]))
        for number, (begin, end) in enumerate(spans)
        for step in graph.steps[begin:end]
    ]
    versions = [
        replace(value, saved_tensors=tuple(row))
        for value, row in zip(graph.versions, of_version, strict=True)
    ]
    by_pass = replace(
        graph,
        saved_tensors=tuple(split),
        steps=tuple(steps),
        versions=tuple(versions),
        pass_ends=(),
        by_pass=True,
    )
    return with_runs(by_pass, _passes_of_ops(by_pass))


def _passes_of_ops(graph: Graph) -> dict[OpId, tuple[int, ...]]:
    """Return for each op that may run again the positions of the passes that may need it."""
    always_saved = with_forced_saves(graph, frozenset())
    passes: list[set[int]] = [set() for _ in graph.ops]
    for op in reversed(graph.ops):
        if op.id not in always_saved:
            for w in op.writes:
                saved = (graph.saved_tensors[h].of_pass for h in graph.versions[w].saved_tensors)
                passes[op.id].update(number for number in saved if number >= 0)
                for reader in graph.versions[w].readers:
                    passes[op.id] |= passes[reader]
    return {
        OpId(op): tuple(pass_position(number) for number in sorted(numbers))
        for op, numbers in enumerate(passes)
        if numbers
    }
