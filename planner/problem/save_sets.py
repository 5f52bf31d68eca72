"""Complete a save set, and find the ops that backward recomputes under it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autoac.planner.problem.graph import Graph, Op, OpId, SaveSet
from autoac.planner.problem.use_groups import UseGroups, joined, later_runs


def with_forced_saves(graph: Graph, save_set: SaveSet) -> SaveSet:
    """Return `save_set` with the ops that are always saved with it.

    These are the ops that must be saved, and the ops that only write in place over saved versions. The old
    version is lost, so the new one is saved instead. If the new version carries a saved tensor of the old
    one, the op that wrote the old one is saved as well. Ops that must be recomputed are left out. If an op
    with use groups is saved, so are its other runs; a run is left out if the run before it makes nothing.
    """
    result = {op for op in save_set | graph.must_save if not graph.ops[op].must_recompute}
    for value in reversed(graph.versions):
        if value.carries_older_saved_tensor and value.previous is not None and value.op in result:
            result.add(graph.versions[value.previous].op)
    for op in graph.ops:
        if op.id not in result and op.writes:
            previous = [graph.versions[w].previous for w in op.writes]
            if all(p is not None and graph.versions[p].op in result for p in previous):
                result.add(op.id)
    for first, *others in graph.runs:
        if first in result:
            result.update(others)
        elif graph.by_pass:
            result.difference_update(others)
    return _without_vain_keeps(graph, frozenset(result)) if graph.runs else frozenset(result)


def _without_vain_keeps(graph: Graph, save_set: SaveSet) -> SaveSet:
    """Return `save_set` without the runs of use groups that keep nothing, as the run before does not run."""
    result = set(save_set)
    again = [False] * len(graph.ops)
    row_of = {row[-1]: row for row in graph.runs}  # by the last run, the first one in this order
    for op in reversed(graph.ops):
        if op.id in row_of:
            row = row_of[op.id]
            is_made = row[0] in save_set
            for run in row:
                if run not in save_set or not is_made:
                    result.discard(run)
                    is_made = may_be_needed(graph, graph.ops[run], again)
        again[op.id] = op.id not in result and may_be_needed(graph, op, again)
    return frozenset(result)


def may_be_needed(graph: Graph, op: Op, again: Sequence[bool]) -> bool:
    """Return True if autograd holds a saved tensor of an output of `op`, or an op in `again` reads one."""
    n = len(graph.ops)
    return any(
        graph.dropped[w] > n or any(again[reader] for reader in graph.versions[w].readers) for w in op.writes
    )


def chosen_use_groups(graph: Graph, save_set: SaveSet) -> tuple[UseGroups, SaveSet]:
    """Return the use groups of `graph` that `save_set` needs, and the save set that goes with them.

    Both have the op ids of the graph without use groups. A group is left out if nothing unsaved uses it, or
    if the run before serves it. An op with one group is named only if it reads an op with several.
    """
    save_set = with_forced_saves(graph, save_set)
    runs = joined(graph, save_set)
    run = may_be_recomputed(graph, save_set)
    others = later_runs(graph)
    old_id = {op.id: OpId(i) for i, op in enumerate(op for op in graph.ops if op.id not in others)}
    groups = {row[0]: [r for r in row if run[r]] for row in graph.runs if row[0] not in save_set}
    several = {w for row in groups.values() if len(row) > 1 for r in row for w in graph.ops[r].writes}
    chosen = {
        old_id[first]: tuple(old_id[OpId(graph.ops[r].latest_use)] for r in row)
        for first, row in groups.items()
        if len(row) > 1 or any(v in several for r in row for v in runs.ops[r].reads)
    }
    return chosen, frozenset(old_id[op] for op in save_set if op in old_id)


def carried_over(graph: Graph, op: Op) -> Iterator[OpId]:
    """Yield the ops whose saved tensors `op` carries over when it writes in place over their outputs."""
    for w in op.writes:
        value = graph.versions[w]
        if value.carries_older_saved_tensor and value.previous is not None:
            yield graph.versions[value.previous].op


def unsaved_with(graph: Graph, op: OpId) -> list[OpId]:
    """Return `op` and the ops that must not be saved if `op` must not be saved.

    `with_forced_saves` saves an op together with the versions that it only writes over. So if `op` allocates
    nothing, the result has the ops that wrote the versions that `op` writes over. It also has the ops that
    write over the outputs of `op` and carry their saved tensors, and so on for each op in the result.
    """
    together = [op]
    for link in together:  # the loop appends to this list
        previous = [graph.versions[w].previous for w in graph.ops[link].writes]
        others = [graph.versions[p].op for p in previous if p is not None] if None not in previous else []
        readers = (r for w in graph.ops[link].writes for r in graph.versions[w].readers)
        others += [r for r in readers if link in carried_over(graph, graph.ops[r])]
        together += [other for other in dict.fromkeys(others) if other not in together]
    return together


def because_of(graph: Graph, op: OpId, reason: str) -> str:
    """Return `reason` of `op` for a message about another op, which shares memory with `op`."""
    return f"{reason} (of {graph.ops[op].name}, whose memory it shares)"


def recomputed_by_backward(graph: Graph, save_set: SaveSet) -> list[bool]:
    """Return for each op True if a full backward recomputes it.

    An op is recomputed if an unpack needs one of its outputs, or a recomputed op reads one. Ops that must be
    saved count as saved.
    """
    return _needed(graph, save_set, [bool(saved.unpacked) for saved in graph.saved_tensors])


def may_be_recomputed(graph: Graph, save_set: SaveSet) -> list[bool]:
    """Return for each op True if backward may recompute it, as far as is known when backward begins.

    In contrast to `recomputed_by_backward`, saved tensors that are never unpacked count, too.
    """
    return _needed(graph, save_set, [saved.dropped > len(graph.ops) for saved in graph.saved_tensors])


def _needed(graph: Graph, save_set: SaveSet, counts: Sequence[bool]) -> list[bool]:
    """Return for each op True if backward recomputes it for the saved tensors that are True in `counts`."""
    run = [False] * len(graph.ops)
    save_set = with_forced_saves(graph, save_set)
    graph = joined(graph, save_set)
    for op in reversed(graph.ops):
        if op.id in save_set:
            continue
        run[op.id] = any(
            any(counts[h] for h in graph.versions[w].saved_tensors)
            or any(run[reader] for reader in graph.versions[w].readers)
            for w in op.writes
        )
    return run


def without_cost_free_recomputes(graph: Graph, ops: Iterable[OpId]) -> SaveSet:
    """Return `ops` with every op that must be saved, and every op that would not be recomputed anyway.

    Saving an op that no recompute needs is usually free. The runtime holds a version only if autograd packed
    it or an op of the recompute set reads it. The exception is a version that is held for a saved tensor that
    is dropped without an unpack, so the planner tries both.
    """
    save_set = frozenset(ops) | graph.must_save
    run = may_be_recomputed(graph, save_set)
    for first, *others in graph.runs:
        run[first] |= any(run[other] for other in others)  # saving it would save all of them
    return frozenset(op.id for op in graph.ops if not run[op.id]) & graph.everything
