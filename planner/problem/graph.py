"""Define the Graph: ops, storages and their versions, saved tensors and backward steps, as plain values.

`build` makes a Graph from a Profile. The rest of the planner reads Graphs, so a test can write one by hand.
Tests check the invariants below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NewType

from autoac.planner.errors import OPTIMIZER_STEP

OpId = NewType("OpId", int)
"""Position of an op in forward order."""
VersionId = NewType("VersionId", int)
"""Position of a storage version in the order in which ops write them."""
StorageId = NewType("StorageId", int)
"""Position of a storage that a forward op allocated."""
SavedTensorId = NewType("SavedTensorId", int)
"""Position of a saved tensor in the order in which autograd packed them."""
StepId = NewType("StepId", int)
"""Position of a step in backward."""
Moment = NewType("Moment", int)
"""A position in the step: `i` for forward op `i`, `n_ops + j` for backward step `j`, then the end."""

SaveSet = frozenset[OpId]
"""Ops whose outputs are held from forward for as long as backward may need them."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call of the forward pass.

    Invariant: every version in `reads` was written by an op with a smaller id.
    """

    id: OpId
    name: str  # "layers.3.mlp/aten.mm.default#1"
    reads: tuple[VersionId, ...]  # distinct
    writes: tuple[VersionId, ...]
    runtime_us: float
    workspace_bytes: int  # most that the kernel holds in addition to its outputs
    extra_bytes: int  # live in forward at this op, but not in a storage of the graph
    must_save: str  # the reason why the op must not be recomputed; "" if it may be
    must_recompute: bool = False  # the user pinned the op: its outputs are not saved
    rerun_us: float | None = None  # the time of a recompute; None: `runtime_us`, as it runs the kernel
    compiled: bool = False  # part of a compiled graph (rule h in schedule.py)
    begins_graph: bool = False  # the first op of a call of a compiled graph
    latest_use: int = -1  # position of the latest use that a run serves, if the op has use groups

    @property
    def recompute_us(self) -> float:
        """Return the time, in microseconds, that running the op again takes."""
        return self.runtime_us if self.rerun_us is None else self.rerun_us


@dataclass(frozen=True, slots=True)
class StorageVersion:
    """The contents of a storage between two in-place writes.

    Invariant: `op` reads `previous`, which is a version of the same storage.
    """

    id: VersionId
    op: OpId  # the op that wrote the version
    storage: StorageId
    previous: VersionId | None  # the version that `op` wrote over; None if `op` allocated the storage
    readers: tuple[OpId, ...]
    saved_tensors: tuple[SavedTensorId, ...]
    # True if autograd packed a tensor before `op` ran and `op` did not change the bytes of that tensor. The
    # tensor counts as a saved tensor of this version, or of a newer one.
    carries_older_saved_tensor: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that a forward op allocates.

    Invariant: each version but the first was written over the one before it.
    """

    id: StorageId
    nbytes: int
    released: Moment  # first moment at which neither Python nor forward holds the storage
    versions: tuple[VersionId, ...]  # oldest first


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that autograd holds for backward.

    Invariant: autograd drops the tensor after the last step that unpacks it.
    """

    id: SavedTensorId
    version: VersionId
    packed: int  # the number of ops that had started when autograd packed the tensor
    unpacked: tuple[StepId, ...]
    dropped: Moment  # first moment at which autograd no longer holds the tensor
    needed_until: Moment = Moment(0)  # of a backward inside of forward: the first moment after it; 0: none
    of_pass: int = -1  # the pass of backward in which it counts (passes.py); -1: the only one

    @property
    def position(self) -> int:
        """Return the position of its use, which says what run of an op serves it (use_groups.py)."""
        return self.packed - 1 if self.of_pass < 0 else pass_position(self.of_pass)


def pass_position(number: int) -> int:
    """Return the position of all uses in a pass of backward. Those of later passes are smaller."""
    return -2 - number


@dataclass(frozen=True, slots=True)
class BackwardStep:
    """A part of backward: unpacks, then work, then releases.

    Invariant: the tensors in `drops` are dropped at the moment after the step.
    """

    id: StepId
    name: str
    unpacks: tuple[SavedTensorId, ...]
    drops: tuple[SavedTensorId, ...]  # saved tensors that autograd drops at the end of the step
    runtime_us: float
    extra_bytes_while_unpacking: int  # gradients and temporaries that are live during the unpacks
    extra_bytes_peak: int  # most gradients and temporaries live while the step works


@dataclass(frozen=True)  # no slots: what is the same under all save sets is computed once
class Graph:
    """One training step, at the level of storages.

    Invariant: each part has its position as its id, and references between parts hold in both directions.
    """

    ops: tuple[Op, ...]
    versions: tuple[StorageVersion, ...]
    storages: tuple[Storage, ...]
    saved_tensors: tuple[SavedTensor, ...]
    steps: tuple[BackwardStep, ...]
    static_bytes: int  # parameters, buffers, gradients before the step, optimizer state, the batch
    closing_bytes: int  # gradients of the step and the optimizer's temporaries, at optimizer.step()
    waiting_microbatches: int = (
        0  # other microbatches in flight; each holds what this one holds after forward
    )
    runs: tuple[tuple[OpId, ...], ...] = ()  # of each op with use groups; see use_groups.py
    pass_ends: tuple[int, ...] = ()  # steps up to the end of each pass of backward but the last (passes.py)
    by_pass: bool = False  # runs are of passes of backward: what one makes is gone before the next
    forward_ends: tuple[Moment, ...] = ()  # after each forward of the model; (): all ops are one forward

    @property
    def end(self) -> Moment:
        """Return the moment after the last backward step."""
        return Moment(len(self.ops) + len(self.steps))

    @property
    def model_end(self) -> Moment:
        """Return the moment after the last op that the model's forwards run."""
        return self.forward_ends[-1] if self.forward_ends else Moment(len(self.ops))

    def forward_end(self, op: OpId) -> Moment:
        """Return the moment after the model's forward that `op` is in; for an op of the loss, the last."""
        return next((end for end in self.forward_ends if op < end), self.model_end)

    @property
    def everything(self) -> SaveSet:
        """Return the save set that recomputes only what must be recomputed."""
        return frozenset(op.id for op in self.ops if not op.must_recompute)

    @cached_property
    def must_save(self) -> SaveSet:
        """Return the ops that every save set includes."""
        return frozenset(op.id for op in self.ops if op.must_save)

    def nbytes(self, version: VersionId) -> int:
        """Return the bytes of the storage that `version` belongs to."""
        return self.nbytes_of_versions[version]

    @cached_property
    def nbytes_of_versions(self) -> tuple[int, ...]:
        """Return for each version the bytes of its storage."""
        return tuple(self.storages[value.storage].nbytes for value in self.versions)

    @cached_property
    def fresh_bytes(self) -> tuple[int, ...]:
        """Return for each op the bytes of the storages that it allocates."""
        return tuple(
            sum(self.nbytes(w) for w in op.writes if self.versions[w].previous is None) for op in self.ops
        )

    @cached_property
    def dropped(self) -> tuple[int, ...]:
        """Return for each version the moment at which its last saved tensor is dropped, 0 if it has none."""
        return tuple(
            max((self.saved_tensors[h].dropped for h in value.saved_tensors), default=0)
            for value in self.versions
        )

    @cached_property
    def saved_tensors_in_backward(self) -> tuple[int, ...]:
        """Return for each version how many of its saved tensors are dropped in backward, not before."""
        n = len(self.ops)
        return tuple(
            sum(self.saved_tensors[h].dropped > n for h in value.saved_tensors) for value in self.versions
        )

    @cached_property
    def in_forward_until(self) -> tuple[int, ...]:
        """Return for each version the moment until which its forward holds it."""
        ends = self.forward_ends[:-1]  # of regions; that of the last may include ops of the loss
        until = [
            min(self.storages[value.storage].released, next((e for e in ends if value.op < e), len(self.ops)))
            for value in self.versions
        ]
        for value in self.versions:
            if value.previous is not None:
                until[value.previous] = value.op
        return tuple(until)

    def moment_name(self, moment: int) -> str:
        """Return text for `moment`, such as "layers.3.mlp/aten.mm.default#1, forward"."""
        if moment < len(self.ops):
            return f"{self.ops[moment].name}, forward"
        if moment < self.end:
            return f"{self.steps[moment - len(self.ops)].name}, backward step {moment - len(self.ops)}"
        return OPTIMIZER_STEP
