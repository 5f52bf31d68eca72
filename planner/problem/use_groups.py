"""Split the uses of an op's outputs in backward into groups, with a recompute of the op for each group.

NOTE [ Use groups ]

By rule d of the schedule, an op is recomputed once in a backward, and its outputs stay cached until their
last use. If two uses lie far apart, the outputs fill memory between them. With use groups, the op runs once
for each group, and nothing is held in between. Each of these runs is an op of the graph, with outputs of its
own:

    forward    position 3: a = relu    4: conv packs a    ...    40: c = cat(a)   41: conv packs c
    backward                           needs a last                              needs c, so a, first

    groups {3: (40, 3)}    a      serves the uses from position 4 to 40 and later: cat reads it
                           a@2    serves the uses up to position 3: conv unpacks it

The *position* of a use decides its group. A saved tensor has the position of the last op that had started
when autograd packed it (conv packs its input before it starts). A reader has its own position, unless it has
use groups: then each of its runs reads once, at the position of the latest use that it serves. For that
reason an op may also have a single group.

Forward runs an op once, so only the first run (`a`) has a place in forward. The other runs allocate nothing
there. A save set may have any of the runs, with this meaning:

- If the first run is saved, there is nothing to recompute: all other runs are saved.
- If another run is saved, the outputs of the run before it are kept for its uses. So {a, a@2} saves a, {a@2}
  recomputes a once, and {} recomputes it twice. If nothing needs the run before, there is nothing to keep,
  and the later run recomputes the outputs.

`joined` gives the uses of saved runs to the runs before them. Its result has the plain meaning of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from autoac.planner.problem.graph import (
    Graph,
    Moment,
    Op,
    OpId,
    SavedTensorId,
    SaveSet,
    Storage,
    StorageId,
    StorageVersion,
    VersionId,
)

UseGroups = Mapping[OpId, tuple[OpId, ...]]
"""By op with use groups: the position of the latest use in each group, the latest first, as in backward."""


def with_use_groups(graph: Graph, groups: UseGroups) -> Graph:
    """Return `graph`, which has no use groups, with `groups`.

    Versions, storages, saved tensors and steps of `graph` keep their ids. Ops and moments move up by the runs
    that are inserted before them.
    """
    return with_runs(graph, groups) if groups else graph


def with_runs(graph: Graph, groups: Mapping[OpId, tuple[int, ...]]) -> Graph:
    """Return `graph` with runs of these ops.

    Args:
        graph: without runs.
        groups: by op, the position of the latest use that each run serves, the latest first. A negative
            position belongs to no op: saved tensors and runs name it.
    """
    new_id, moved = _with_room(graph, (len(groups.get(op.id, (op.id,))) for op in graph.ops))
    ops: list[Op] = []
    versions, storages = list(moved.versions), list(moved.storages)
    rerun: dict[tuple[VersionId, int], StorageVersion] = {}  # what later runs write, by position
    for op in graph.ops:
        latest = [new_id[position] if position >= 0 else position for position in groups.get(op.id, (-1,))]
        ops.append(replace(op, id=new_id[op.id], latest_use=latest[0]))
        for k, position in enumerate(latest[1:], start=2):
            run, writes = OpId(len(ops)), []
            for w in op.writes:
                over, previous = graph.versions[w].previous, None
                if over is not None and (over, position) in rerun:  # it writes in place again
                    written = rerun[over, position]
                    storage, previous = storages[written.storage], written.id
                else:
                    storage = Storage(StorageId(len(storages)), graph.nbytes(w), Moment(0), ())
                    storages.append(storage)
                value = StorageVersion(VersionId(len(versions)), run, storage.id, previous, (), ())
                storages[storage.id] = replace(storage, versions=(*storage.versions, value.id))
                versions.append(value)
                writes.append(value.id)
                rerun[w, position] = value
            ops.append(
                replace(
                    op,
                    id=run,
                    name=f"{op.name}@{k}",
                    reads=(),
                    writes=tuple(writes),
                    runtime_us=0.0,  # forward does not run it
                    rerun_us=op.recompute_us,
                    extra_bytes=0,
                    must_recompute=False,
                    latest_use=position,
                )
            )
    inserted = replace(
        moved,
        ops=tuple(ops),
        versions=tuple(versions),
        storages=tuple(storages),
        runs=tuple(
            tuple(OpId(new_id[op] + k) for k in range(len(latest))) for op, latest in sorted(groups.items())
        ),
    )
    return _assigned(inserted, inserted.runs)


def _with_room(graph: Graph, places: Iterable[int]) -> tuple[list[OpId], Graph]:
    """Return ids for the ops of `graph` that leave room for more ops, and `graph` with these ids.

    The new ids are everywhere but in the ops. Versions, storages, saved tensors and steps keep their ids.

    Args:
        places: by op, how many ids to reserve, its own included.
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
        forward_ends=tuple(map(moment, graph.forward_ends)),
        saved_tensors=tuple(
            replace(h, packed=new_id[h.packed - 1] + 1 if h.packed else 0, dropped=moment(h.dropped))
            for h in graph.saved_tensors
        ),
    )


def later_runs(graph: Graph) -> frozenset[OpId]:
    """Return the runs that only backward does: all but the first of each op with use groups."""
    return frozenset(run for row in graph.runs for run in row[1:])


def joined(graph: Graph, save_set: SaveSet) -> Graph:
    """Return `graph` with the uses of each saved run given to the run before it, whose outputs are kept.

    The runs that are left over have no uses and read nothing.
    """
    if not graph.runs:
        return graph
    return _assigned(
        graph,
        [
            [row[0], *(run for run in row[1:] if run not in save_set and row[0] not in save_set)]
            for row in graph.runs
        ],
    )


def _assigned(graph: Graph, serving: Sequence[Sequence[OpId]]) -> Graph:
    """Return `graph` with all uses of ops with use groups given to the runs in `serving`.

    Args:
        graph: its present assignment of uses does not matter.
        serving: by op with use groups, in the order of `graph.runs`: the runs that serve uses.
    """
    first_of: dict[OpId, OpId] = {}  # by run
    original: dict[VersionId, VersionId] = {}  # by version of a run: that of the first run
    outputs: dict[VersionId, list[tuple[int, VersionId]]] = {}  # by original: latest use and version of runs
    for row, runs in zip(graph.runs, serving, strict=True):
        for run in row:
            first_of[run] = row[0]
            original.update(zip(graph.ops[run].writes, graph.ops[row[0]].writes, strict=True))
        for i, w in enumerate(graph.ops[row[0]].writes):
            outputs[w] = [(graph.ops[run].latest_use, graph.ops[run].writes[i]) for run in runs]

    def version_at(v: VersionId, position: int) -> VersionId:
        if v not in original:
            return v
        first, *others = outputs[original[v]]
        return next((w for latest, w in reversed(others) if latest >= position), first[1])

    ops, versions, saved_tensors = list(graph.ops), list(graph.versions), list(graph.saved_tensors)
    touched = set(first_of) | {r for v in original for r in versions[v].readers}
    readers: dict[VersionId, set[OpId]] = {v: set() for v in original}
    for v in {v for op in touched for v in ops[op].reads} - set(original):
        readers[v] = set(versions[v].readers) - touched
    rows = {row[0]: (row, runs) for row, runs in zip(graph.runs, serving, strict=True)}
    for op in {first_of.get(op, op) for op in touched}:
        reads = ops[op].reads
        row, runs = rows.get(op, ((op,), (op,)))
        for run in row:
            position = ops[run].latest_use if op in rows else run
            mine = tuple(dict.fromkeys(version_at(v, position) for v in reads)) if run in runs else ()
            ops[run] = replace(ops[run], reads=mine)
            for v in mine:
                readers[v].add(run)
    packed: dict[VersionId, list[SavedTensorId]] = {v: [] for v in original}
    for v in original:
        for h in graph.versions[v].saved_tensors:
            now = version_at(v, saved_tensors[h].position)
            saved_tensors[h] = replace(saved_tensors[h], version=now)
            packed[now].append(h)
    for v, reading in readers.items():
        versions[v] = replace(versions[v], readers=tuple(sorted(reading)))
    for v, handles in packed.items():
        versions[v] = replace(versions[v], saved_tensors=tuple(sorted(handles)))
    return replace(graph, ops=tuple(ops), versions=tuple(versions), saved_tensors=tuple(saved_tensors))
