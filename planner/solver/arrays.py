"""Lay out a Graph and its Windows as arrays, so that program.py writes a family of rows in a few expressions.

In the example of recompute_windows.py, a chain of four ops a, b, c, d, op b follows c. The free ops a, c, d
have the *rows* 0, 1, 2. `row` is [0, 1, 1, 2], since b counts in the row of its leader c. The edges (1, 0)
and (2, 1) say that c (with its follower b) reads a, and that d reads c. The pairs of a version and its reader
are (version of a, b), (version of b, c), (version of c, d).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autoac.planner.problem.graph import Graph
from autoac.planner.solver.recompute_windows import Role, Windows

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class GraphArrays:
    """Hold the Graph of one step as arrays.

    Ops that must be decided alike share a *leader*. An op is *free* if no rule decides it. The *row* of an op
    is the position of its leader among the free ops, or -1 if it is not free.
    """

    windows: Windows
    free: Ints  # ops that the planner decides on
    row: Ints  # by op
    saved: Bools  # by op: saved under every save set, because it must be or because nothing reads it again
    unused: Bools  # by op: of these, the ones that are never held in backward
    pinned: Bools  # by free op: the user has it run again
    first_needed: Ints  # by free op: states, as in Windows
    earliest: Ints
    latest: Ints
    cost_us: Floats  # by free op

    op: Ints  # by version: the op that wrote it
    nbytes: Ints
    last_use: Ints
    dropped: Ints
    held_at_least: Ints
    held_at_most: Ints
    extra_from: Ints
    kept_from: Ints  # by version: version of the run before, whose memory a saved run keeps; -1 if none

    pair_version: Ints  # by (version, reader that may run again)
    pair_reader: Ints
    pair_overwrites: Bools  # the reader writes over the version, which no saved tensor shows

    base_from: Ints  # by storage: the moments at which forward itself holds it
    base_until: Ints
    base_nbytes: Ints

    edge_op: Ints  # by (free op, what its group reads): rows of both
    edge_source: Ints


def as_arrays(windows: Windows) -> GraphArrays:
    """Convert the graph and the windows of its ops to NumPy arrays, from which the program is built."""
    graph = windows.graph
    role = np.array([r.value for r in windows.role], np.int64)
    free = np.flatnonzero(role == Role.FREE.value)
    unused = role == Role.UNUSED.value
    saved = unused | (role == Role.SAVED.value)
    row_of_leader = np.full(len(graph.ops), -1, np.int64)
    row_of_leader[free] = np.arange(len(free))
    row = row_of_leader[_ints(windows.leader)]
    row[saved] = -1

    pair_version, pair_reader = _two_columns(
        [(version.id, r) for version in graph.versions for r in version.readers if not saved[r]]
    )
    overwrites = {
        (previous, op.id)
        for op in graph.ops
        for w in op.writes
        if (previous := graph.versions[w].previous) is not None and not graph.versions[previous].saved_tensors
    }
    pair_overwrites = [pair in overwrites for pair in zip(pair_version, pair_reader, strict=True)]
    edge_op, edge_source = _two_columns(
        [
            (row_of_leader[op], row_of_leader[source])
            for op in free.tolist()
            for source in windows.sources[op]
            if row_of_leader[source] >= 0
        ]
    )
    storages = [s for s in graph.storages if s.versions]
    return GraphArrays(
        windows=windows,
        free=free,
        row=row,
        saved=saved,
        unused=unused,
        pinned=np.array([graph.ops[o].must_recompute for o in free], bool),
        first_needed=_ints(windows.first_needed)[free],
        earliest=_ints(windows.earliest)[free],
        latest=_ints(windows.latest)[free],
        cost_us=np.array(windows.cost_us, np.float64)[free],
        op=_ints(v.op for v in graph.versions),
        nbytes=_ints(graph.nbytes(v.id) for v in graph.versions),
        last_use=_ints(windows.last_use),
        dropped=_ints(windows.dropped),
        held_at_least=_ints(windows.held_at_least),
        held_at_most=_ints(windows.held_at_most),
        extra_from=_ints(windows.extra_from),
        kept_from=_kept_from(graph),
        pair_version=pair_version,
        pair_reader=pair_reader,
        pair_overwrites=np.array(pair_overwrites, bool),
        base_from=_ints(graph.versions[s.versions[0]].op for s in storages),
        base_until=_ints(windows.released[s.id] for s in storages),
        base_nbytes=_ints(s.nbytes for s in storages),
        edge_op=edge_op,
        edge_source=edge_source,
    )


def bytes_in_any_case(arrays: GraphArrays) -> Floats:
    """Return by moment the bytes that are live under every save set.

    These are static bytes, what forward itself holds, what must be saved, and workspaces, gradients and
    temporaries.
    """
    graph = arrays.windows.graph
    always = arrays.saved[arrays.op] & ~arrays.unused[arrays.op]
    begins = np.r_[arrays.base_from, np.maximum(arrays.op, arrays.extra_from)[always]]
    ends = np.r_[arrays.base_until, arrays.dropped[always]]
    change = np.zeros(graph.end + 2)
    nbytes = np.where(begins < ends, np.r_[arrays.base_nbytes, arrays.nbytes[always]], 0)
    np.add.at(change, np.minimum(begins, ends), nbytes)
    np.add.at(change, np.minimum(ends, graph.end + 1), -nbytes)
    own = [op.workspace_bytes + op.extra_bytes for op in graph.ops]
    own += [step.extra_bytes_peak for step in graph.steps]
    result: Floats = np.cumsum(change)[: len(own)] + graph.static_bytes + own
    return result


def _kept_from(graph: Graph) -> Ints:
    kept_from = np.full(len(graph.versions), -1, np.int64)
    for row in graph.runs:
        for before, run in pairwise(row):
            kept_from[list(graph.ops[run].writes)] = graph.ops[before].writes
    return kept_from


def _ints(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, np.int64)


def _two_columns(pairs: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]
