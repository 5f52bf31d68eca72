"""Choose the ops that may be recomputed once per use group: cheap ones whose uses in backward lie apart."""

from __future__ import annotations

import math
from typing import NamedTuple

from autoac.planner.problem.graph import Graph, Op, OpId
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.problem.use_groups import UseGroups

GAP = 0.1  # of backward's steps: uses with a longer gap between them are in different groups
LARGE = 0.005  # of what backward may hold: outputs that are freed between nearer uses, too, if that is cheap
NEAR = 0.03  # of backward's steps: the gap between the uses of such outputs
CHEAP, DEAR = 0.75, 2.0  # recompute times for each byte, in relation to all ops


class _Use(NamedTuple):
    """A use of an op's outputs by a saved tensor or a reader."""

    position: int
    begin: int  # first step that needs it, if nothing is saved
    end: int  # last one
    price: float = 0.0  # of the dearest op that runs again for it


def distant_uses(graph: Graph, gap: float = GAP) -> UseGroups:
    """Return the use groups of `graph`, as `with_use_groups` takes them.

    Uses that lie far apart are in different groups. In a network with such uses, large outputs that are cheap
    to recompute are divided further, at gaps longer than NEAR. After a use for which an op of a price from
    CHEAP to DEAR runs again, any gap will do: the planner would rather keep the output of such an op. After
    uses with only dearer ops, none will do: these ops never run again.
    """
    far = _groups(graph, gap, [True] * len(graph.ops))
    return _groups(graph, gap, _small(graph)) if far else far


def _groups(graph: Graph, gap: float, small: list[bool]) -> UseGroups:
    n_steps = len(graph.steps)
    price = _prices(graph)
    turn = max((h.packed for h in graph.saved_tensors if h.needed_until), default=0)
    groups: dict[OpId, tuple[OpId, ...]] = {}
    runs: list[list[_Use]] = [[] for _ in graph.ops]  # by op: how its runs use what it reads
    always_saved = with_forced_saves(graph, frozenset())
    for op in reversed(graph.ops):
        packs = _packs(graph, op)
        uses = sorted(packs + [use for w in op.writes for r in graph.versions[w].readers for use in runs[r]])
        if op.id in always_saved or not uses:
            continue
        uses.reverse()
        mine = [[uses[0]]]
        for use in uses[1:]:
            distance = use.begin - max(u.end for u in mine[-1])
            turns = use.position < turn <= mine[-1][-1].position  # a backward inside of forward lies between
            apart = distance > (gap if turns else max(gap, price[op.id])) * n_steps
            if not apart and price[op.id] < CHEAP and not small[op.id]:
                least = [0 if u.price >= CHEAP else NEAR * n_steps for u in mine[-1] if u.price < DEAR]
                apart = distance > min(least, default=n_steps)
            if apart and use.position < mine[-1][-1].position:
                mine.append([use])
            else:
                mine[-1].append(use)
        if len(mine) > 1:
            groups[op.id] = tuple(OpId(group[0].position) for group in mine)
            begins = [min(u.begin for u in group) for group in mine]
            prices = [max(price[op.id], *(u.price for u in group)) for group in mine]
            runs[op.id] = [
                _Use(group[0].position, begin, begin, dearest)
                for group, begin, dearest in zip(mine, begins, prices, strict=True)
            ]
        else:
            # Without use groups and saved tensors of its own, something near it is probably saved.
            begin = min(u.begin for u in packs) if packs else max(u.begin for u in uses)
            runs[op.id] = [_Use(op.id, begin, begin, price[op.id])]
    return groups


def _small(graph: Graph) -> list[bool]:
    """Return by op True if its outputs are a small part of what backward holds if everything is saved."""
    held = {graph.versions[h.version].storage for h in graph.saved_tensors if h.dropped > len(graph.ops)}
    least = LARGE * sum(graph.storages[storage].nbytes for storage in held)
    return [sum(graph.nbytes(w) for w in op.writes) < least for op in graph.ops]


def _prices(graph: Graph) -> list[float]:
    """Return by op its recompute time per byte, relative to that of all ops; infinite if not `_is_alone`."""
    nbytes = [sum(graph.nbytes(w) for w in op.writes) for op in graph.ops]
    us_per_byte = sum(op.recompute_us for op in graph.ops) / max(sum(nbytes), 1)
    return [
        op.recompute_us / (us_per_byte * size) if us_per_byte and size and _is_alone(graph, op) else math.inf
        for op, size in zip(graph.ops, nbytes, strict=True)
    ]


def _is_alone(graph: Graph, op: Op) -> bool:
    """Return True if `op` runs eagerly, and no in-place op writes to the memory of its outputs."""
    return not op.compiled and all(
        len(graph.storages[graph.versions[w].storage].versions) == 1 for w in op.writes
    )


def _packs(graph: Graph, op: Op) -> list[_Use]:
    n = len(graph.ops)
    saved_tensors = (graph.saved_tensors[h] for w in op.writes for h in graph.versions[w].saved_tensors)
    return [
        _Use(h.packed - 1, min(h.unpacked, default=h.dropped - n - 1), h.dropped - n - 1)
        for h in saved_tensors
        if h.dropped > n
    ]
