"""A Graph and its Facts as columns, for the vectorised families of `ilp`.

Nothing here says more than `facts` does; it is laid out by op, by value and by (value, reader) so that a
family of rows is a few array expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoac.planner.solver.recompute_windows import Facts, Role

Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Arrays over one step. A *row* is the position of an op's leader among the free ops; -1: not free."""

    facts: Facts
    free: Longs  # ops that the planner decides on
    row: Longs  # by op
    saved: Bools  # by op: saved whatever is decided (must be, or nothing reads it again)
    idle: Bools  # by op: of these, never held in backward
    pinned: Bools  # by free op: the user has it run again
    first: Longs  # by free op: states, as in Facts
    earliest: Longs
    latest: Longs
    cost_us: npt.NDArray[np.float64]  # by free op

    op: Longs  # by value: who wrote it
    nbytes: Longs
    last_use: Longs
    dropped: Longs
    sure_until: Longs
    until: Longs
    extra_from: Longs

    pair_value: Longs  # by (value, reader that may run again)
    pair_reader: Longs
    pair_into: Bools  # the reader writes over the value, which no saved tensor shows

    base_from: Longs  # by storage: the moments at which forward itself holds it
    base_until: Longs
    base_nbytes: Longs

    edge_op: Longs  # by (free op, what its group reads): rows of both
    edge_source: Longs


def columns(f: Facts) -> Columns:
    """Lay out `f`."""
    graph = f.graph
    role = np.array([r.value for r in f.role], np.int64)
    free = np.flatnonzero(role == Role.FREE.value)
    at = np.full(len(graph.ops) + 1, -1, np.int64)
    at[free] = np.arange(len(free))
    row = at[np.array(f.leader, np.int64)] if len(graph.ops) else np.empty(0, np.int64)
    idle = role == Role.IDLE.value
    saved = idle | (role == Role.SAVED.value)
    row[saved] = -1
    by_free = free.tolist()

    pairs = [(value.id, r) for value in graph.versions for r in value.readers if not saved[r]]
    pair_value, pair_reader = _two(pairs)
    over = {
        (graph.versions[w].previous, op.id)
        for op in graph.ops
        for w in op.writes
        if graph.versions[w].previous is not None
    }
    into = np.array([p in over and not graph.versions[p[0]].saved_tensors for p in pairs], bool)
    edges = [(at[o], at[u]) for o in by_free for u in f.sources[o] if at[u] >= 0]
    edge_op, edge_source = _two(edges)
    held = [s for s in graph.storages if s.versions]
    return Columns(
        facts=f,
        free=free,
        row=row,
        saved=saved,
        idle=idle,
        pinned=np.array([graph.ops[o].must_recompute for o in by_free], bool),
        first=_longs(f.first[o] for o in by_free),
        earliest=_longs(f.earliest[o] for o in by_free),
        latest=_longs(f.latest[o] for o in by_free),
        cost_us=np.array([f.cost_us[o] for o in by_free], np.float64),
        op=_longs(v.op for v in graph.versions),
        nbytes=_longs(graph.nbytes(v.id) for v in graph.versions),
        last_use=_longs(f.last_use),
        dropped=_longs(f.dropped),
        sure_until=_longs(f.sure_until),
        until=_longs(f.until),
        extra_from=_longs(f.extra_from),
        pair_value=pair_value,
        pair_reader=pair_reader,
        pair_into=into,
        base_from=_longs(graph.versions[s.versions[0]].op for s in held),
        base_until=_longs(f.base_release[s.id] for s in held),
        base_nbytes=_longs(s.nbytes for s in held),
        edge_op=edge_op,
        edge_source=edge_source,
    )


def _longs(numbers: object) -> Longs:
    return np.array(list(numbers), np.int64)  # type: ignore[call-overload]


def _two(pairs: Sequence[tuple[int, int]]) -> tuple[Longs, Longs]:
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]
