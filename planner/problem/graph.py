"""The problem to solve: ops, versions of storages, saved tensors and backward steps, as plain values.

`build` reads a Profile. Everything else in the planner reads the Graph, so a test can write one by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

OpId = NewType("OpId", int)
"""Position of an op in forward order."""
VersionId = NewType("VersionId", int)
"""One version of one storage: what an op wrote."""
StorageId = NewType("StorageId", int)
"""Memory that a forward op allocated."""
SavedTensorId = NewType("SavedTensorId", int)
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
    reads: tuple[VersionId, ...]  # distinct; all written by earlier ops
    writes: tuple[VersionId, ...]
    runtime_us: float
    workspace_bytes: int  # what the kernel holds in addition to its outputs while it runs
    extra_bytes: int  # live in forward at this op, in no storage of the graph
    must_save: str  # why the planner may not drop its outputs; "" if it may
    must_recompute: bool = False  # the user insists that its outputs are not saved
    replay_us: float = 0.0  # what running it again takes beside its run time

    @property
    def recompute_us(self) -> float:
        """Time, in microseconds, that running the op again takes."""
        return self.runtime_us + self.replay_us


@dataclass(frozen=True, slots=True)
class StorageVersion:
    """One version of a storage."""

    id: VersionId
    op: OpId  # who wrote it
    storage: StorageId
    previous: VersionId | None  # the version it was written over; None if the op allocated the storage
    readers: tuple[OpId, ...]
    saved_tensors: tuple[SavedTensorId, ...]  # those that show it
    carries_older_saved_tensor: bool = (
        False  # a saved tensor that was packed of an older version is read off this or a newer one
    )


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that a forward op allocates."""

    id: StorageId
    nbytes: int
    released: Moment  # first moment at which neither Python nor forward holds it
    versions: tuple[VersionId, ...]  # oldest first


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One saved tensor."""

    id: SavedTensorId
    version: VersionId
    packed: int  # ops that had started
    unpacked: tuple[StepId, ...]
    dropped: Moment  # first moment at which autograd holds it no more


@dataclass(frozen=True, slots=True)
class BackwardStep:
    """A stretch of backward: unpacks, then work, then releases."""

    id: StepId
    name: str
    unpacks: tuple[SavedTensorId, ...]
    drops: tuple[SavedTensorId, ...]  # released at its end
    runtime_us: float
    extra_bytes_while_unpacking: int  # gradients and temporaries
    extra_bytes_peak: int  # the most of them while the step works


@dataclass(frozen=True, slots=True)
class Graph:
    """One training step, at the level of storages."""

    ops: tuple[Op, ...]
    versions: tuple[StorageVersion, ...]
    storages: tuple[Storage, ...]
    saved_tensors: tuple[SavedTensor, ...]
    steps: tuple[BackwardStep, ...]
    static_bytes: int  # parameters, buffers, gradients before the step, optimizer state, the batch
    closing_bytes: int  # gradients and the optimizer's own, at optimizer.step()
    waiting_microbatches: int = 0  # others in flight; each holds what this one holds after forward

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

    def nbytes(self, value: VersionId) -> int:
        """Bytes of the storage that `value` is a version of."""
        return self.storages[self.versions[value].storage].nbytes

    def moment_name(self, moment: int) -> str:
        """Where `moment` is, in words."""
        if moment < len(self.ops):
            return f"{self.ops[moment].name}, forward"
        if moment < self.end:
            return f"{self.steps[moment - len(self.ops)].name}, backward step {moment - len(self.ops)}"
        return "optimizer step"


def chain(*nbytes: int, runtime_us: Sequence[float] | None = None, static_bytes: int = 0) -> Graph:
    """A chain in which op `i` allocates `nbytes[i]`, reads op `i - 1`, and backward reads every output.

    Backward runs from the last op to the first; its step `j` unpacks the output of op `n - 1 - j` and
    drops it. Python holds an output until the next op has run. For documentation and tests.
    """
    n = len(nbytes)
    times = list(runtime_us) if runtime_us is not None else [1.0] * n
    return Graph(
        ops=tuple(
            Op(OpId(i), f"op{i}", (VersionId(i - 1),) if i else (), (VersionId(i),), times[i], 0, 0, "")
            for i in range(n)
        ),
        versions=tuple(
            StorageVersion(
                VersionId(i),
                OpId(i),
                StorageId(i),
                None,
                (OpId(i + 1),) if i + 1 < n else (),
                (SavedTensorId(i),),
            )
            for i in range(n)
        ),
        storages=tuple(
            Storage(StorageId(i), size, Moment(min(i + 2, n)), (VersionId(i),))
            for i, size in enumerate(nbytes)
        ),
        saved_tensors=tuple(
            SavedTensor(SavedTensorId(i), VersionId(i), i + 1, (StepId(n - 1 - i),), Moment(2 * n - i))
            for i in range(n)
        ),
        steps=tuple(
            BackwardStep(
                StepId(j), f"step{j}", (SavedTensorId(n - 1 - j),), (SavedTensorId(n - 1 - j),), 1.0, 0, 0
            )
            for j in range(n)
        ),
        static_bytes=static_bytes,
        closing_bytes=0,
    )
