"""Check a Graph against its definitions.

`broken_graph_rules` names each broken rule, and none for a valid graph. The rules follow the definitions in
graph.py and docs/memory-model.md. This module shares no code with the solver or the simulator, so a bug there
cannot hide itself here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from autoac.planner.problem.graph import Graph


def broken_graph_rules(graph: Graph) -> list[str]:
    """Return the rules that `graph` breaks. References are looked up only if all of them lead to a part."""
    return list(_positions(graph)) or [*_ops_and_versions(graph), *_storages(graph), *_saved_tensors(graph)]


def _positions(graph: Graph) -> Iterator[str]:
    ops, versions, storages, saved, steps = columns = (
        *(graph.ops, graph.versions, graph.storages),
        *(graph.saved_tensors, graph.steps),
    )
    if any(part.id != i for column in columns for i, part in enumerate(column)):
        yield "each part has its position as its id"
    references = [
        *((versions, target) for op in ops for target in (*op.reads, *op.writes)),
        *((ops, target) for v in versions for target in (v.op, *v.readers)),
        *((storages, v.storage) for v in versions),
        *((versions, v.previous) for v in versions if v.previous is not None),
        *((saved, target) for v in versions for target in v.saved_tensors),
        *((versions, target) for s in storages for target in s.versions),
        *((versions, h.version) for h in saved),
        *((steps, target) for h in saved for target in h.unpacked),
        *((saved, target) for step in steps for target in (*step.unpacks, *step.drops)),
    ]
    if any(not 0 <= target < len(column) for column, target in references):
        yield "each reference leads to a part"


def _ops_and_versions(graph: Graph) -> Iterator[str]:
    ops, versions = graph.ops, graph.versions
    if any(versions[v].op >= op.id for op in ops for v in op.reads):
        yield "ops read versions of earlier ops"
    if {(op.id, v) for op in ops for v in op.reads} != {(r, v.id) for v in versions for r in v.readers}:
        yield "versions list their readers"
    if {(op.id, v) for op in ops for v in op.writes} != {(v.op, v.id) for v in versions}:
        yield "versions name their op"
    if any(op.must_save and op.must_recompute for op in ops):
        yield "no op is both saved and recomputed"
    if any(v.previous is not None and v.previous not in ops[v.op].reads for v in versions):
        yield "ops read what they write over"


def _storages(graph: Graph) -> Iterator[str]:
    chains = {(b, a, s.id) for s in graph.storages for a, b in pairwise((None, *s.versions))}
    if chains != {(v.id, v.previous, v.storage) for v in graph.versions}:
        yield "versions follow each other in their storage"
    if any(not 0 <= s.released <= graph.end for s in graph.storages):
        yield "storages are released within the step"
    nbytes = (
        *(number for op in graph.ops for number in (op.workspace_bytes, op.extra_bytes)),
        *(s.nbytes for s in graph.storages),
        *(n for step in graph.steps for n in (step.extra_bytes_while_unpacking, step.extra_bytes_peak)),
        *(graph.static_bytes, graph.closing_bytes, graph.waiting_microbatches),
    )
    if min(nbytes) < 0:
        yield "no bytes are negative"


def _saved_tensors(graph: Graph) -> Iterator[str]:
    n, saved, steps = len(graph.ops), graph.saved_tensors, graph.steps
    if {(h.id, h.version) for h in saved} != {(h, v.id) for v in graph.versions for h in v.saved_tensors}:
        yield "versions list their saved tensors"
    if {(h.id, j) for h in saved for j in h.unpacked} != {(h, j.id) for j in steps for h in j.unpacks}:
        yield "steps list what they unpack"
    if any(not 0 <= h.dropped <= graph.end or h.dropped <= n + max(h.unpacked, default=-n) for h in saved):
        yield "saved tensors are dropped after they are unpacked"
    if any(saved[h].dropped != n + step.id + 1 for step in steps for h in step.drops):
        yield "steps drop at their end"
