"""Build the Graph of a Profile: table rows that refer to each other become plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoac.planner.errors import ConflictingPins
from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.profile import PINNED, RECOMPUTED_OP_US, OpFlag, Profile
from autoac.planner.problem.graph import (
    BackwardStep,
    Graph,
    Moment,
    Op,
    OpId,
    SavedTensor,
    SavedTensorId,
    StepId,
    Storage,
    StorageId,
    StorageVersion,
    VersionId,
)
from autoac.planner.problem.save_sets import because_of, unsaved_with


def build(profile: Profile) -> Graph:
    """Return the graph of a profile.

    The `must_save` of an op is the reason in the profile. A version may be written over in place before an op
    that will be recomputed reads it again. Such a version needs no special treatment here: the runtime holds
    a private copy if the save set needs one (rule b in `schedule.py`).

    Raises:
        ConflictingPins: the user pins an op to be saved, and an op that writes over its output to be
            recomputed.
    """
    n = len(profile.ops)
    ends = profile.forward_ends or (() if profile.loss_begins is None else (profile.loss_begins,))
    writes: list[list[VersionId]] = [[] for _ in range(n)]
    readers: list[list[OpId]] = [[] for _ in range(len(profile.values))]
    saved_tensors_of: list[list[SavedTensorId]] = [[] for _ in range(len(profile.values))]
    versions: list[list[VersionId]] = [[] for _ in range(len(profile.storages))]
    for v, (op, storage) in enumerate(zip(profile.values.op, profile.values.storage, strict=True)):
        writes[op].append(VersionId(v))
        versions[storage].append(VersionId(v))
    reads = [tuple(VersionId(v) for v in dict.fromkeys(row)) for row in profile.ops.reads.rows()]
    for op, row in enumerate(reads):
        for v in row:
            readers[v].append(OpId(op))

    unpacked: list[list[StepId]] = [[] for _ in range(len(profile.saved))]
    step_unpacks = profile.backward.unpacks.rows()
    for j, step_row in enumerate(step_unpacks):
        for h in step_row:
            unpacked[h].append(StepId(j))
    drops: list[list[SavedTensorId]] = [[] for _ in range(len(profile.backward))]
    for h, (v, dropped) in enumerate(zip(profile.saved.value, profile.saved.dropped, strict=True)):
        saved_tensors_of[v].append(SavedTensorId(h))
        if n < dropped <= n + len(drops):
            drops[dropped - n - 1].append(SavedTensorId(h))

    carrying_versions = set()
    for v, packed in zip(profile.saved.value, profile.saved.packed, strict=True):
        while v >= 0 and profile.values.op[v] >= packed:
            carrying_versions.add(v)
            v = profile.values.previous[v]

    columns = profile.ops
    runs_compiled = [bool(flags & OpFlag.COMPILED) for flags in columns.flags]
    hidden = profile.environment.device_type != "cpu"  # a device that runs behind its host hides its time
    graph = Graph(
        ops=tuple(
            Op(
                id=OpId(i),
                name=name,
                reads=reads[i],
                writes=tuple(writes[i]),
                runtime_us=columns.runtime_us[i],
                workspace_bytes=columns.workspace_nbytes[i],
                extra_bytes=columns.other_nbytes[i],
                must_save=_must_save(profile, i),
                rerun_us=None if hidden or runs_compiled[i] else columns.runtime_us[i] + RECOMPUTED_OP_US,
                compiled=runs_compiled[i],
                begins_graph=bool(columns.flags[i] & OpFlag.GRAPH_BEGINS),
            )
            for i, name in enumerate(profile.keys())
        ),
        versions=tuple(
            StorageVersion(
                id=VersionId(v),
                op=OpId(profile.values.op[v]),
                storage=StorageId(profile.values.storage[v]),
                previous=VersionId(previous) if previous >= 0 else None,
                readers=tuple(readers[v]),
                saved_tensors=tuple(saved_tensors_of[v]),
                carries_older_saved_tensor=v in carrying_versions,
            )
            for v, previous in enumerate(profile.values.previous)
        ),
        storages=tuple(
            Storage(StorageId(s), nbytes, Moment(released), tuple(versions[s]))
            for s, (nbytes, released) in enumerate(
                zip(profile.storages.block_nbytes(), profile.storages.released, strict=True)
            )
        ),
        saved_tensors=tuple(
            SavedTensor(
                SavedTensorId(h), VersionId(v), packed, tuple(unpacked[h]), Moment(dropped), Moment(needed)
            )
            for h, (v, packed, dropped, needed) in enumerate(
                zip(
                    profile.saved.value,
                    profile.saved.packed,
                    profile.saved.dropped,
                    profile.saved.needed_until,
                    strict=True,
                )
            )
        ),
        steps=tuple(
            BackwardStep(
                id=StepId(j),
                name=profile.nodes[profile.backward.name[j]],
                unpacks=tuple(SavedTensorId(h) for h in step_unpacks[j]),
                drops=tuple(drops[j]),
                runtime_us=profile.backward.runtime_us[j],
                extra_bytes_while_unpacking=profile.backward.other_nbytes[j],
                extra_bytes_peak=profile.backward.peak_nbytes[j],
            )
            for j in range(len(profile.backward))
        ),
        forward_ends=tuple(map(Moment, ends)),
        static_bytes=profile.static.total,
        closing_bytes=profile.gradient_nbytes + profile.optimizer_workspace_nbytes,
        waiting_microbatches=profile.waiting_microbatches,
        pass_ends=profile.pass_ends,
    )
    pinned = [OpId(i) for i, flags in enumerate(columns.flags) if flags & OpFlag.MUST_RECOMPUTE]
    return _with_must_recompute(graph, pinned) if pinned else graph


def needed_until(profile: Profile) -> dict[OpId, Moment]:
    """Return the ops whose outputs a backward inside of forward unpacks, and the moment until which it does.

    A saved tensor counts as one of the newest version in which its bytes are unchanged. It may be read off
    any version since it was packed.
    """
    saved, values = profile.saved, profile.values
    until: dict[OpId, Moment] = {}
    for v, packed, moment in zip(saved.value, saved.packed, saved.needed_until, strict=True):
        while moment and v >= 0:
            op = OpId(values.op[v])
            if op < moment:
                until[op] = Moment(max(moment, until.get(op, 0)))
            v = values.previous[v] if op >= packed else -1
    return until


def _with_must_recompute(graph: Graph, pinned: Sequence[OpId]) -> Graph:
    """Return `graph` with `must_recompute` set for the pinned ops and the ops that go with them.

    An op that must be saved for a reason of its own stays saved, and so do the ops that must be saved with
    it. This is an error only if no op of the module can be recomputed.

    Raises:
        ConflictingPins: the user pins one of the ops to be saved, or no op of a module can be recomputed.
    """
    must_recompute: set[OpId] = set()
    obeyed: set[str] = set()  # modules with at least one op to recompute
    blocked: dict[str, ConflictingPins] = {}  # the first conflict of each module
    for op in pinned:
        name = graph.ops[op].name
        module = OpKey.parse(name).module
        together = unsaved_with(graph, op)
        saved = [other for other in together if graph.ops[other].must_save]
        if not saved:
            must_recompute.update(together)
            obeyed.add(module)
            continue
        others = sorted((o for o in saved if o != op), key=lambda o: graph.ops[o].must_save != PINNED)
        if others:
            why = because_of(graph, others[0], graph.ops[others[0]].must_save)
            blocked.setdefault(module, ConflictingPins(name, "pinned must_recompute", why))
            if graph.ops[others[0]].must_save == PINNED:
                raise blocked[module]
    for module, conflict in blocked.items():
        if module not in obeyed:
            raise conflict
    return replace(graph, ops=tuple(replace(op, must_recompute=op.id in must_recompute) for op in graph.ops))


def _must_save(profile: Profile, op: int) -> str:
    reason = profile.ops.must_save[op]
    if reason >= 0:
        return profile.reasons[reason]
    return "collective" if profile.ops.flags[op] & OpFlag.COLLECTIVE else ""
