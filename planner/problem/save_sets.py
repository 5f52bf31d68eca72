"""Complete a save set: the ops that must be saved with it, and the ops that backward then runs again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autoac.planner.problem.graph import Graph, Op, OpId, SaveSet


def with_forced_saves(graph: Graph, save_set: SaveSet) -> SaveSet:
    """`save_set` with the ops that are saved whether or not it names them.

    Those that must be, and those that write in place over a saved value and make nothing else: the old
    version is gone, so the new one is kept in its place. Where the new version carries a saved tensor of the
    old one, the old one is saved with it as well. Those that must be run again are left out.
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
    return frozenset(result)


def carried_over(graph: Graph, op: Op) -> Iterator[OpId]:
    """Yield the ops over whose outputs `op` writes where a saved tensor does not show them (`carries`)."""
    for w in op.writes:
        value = graph.versions[w]
        if value.carries_older_saved_tensor and value.previous is not None:
            yield graph.versions[value.previous].op


def unsaved_with(graph: Graph, op: OpId) -> list[OpId]:
    """Return `op` and the ops that must not be saved if it is not to be (`with_forced_saves`).

    An op that only writes over saved values is saved with them. So these are the ops that made what `op`
    writes over, if it makes nothing else; those that write over its outputs and carry their saved tensors;
    and so on.
    """
    together = [op]
    for link in together:  # which grows
        previous = [graph.versions[w].previous for w in graph.ops[link].writes]
        others = [graph.versions[p].op for p in previous if p is not None] if None not in previous else []
        readers = (r for w in graph.ops[link].writes for r in graph.versions[w].readers)
        others += [r for r in readers if link in carried_over(graph, graph.ops[r])]
        together += [other for other in dict.fromkeys(others) if other not in together]
    return together


def because_of(graph: Graph, op: OpId, reason: str) -> str:
    """Return `reason` in words, with the name of the op that it is the reason of."""
    return f"{reason} (of {graph.ops[op].name}, whose memory it shares)"


def recomputed_by_backward(graph: Graph, save_set: SaveSet) -> list[bool]:
    """Which ops of the recompute set a full backward runs again, by op.

    An op is run when an unpack needs one of its outputs, or an op that is run reads one. Ops that must
    be saved count as saved.
    """
    return _asked_for(graph, save_set, [bool(handle.unpacked) for handle in graph.saved_tensors])


def may_be_recomputed(graph: Graph, save_set: SaveSet) -> list[bool]:
    """Which ops of the recompute set backward may ask for when it begins, by op.

    More than `recomputed_by_backward` by what only saved tensors that are never unpacked ask for.
    """
    return _asked_for(graph, save_set, [handle.dropped > len(graph.ops) for handle in graph.saved_tensors])


def _asked_for(graph: Graph, save_set: SaveSet, by_handle: Sequence[bool]) -> list[bool]:
    run = [False] * len(graph.ops)
    save_set = with_forced_saves(graph, save_set)
    for op in reversed(graph.ops):
        if op.id in save_set:
            continue
        run[op.id] = any(
            any(by_handle[h] for h in graph.versions[w].saved_tensors)
            or any(run[reader] for reader in graph.versions[w].readers)
            for w in op.writes
        )
    return run


def without_cost_free_recomputes(graph: Graph, ops: Iterable[OpId]) -> SaveSet:
    """`ops` and all that must be saved, and every op that would not be run again anyway.

    Saving an op that nothing needs costs nothing as a rule: the runtime holds a value only if autograd
    packed it or an op of the recompute set reads it. The exception is a value that is held for a saved
    tensor that is dropped without having been unpacked; so the planner tries both.
    """
    save_set = frozenset(ops) | graph.must_save
    run = may_be_recomputed(graph, save_set)
    return (save_set | frozenset(op.id for op in graph.ops if not run[op.id])) & graph.everything
