"""Check a Graph against its definitions.

`broken_graph_rules` returns one sentence per broken rule, none for a valid graph. The rules follow the
definitions in graph.py and docs/memory-model.md. This module shares no code with the solver or the simulator,
so a bug there cannot hide itself here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autoac.planner.problem.graph import Graph


def broken_graph_rules(graph: Graph) -> list[str]:
    """Check the invariants of graph.py, and return a sentence for each that `graph` breaks."""
    if broken := list(_positions(graph)):
        return broken  # the other rules look up references
    rules: tuple[Callable[[Graph], Iterator[str]], ...] = (_ops, _versions, _storages, _saved_tensors, _sizes)
    return [sentence for rule in rules for sentence in rule(graph)]


def _positions(graph: Graph) -> Iterator[str]:
    """Check that each part has its position as its id, and that references lead to parts of the graph."""
    sizes = {
        "op": len(graph.ops),
        "version": len(graph.versions),
        "storage": len(graph.storages),
        "saved tensor": len(graph.saved_tensors),
        "step": len(graph.steps),
    }
    ids: tuple[Sequence[int], ...] = (
        [op.id for op in graph.ops],
        [v.id for v in graph.versions],
        [s.id for s in graph.storages],
        [h.id for h in graph.saved_tensors],
        [j.id for j in graph.steps],
    )
    for kind, column in zip(sizes, ids, strict=True):
        for i, given in enumerate(column):
            if given != i:
                yield f"{kind} at position {i} must have the id {i}, got {given}"
    references: list[tuple[str, str, tuple[int, ...]]] = []
    for op in graph.ops:
        references.append((op.name, "version", (*op.reads, *op.writes)))
    for v in graph.versions:
        previous = () if v.previous is None else (v.previous,)
        references += [
            (f"version {v.id}", "op", (v.op, *v.readers)),
            (f"version {v.id}", "storage", (v.storage,)),
            (f"version {v.id}", "version", previous),
            (f"version {v.id}", "saved tensor", v.saved_tensors),
        ]
    references += [(f"storage {s.id}", "version", s.versions) for s in graph.storages]
    for h in graph.saved_tensors:
        references += [
            (f"saved tensor {h.id}", "version", (h.version,)),
            (f"saved tensor {h.id}", "step", h.unpacked),
        ]
    references += [(f"step {j.id}", "saved tensor", (*j.unpacks, *j.drops)) for j in graph.steps]
    for owner, kind, targets in references:
        for target in targets:
            if not 0 <= target < sizes[kind]:
                yield f"{owner} must refer to one of {sizes[kind]} {kind}s, got {target}"


def _ops(graph: Graph) -> Iterator[str]:
    for op in graph.ops:
        for v in op.reads:
            if graph.versions[v].op >= op.id:
                yield f"{op.name} must read versions of earlier ops, got version {v}"
            if op.id not in graph.versions[v].readers:
                yield f"version {v} must list {op.name} as a reader"
        for v in op.writes:
            if graph.versions[v].op != op.id:
                yield f"version {v} must name {op.name} as its op"
        if op.must_save and op.must_recompute:
            yield f"{op.name} must not be both saved ({op.must_save}) and recomputed"


def _versions(graph: Graph) -> Iterator[str]:
    for v in graph.versions:
        if v.id not in graph.ops[v.op].writes:
            yield f"{graph.ops[v.op].name} must write version {v.id}"
        if v.previous is not None:
            if graph.versions[v.previous].storage != v.storage:
                yield f"version {v.id} must be in the same storage as version {v.previous}, which it follows"
            if v.previous not in graph.ops[v.op].reads:
                yield f"{graph.ops[v.op].name} must read version {v.previous}, which it writes over"
        for reader in v.readers:
            if v.id not in graph.ops[reader].reads:
                yield f"{graph.ops[reader].name} must read version {v.id}"
        for h in v.saved_tensors:
            if graph.saved_tensors[h].version != v.id:
                yield f"saved tensor {h} must show version {v.id}"


def _storages(graph: Graph) -> Iterator[str]:
    for s in graph.storages:
        chain = [None, *s.versions]
        for before, v in zip(chain, s.versions, strict=False):
            if graph.versions[v].storage != s.id or graph.versions[v].previous != before:
                yield f"version {v} must follow {before} in storage {s.id}"
        if not 0 <= s.released <= graph.end:
            yield f"storage {s.id} must be released at a moment from 0 to {graph.end}, got {s.released}"
    listed = sum(len(s.versions) for s in graph.storages)
    if listed != len(graph.versions):
        yield f"storages must list each of the {len(graph.versions)} versions once, got {listed}"


def _saved_tensors(graph: Graph) -> Iterator[str]:
    n = len(graph.ops)
    for h in graph.saved_tensors:
        if h.id not in graph.versions[h.version].saved_tensors:
            yield f"version {h.version} must list saved tensor {h.id}"
        if not 0 <= h.dropped <= graph.end:
            yield f"saved tensor {h.id} must be dropped at a moment from 0 to {graph.end}, got {h.dropped}"
        for j in h.unpacked:
            if h.id not in graph.steps[j].unpacks:
                yield f"step {j} must unpack saved tensor {h.id}"
            if h.dropped <= n + j:
                yield f"saved tensor {h.id} must be dropped after step {j}, which unpacks it, got {h.dropped}"
    for step in graph.steps:
        for drop in step.drops:
            if graph.saved_tensors[drop].dropped != n + step.id + 1:
                yield f"saved tensor {drop} must be dropped at the end of step {step.id}"


def _sizes(graph: Graph) -> Iterator[str]:
    for owner, nbytes in (
        *((op.name, min(op.workspace_bytes, op.extra_bytes)) for op in graph.ops),
        *((f"storage {s.id}", s.nbytes) for s in graph.storages),
        *((j.name, min(j.extra_bytes_while_unpacking, j.extra_bytes_peak)) for j in graph.steps),
        ("the graph", min(graph.static_bytes, graph.closing_bytes, graph.waiting_microbatches)),
    ):
        if nbytes < 0:
            yield f"bytes of {owner} must not be negative, got {nbytes}"
