"""Add a third way to hold a version: packed without loss, such as a dropout mask as one bit per element.

NOTE [ Packing ]

A version that can be packed gets two ops after the op that writes it. In forward, `@bits` packs it. In
backward, `@unpack` restores it for all its uses. For a dropout mask on a CPU:

    forward      5: mask = div_    6: bits = div_@bits     7: mask' = div_@unpack     8: mul reads mask'
    backward                       bits are still held     runs, and mask' is freed after its last use

In the graph with both ops, all uses of the mask are uses of mask', and mask' takes over the memory of the
mask in forward. A save set says what happens:

- {@bits}: the mask is saved packed. `@unpack` runs in backward; it carries the time of packing as well.
- {@unpack}, also with `@bits`: the mask itself is saved. Then `div_` counts as saved, and the reverse.
- Neither: the mask is recomputed by `div_`, and nothing is packed.

`resolved` takes back the ops of masks that are not saved packed. Its result has the plain meaning of a graph.
The solver reads the graph as it is, with two exceptions: bits take no memory in backward if they are not
saved, and the time counts where `@bits` is saved (docs/formulation.md, section 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoac.planner.formats.op_key import OpKey
from autoac.planner.problem.graph import (
    Graph,
    Moment,
    Op,
    OpId,
    Packable,
    PackedVersion,
    SaveSet,
    Storage,
    StorageId,
    StorageVersion,
    VersionId,
)
from autoac.planner.problem.inserted_ops import with_room
from autoac.planner.problem.use_groups import later_runs


def worth_packing(graph: Graph) -> tuple[Packable, ...]:
    """Return the versions of `graph` that a plan may save packed.

    Each is the last version of its storage, and the planner decides on the ops that write the storage, which
    write nothing else. All saved tensors of the version are unpacked once, and neither Python nor a saved
    tensor of an older version holds the storage.
    """
    return tuple(packable for packable in graph.packable if _may_pack(graph, packable))


def _may_pack(graph: Graph, packable: Packable) -> bool:
    version = graph.versions[packable.version]
    storage = graph.storages[version.storage]
    saved_tensors = [graph.saved_tensors[h] for h in version.saved_tensors]
    writers = [graph.ops[graph.versions[v].op] for v in storage.versions]
    return (
        packable.nbytes < storage.nbytes
        and all(len(writer.writes) == 1 for writer in writers)
        and not any(graph.versions[v].carries_older_saved_tensor for v in storage.versions)
        and storage.versions[-1] == version.id
        and storage.released < len(graph.ops)
        and bool(saved_tensors)
        and all(len(h.unpacked) == 1 for h in saved_tensors)
        and not any(graph.versions[v].saved_tensors for v in storage.versions[:-1])
        and not any(w.must_save or w.must_recompute or w.compiled for w in writers)
    )


def with_packing(graph: Graph, packable: Sequence[Packable]) -> Graph:
    """Return `graph`, which has no use groups, with the two ops of each of `packable`.

    Versions, storages, saved tensors and steps of `graph` keep their ids. Ops and moments move up by the ops
    that are inserted before them.
    """
    if not packable:
        return graph
    by_op = {graph.versions[p.version].op: p for p in packable}
    new_id, moved = with_room(graph, (3 if op.id in by_op else 1 for op in graph.ops))
    ops: list[Op] = []
    versions, storages = list(moved.versions), list(moved.storages)
    packs = []
    for op in graph.ops:
        ops.append(replace(op, id=new_id[op.id]))
        if (found := by_op.get(op.id)) is None:
            continue
        bits_op, unpack_op = OpId(len(ops)), OpId(len(ops) + 1)
        bits, unpacked = VersionId(len(versions)), VersionId(len(versions) + 1)
        for w, writer, nbytes in (
            (bits, bits_op, found.nbytes),
            (unpacked, unpack_op, graph.nbytes(op.writes[0])),
        ):
            storage = StorageId(len(storages))
            versions.append(StorageVersion(w, writer, storage, None, (), ()))
            storages.append(Storage(storage, nbytes, Moment(bits_op), (w,)))
        blank = replace(ops[-1], runtime_us=0.0, replay_us=0.0, workspace_bytes=0, must_save="")
        name = OpKey.parse(op.name)
        ops.append(replace(blank, id=bits_op, name=_name(name, "bits"), reads=(), writes=(bits,)))
        unpack_us = op.replay_us + found.pack_us + found.unpack_us
        ops.append(
            replace(
                blank,
                id=unpack_op,
                name=_name(name, "unpack"),
                reads=(),
                writes=(unpacked,),
                replay_us=unpack_us,
            )
        )
        packs.append(PackedVersion(found.version, bits_op, unpack_op))
    inserted = replace(
        moved,
        ops=tuple(ops),
        versions=tuple(versions),
        storages=tuple(storages),
        packable=(),
    )
    return replace(_moved(inserted, packs, forth=True), packs=tuple(packs))


def is_packed(pack: PackedVersion, save_set: SaveSet) -> bool:
    """Return True if `save_set` saves the version packed."""
    return pack.bits in save_set and pack.unpack not in save_set


def added_ops(graph: Graph) -> frozenset[OpId]:
    """Return the ops that the model does not have: later runs of use groups, and ops that pack and unpack."""
    return later_runs(graph) | {op for pack in graph.packs for op in (pack.bits, pack.unpack)}


def resolved(graph: Graph, save_set: SaveSet) -> Graph:
    """Return `graph` with the uses of each version given back to it if it is not saved packed.

    The ops to pack and unpack such a version are left with no uses, and read nothing. They are `packs` of the
    result.
    """
    others = [pack for pack in graph.packs if not is_packed(pack, save_set)]
    return replace(_moved(graph, others, forth=False), packs=tuple(others)) if graph.packs else graph


def _moved(graph: Graph, packs: Sequence[PackedVersion], *, forth: bool) -> Graph:
    """Return `graph` with the uses of the versions moved to what `@unpack` writes; or back again."""
    ops, versions = list(graph.ops), list(graph.versions)
    storages, saved_tensors = list(graph.storages), list(graph.saved_tensors)
    for pack in packs:
        (bits,), (unpacked,) = ops[pack.bits].writes, ops[pack.unpack].writes
        old, new = (pack.version, unpacked) if forth else (unpacked, pack.version)
        readers = tuple(r for r in versions[old].readers if r != pack.bits)
        for r in readers:
            reads = tuple(new if v == old else v for v in ops[r].reads)
            ops[r] = replace(ops[r], reads=reads)
        for h in versions[old].saved_tensors:
            saved_tensors[h] = replace(saved_tensors[h], version=new)
        handles = versions[old].saved_tensors
        versions[old] = replace(versions[old], readers=(), saved_tensors=())
        versions[new] = replace(versions[new], readers=readers, saved_tensors=handles)
        ops[pack.bits] = replace(ops[pack.bits], reads=(pack.version,) if forth else ())
        ops[pack.unpack] = replace(ops[pack.unpack], reads=(bits,) if forth else ())
        versions[pack.version] = replace(versions[pack.version], readers=(pack.bits,) if forth else readers)
        versions[bits] = replace(versions[bits], readers=(pack.unpack,) if forth else ())
        # The memory of the version passes on when it is packed; between the two ops no other event happens.
        mine, theirs = versions[pack.version].storage, versions[unpacked].storage
        released = storages[mine if forth else theirs].released
        storages[mine] = replace(storages[mine], released=Moment(pack.bits) if forth else released)
        storages[theirs] = replace(storages[theirs], released=released if forth else Moment(pack.bits))
    return replace(
        graph,
        ops=tuple(ops),
        versions=tuple(versions),
        storages=tuple(storages),
        saved_tensors=tuple(saved_tensors),
    )


def _name(key: OpKey, suffix: str) -> str:
    return str(replace(key, op=f"{key.op}@{suffix}"))
