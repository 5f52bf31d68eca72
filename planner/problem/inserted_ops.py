"""Make room in a graph for ops that the model does not have: runs of use groups, ops that pack and unpack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from autoac.planner.problem.graph import Graph, Moment, OpId


def with_room(graph: Graph, places: Iterable[int]) -> tuple[list[OpId], Graph]:
    """Return the new ids of the ops of `graph`, and `graph` with these ids everywhere but in its ops.

    Versions, storages, saved tensors and steps keep their ids.

    Args:
        places: by op, how many ops there will be in its place, itself included.
    """
    *new_id, count = (OpId(i) for i in accumulate(places, initial=0))
    n = len(graph.ops)

    def moment(m: int) -> Moment:
        return Moment(new_id[m] if m < n else m - n + count)

    return new_id, replace(
        graph,
        versions=tuple(
            replace(v, op=new_id[v.op], readers=tuple(new_id[r] for r in v.readers)) for v in graph.versions
        ),
        storages=tuple(replace(s, released=moment(s.released)) for s in graph.storages),
        saved_tensors=tuple(
            replace(h, packed=new_id[h.packed - 1] + 1 if h.packed else 0, dropped=moment(h.dropped))
            for h in graph.saved_tensors
        ),
    )
