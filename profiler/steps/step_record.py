"""Hold what is recorded of one profiled step, before it becomes a Profile."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from autoac.planner.formats.profile import CROSSES
from autoac.tape.capture.allocations import AllocatedBlock
from autoac.tape.capture.fake_allocations import Allocations
from autoac.tape.capture.op_recorder import ForwardRecord, RecordedStorage
from autoac.tape.capture.op_timer import OpTime
from autoac.tape.capture.saved_tensor_recorder import SavedTensorRecorder
from autoac.tape.distributed.fsdp import Shards

FREED = "its FSDP unit is freed when backward asks for it"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The records of one profiled step.

    Invariant: every mark in `forward` and `saved` is an index into `times_ns` and `allocations.positions`.
    """

    forward: ForwardRecord
    saved: SavedTensorRecorder
    allocations: Allocations
    times_ns: Sequence[int]  # of each mark
    backward_begin: int  # mark
    graph_end: int  # mark: backward is over, and the graph ends
    backward_end: int  # mark
    pass_ends: Sequence[int] = ()  # marks: where each pass of backward but the last is over
    workspaces: Sequence[AllocatedBlock] = ()  # allocated in this step, and there in the whole of the next
    op_times: Mapping[Hashable, OpTime] = field(default_factory=dict)  # by signature
    unplanned: Sequence[str] = ()  # messages on what decides itself what autograd holds
    temporary: Sequence[RecordedStorage] = ()  # held longer than until the mark, in this step alone
    hidden: Sequence[tuple[int, int]] = ()  # pairs of marks: what is allocated in between counts as nothing
    gradients: Sequence[tuple[int, int]] = ()  # addresses, and marks once backward has added each one up


def force_saves_of_units(record: ForwardRecord, shards: Shards, out_of_reach: Set[int]) -> None:
    """Mark as saved the ops that cannot run again under FSDP: NOTE [ Units ] in distributed/fsdp.py."""
    units = [shards.unit_of(op.module) for op in record.ops]
    for reader, op in enumerate(record.ops):
        for version in op.reads:
            writer = record.versions[version].op
            if units[writer] is not units[reader]:
                record.ops[writer].force_save(CROSSES)
    for writer in out_of_reach:
        record.ops[writer].force_save(FREED)
