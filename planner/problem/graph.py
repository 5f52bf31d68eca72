"""The problem to solve: ops, versions of storages, saved tensors and backward steps, as plain values.

`build` reads a Profile. Everything else in the planner reads the Graph, so a test can write one by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NewType

from autoac.planner.errors import ConflictingPins
from autoac.planner.formats.profile import PINNED, OpFlag, Profile

OpId = NewType("OpId", int)
"""Position of an op in forward order."""
ValueId = NewType("ValueId", int)
"""One version of one storage: what an op wrote."""
StorageId = NewType("StorageId", int)
"""Memory that a forward op allocated."""
HandleId = NewType("HandleId", int)
"""One saved tensor, as autograd packed it."""
StepId = NewType("StepId", int)
"""Position in backward."""
Moment = NewType("Moment", int)
"""Forward op `i` is moment `i`; backward step `j` is moment `n_ops + j`; then comes the end."""

SaveSet = frozenset[OpId]
"""Ops whose outputs are kept from forward for as long as backward may need them."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call of the forward pass."""

    id: OpId
    name: str  # "layers.3.mlp/aten.mm.default#1"
    reads: tuple[ValueId, ...]  # distinct; all written by earlier ops
    writes: tuple[ValueId, ...]
    runtime_us: float
    workspace: int  # bytes that the kernel holds beside its outputs
    other: int  # bytes live in forward at this op that belong to no storage of the graph
    must_save: str  # why the planner may not drop its outputs; "" if it may
    must_recompute: bool = False  # the user insists that its outputs are not saved
    replay_us: float = 0.0  # what running it again takes beside its run time

    @property
    def recompute_us(self) -> float:
        """Time, in microseconds, that running the op again takes."""
        return self.runtime_us + self.replay_us


@dataclass(frozen=True, slots=True)
class Value:
    """One version of a storage."""

    id: ValueId
    op: OpId  # who wrote it
    storage: StorageId
    previous: ValueId | None  # the version it was written over; None if the op allocated the storage
    readers: tuple[OpId, ...]
    handles: tuple[HandleId, ...]  # saved tensors that show it
    carries: bool = (
        False  # a saved tensor that was packed of an older version is read off this or a newer one
    )


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that a forward op allocates."""

    id: StorageId
    nbytes: int
    released: Moment  # first moment at which neither Python nor forward holds it
    values: tuple[ValueId, ...]  # its versions, oldest first


@dataclass(frozen=True, slots=True)
class Handle:
    """One saved tensor."""

    id: HandleId
    value: ValueId
    packed: int  # ops that had started
    unpacked: tuple[StepId, ...]
    dropped: Moment  # first moment at which autograd holds it no more


@dataclass(frozen=True, slots=True)
class Step:
    """A stretch of backward: unpacks, then work, then releases."""

    id: StepId
    name: str
    unpacks: tuple[HandleId, ...]
    drops: tuple[HandleId, ...]  # released at its end
    runtime_us: float
    other: int  # gradients and temporaries, in bytes, while it unpacks
    peak: int  # the most of them while it works


@dataclass(frozen=True, slots=True)
class Graph:
    """One training step, at the level of storages."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    handles: tuple[Handle, ...]
    steps: tuple[Step, ...]
    static_bytes: int  # parameters, buffers, gradients before the step, optimizer state, the batch
    closing_bytes: int  # gradients and the optimizer's own, at optimizer.step()
    others: int = 0  # microbatches beside this one, each holding what this one holds after forward

    @property
    def end(self) -> Moment:
        """The moment after the last backward step."""
        return Moment(len(self.ops) + len(self.steps))

    @property
    def everything(self) -> SaveSet:
        """The save set that recomputes nothing but what must be."""
        return frozenset(op.id for op in self.ops if not op.must_recompute)

    @property
    def must_save(self) -> SaveSet:
        """Ops that every save set includes."""
        return frozenset(op.id for op in self.ops if op.must_save)

    def nbytes(self, value: ValueId) -> int:
        """Bytes of the storage that `value` is a version of."""
        return self.storages[self.values[value].storage].nbytes

    def moment_name(self, moment: int) -> str:
        """Where `moment` is, in words."""
        if moment < len(self.ops):
            return f"{self.ops[moment].name}, forward"
        if moment < self.end:
            return f"{self.steps[moment - len(self.ops)].name}, backward step {moment - len(self.ops)}"
        return "optimizer step"


def build(profile: Profile) -> Graph:
    """The graph of a profile.

    An op's `must_save` is the profile's reason. The planner treats a value that is overwritten in place
    while something else still reads it as any other; the runtime keeps a private copy of it where the
    save set asks for that (see `schedule`).

    Raises:
        ConflictingPins: the user has an op saved and one that writes over its output run again.
    """
    n = len(profile.ops)
    writes: list[list[ValueId]] = [[] for _ in range(n)]
    readers: list[list[OpId]] = [[] for _ in range(len(profile.values))]
    handles_of: list[list[HandleId]] = [[] for _ in range(len(profile.values))]
    versions: list[list[ValueId]] = [[] for _ in range(len(profile.storages))]
    for v, (op, storage) in enumerate(zip(profile.values.op, profile.values.storage, strict=True)):
        writes[op].append(ValueId(v))
        versions[storage].append(ValueId(v))
    reads = [tuple(ValueId(v) for v in dict.fromkeys(row)) for row in profile.ops.reads.rows()]
    for op, row in enumerate(reads):
        for v in row:
            readers[v].append(OpId(op))

    unpacked: list[list[StepId]] = [[] for _ in range(len(profile.saved))]
    step_unpacks = profile.backward.unpacks.rows()
    for j, step_row in enumerate(step_unpacks):
        for h in step_row:
            unpacked[h].append(StepId(j))
    drops: list[list[HandleId]] = [[] for _ in range(len(profile.backward))]
    for h, (v, dropped) in enumerate(zip(profile.saved.value, profile.saved.dropped, strict=True)):
        handles_of[v].append(HandleId(h))
        if n < dropped <= n + len(drops):
            drops[dropped - n - 1].append(HandleId(h))

    carrying = set()
    for v, packed in zip(profile.saved.value, profile.saved.packed, strict=True):
        while v >= 0 and profile.values.op[v] >= packed:
            carrying.add(v)
            v = profile.values.previous[v]

    columns = profile.ops
    graph = Graph(
        ops=tuple(
            Op(
                id=OpId(i),
                name=name,
                reads=reads[i],
                writes=tuple(writes[i]),
                runtime_us=columns.runtime_us[i],
                workspace=columns.workspace_nbytes[i],
                other=columns.other_nbytes[i],
                must_save=_must_save(profile, i),
                replay_us=profile.replay_us,
            )
            for i, name in enumerate(profile.keys())
        ),
        values=tuple(
            Value(
                id=ValueId(v),
                op=OpId(profile.values.op[v]),
                storage=StorageId(profile.values.storage[v]),
                previous=ValueId(previous) if previous >= 0 else None,
                readers=tuple(readers[v]),
                handles=tuple(handles_of[v]),
                carries=v in carrying,
            )
            for v, previous in enumerate(profile.values.previous)
        ),
        storages=tuple(
            Storage(StorageId(s), nbytes, Moment(released), tuple(versions[s]))
            for s, (nbytes, released) in enumerate(
                zip(profile.storages.block_nbytes(), profile.storages.released, strict=True)
            )
        ),
        handles=tuple(
            Handle(HandleId(h), ValueId(v), packed, tuple(unpacked[h]), Moment(dropped))
            for h, (v, packed, dropped) in enumerate(
                zip(profile.saved.value, profile.saved.packed, profile.saved.dropped, strict=True)
            )
        ),
        steps=tuple(
            Step(
                id=StepId(j),
                name=profile.nodes[profile.backward.name[j]],
                unpacks=tuple(HandleId(h) for h in step_unpacks[j]),
                drops=tuple(drops[j]),
                runtime_us=profile.backward.runtime_us[j],
                other=profile.backward.other_nbytes[j],
                peak=profile.backward.peak_nbytes[j],
            )
            for j in range(len(profile.backward))
        ),
        static_bytes=profile.static.total,
        closing_bytes=profile.gradient_nbytes + profile.optimizer_workspace_nbytes,
    )
    pinned = [OpId(i) for i, flags in enumerate(columns.flags) if flags & OpFlag.MUST_RECOMPUTE]
    return _run_again(graph, pinned) if pinned else graph


def _run_again(graph: Graph, pinned: Sequence[OpId]) -> Graph:
    """Return `graph` with the ops that the user has run again, and those that must be with them.

    An op that must be saved for a reason of its own stays saved, and so does what must be saved with it, as
    long as the user's word holds for some op of the module.

    Raises:
        ConflictingPins: the user has one of them saved, or others let nothing of a module run again.
    """
    again: set[OpId] = set()
    obeyed: set[str] = set()  # modules
    blocked: dict[str, ConflictingPins] = {}  # by module
    for op in pinned:
        name = graph.ops[op].name
        module = name.rpartition("/")[0]
        together = unsaved_with(graph, op)
        saved = [other for other in together if graph.ops[other].must_save]
        if not saved:
            again.update(together)
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
    return replace(graph, ops=tuple(replace(op, must_recompute=op.id in again) for op in graph.ops))


def _must_save(profile: Profile, op: int) -> str:
    reason = profile.ops.must_save[op]
    if reason >= 0:
        return profile.reasons[reason]
    return "collective" if profile.ops.flags[op] & OpFlag.COLLECTIVE else ""


def closed(graph: Graph, save_set: SaveSet) -> SaveSet:
    """`save_set` with the ops that are saved whether or not it names them.

    Those that must be, and those that write in place over a saved value and make nothing else: the old
    version is gone, so the new one is kept in its place. Where the new version carries a saved tensor of the
    old one, the old one is saved with it as well. Those that must be run again are left out.
    """
    result = {op for op in save_set | graph.must_save if not graph.ops[op].must_recompute}
    for value in reversed(graph.values):
        if value.carries and value.previous is not None and value.op in result:
            result.add(graph.values[value.previous].op)
    for op in graph.ops:
        if op.id not in result and op.writes:
            previous = [graph.values[w].previous for w in op.writes]
            if all(p is not None and graph.values[p].op in result for p in previous):
                result.add(op.id)
    return frozenset(result)


def carried_over(graph: Graph, op: Op) -> Iterator[OpId]:
    """Yield the ops over whose outputs `op` writes where a saved tensor does not show them (`carries`)."""
    for w in op.writes:
        value = graph.values[w]
        if value.carries and value.previous is not None:
            yield graph.values[value.previous].op


def unsaved_with(graph: Graph, op: OpId) -> list[OpId]:
    """Return `op` and the ops that must not be saved if it is not to be (`closed`).

    An op that only writes over saved values is saved with them. So these are the ops that made what `op`
    writes over, if it makes nothing else; those that write over its outputs and carry their saved tensors;
    and so on.
    """
    together = [op]
    for link in together:  # which grows
        previous = [graph.values[w].previous for w in graph.ops[link].writes]
        others = [graph.values[p].op for p in previous if p is not None] if None not in previous else []
        readers = (r for w in graph.ops[link].writes for r in graph.values[w].readers)
        others += [r for r in readers if link in carried_over(graph, graph.ops[r])]
        together += [other for other in dict.fromkeys(others) if other not in together]
    return together


def because_of(graph: Graph, op: OpId, reason: str) -> str:
    """Return `reason` in words, with the name of the op that it is the reason of."""
    return f"{reason} (of {graph.ops[op].name}, whose memory it shares)"


def needed(graph: Graph, save_set: SaveSet) -> list[bool]:
    """Which ops of the recompute set a full backward runs again, by op.

    An op is run when an unpack needs one of its outputs, or an op that is run reads one. Ops that must
    be saved count as saved.
    """
    return _asked_for(graph, save_set, [bool(handle.unpacked) for handle in graph.handles])


def wanted(graph: Graph, save_set: SaveSet) -> list[bool]:
    """Which ops of the recompute set backward may ask for when it begins, by op.

    More than `needed` by what only saved tensors that are never unpacked ask for.
    """
    return _asked_for(graph, save_set, [handle.dropped > len(graph.ops) for handle in graph.handles])


def _asked_for(graph: Graph, save_set: SaveSet, by_handle: Sequence[bool]) -> list[bool]:
    run = [False] * len(graph.ops)
    save_set = closed(graph, save_set)
    for op in reversed(graph.ops):
        if op.id in save_set:
            continue
        run[op.id] = any(
            any(by_handle[h] for h in graph.values[w].handles)
            or any(run[reader] for reader in graph.values[w].readers)
            for w in op.writes
        )
    return run


def normalised(graph: Graph, ops: Iterable[OpId]) -> SaveSet:
    """`ops` and all that must be saved, and every op that would not be run again anyway.

    Saving an op that nothing needs costs nothing as a rule: the runtime holds a value only if autograd
    packed it or an op of the recompute set reads it. The exception is a value that is held for a saved
    tensor that is dropped without having been unpacked; so the planner tries both.
    """
    save_set = frozenset(ops) | graph.must_save
    run = wanted(graph, save_set)
    return (save_set | frozenset(op.id for op in graph.ops if not run[op.id])) & graph.everything


def chain(*nbytes: int, runtime_us: Sequence[float] | None = None, static_bytes: int = 0) -> Graph:
    """A chain in which op `i` allocates `nbytes[i]`, reads op `i - 1`, and backward reads every output.

    Backward runs from the last op to the first; its step `j` unpacks the output of op `n - 1 - j` and
    drops it. Python holds an output until the next op has run. For documentation and tests.
    """
    n = len(nbytes)
    times = list(runtime_us) if runtime_us is not None else [1.0] * n
    return Graph(
        ops=tuple(
            Op(OpId(i), f"op{i}", (ValueId(i - 1),) if i else (), (ValueId(i),), times[i], 0, 0, "")
            for i in range(n)
        ),
        values=tuple(
            Value(
                ValueId(i), OpId(i), StorageId(i), None, (OpId(i + 1),) if i + 1 < n else (), (HandleId(i),)
            )
            for i in range(n)
        ),
        storages=tuple(
            Storage(StorageId(i), size, Moment(min(i + 2, n)), (ValueId(i),)) for i, size in enumerate(nbytes)
        ),
        handles=tuple(
            Handle(HandleId(i), ValueId(i), i + 1, (StepId(n - 1 - i),), Moment(2 * n - i)) for i in range(n)
        ),
        steps=tuple(
            Step(StepId(j), f"step{j}", (HandleId(n - 1 - j),), (HandleId(n - 1 - j),), 1.0, 0, 0)
            for j in range(n)
        ),
        static_bytes=static_bytes,
        closing_bytes=0,
    )
