"""Read the allocator's record of a stretch of code: each block from its allocation to its free, with marks.

A *position* is an index into the list of changes: how many allocations and frees came before it.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from autoac.tape.capture.garbage_collection import frozen_heap, no_garbage_collection
from autoac.tape.capture.op_recorder import RecordedStorage
from autoac.tape.capture.op_timer import Clock, clock_of
from autoac.tape.errors import CannotProfile
from autoac.tape.torch_facts.torch_trace import (
    AllocationEvent,
    MarkEvent,
    NodeEvent,
    TorchTrace,
    profiler_is_running,
)


@dataclass(slots=True, eq=False)
class AllocatedBlock:
    """One allocation on the profiled device."""

    address: int
    nbytes: int
    allocated_at: int  # position
    freed_at: int | None = None  # position; None: it outlived the record


class Change(NamedTuple):
    """A change of the allocated bytes: one allocation, or one free."""

    block: AllocatedBlock
    nbytes: int  # negative: a free


class BlockRecord(Protocol):
    """The part of a record of allocations that tells of blocks."""

    changes: list[Change]  # every allocation and free, in order
    positions: list[int]  # of each mark


def allocated_between(record: BlockRecord, first: int, last: int) -> list[AllocatedBlock]:
    """Return the blocks that are allocated between two marks."""
    changes = record.changes[record.positions[first] : record.positions[last]]
    return [change.block for change in changes if change.nbytes > 0]


def peaks_nbytes(record: BlockRecord, mark: int) -> tuple[int, int]:
    """Return the most bytes in use until and since `mark`, above those as the record began."""
    live = list(itertools.accumulate((change.nbytes for change in record.changes), initial=0))
    position = record.positions[mark]
    return max(live[: position + 1]), max(live[position:])


def freed_between(record: BlockRecord, first: int, last: int) -> list[AllocatedBlock]:
    """Return the blocks that are live at mark `first` and no longer at mark `last`."""
    begin, end = record.positions[first], record.positions[last]
    freed = (change.block for change in record.changes[begin:end] if change.nbytes < 0)
    return [block for block in freed if block.allocated_at < begin]


class AllocationRecord:
    """Record the allocations of a with-block. Call `mark()` inside it, and read the rest after it.

    Attributes:
        changes: every allocation and free, in order.
        positions: the position of each mark.
        times_ns: the time of each mark on `clock`, which stands still while a mark is placed.
        functions: of each node of autograd, where its function begins and has returned, if `nodes`.

    Raises:
        ProfilerBusy: another profiler is running on this thread.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None, *, nodes: bool = False) -> None:
        self._device = device
        self._clock = clock or clock_of(device)
        self._marks = 0
        self._open = False
        # Threads of backward place marks too, and a finalizer may do so while its thread places one.
        self._lock = threading.RLock()
        self._trace = TorchTrace(device, nodes=nodes)
        self._heap = ExitStack()
        self.changes: list[Change] = []
        self.positions: list[int] = []
        self.times_ns: list[int] = []
        self.functions: list[tuple[int, int]] = []
        self._blocks: dict[int, list[AllocatedBlock]] = {}  # by address, in order

    def __enter__(self) -> AllocationRecord:
        self._trace.__enter__()
        self._heap.enter_context(frozen_heap())
        self._open = True
        return self

    def mark(self) -> int:
        """Place a mark and return its number, counted from 0.

        After the record, and on a thread that it does not cover, return the number of the latest mark.
        """
        with self._lock:
            if self._open and profiler_is_running():
                self._clock.stop()
                self._trace.mark()
                self._clock.resume()
                self._marks += 1
            return self._marks - 1

    def backward_runs(self, begins: bool) -> None:
        """Note that a backward on this thread begins, or has returned."""
        if self._open:
            self._trace.backward_runs(begins)

    locate = staticmethod(torch.UntypedStorage.data_ptr)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close()
        if kind is None:
            self.read()

    def close(self) -> None:
        """End the record if it is open."""
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._heap.close()
            self._trace.__exit__(None, None, None)

    def read(self) -> None:
        """Read the record, which is over, unless it is read already."""
        if not self.times_ns:
            with no_garbage_collection():
                self._read()
            self.times_ns = self._clock.times_ns()
            assert len(self.positions) == self._marks == len(self.times_ns), "the profiler lost a mark"

    def _read(self) -> None:
        open_blocks: dict[int, AllocatedBlock] = {}
        times, ends = list[int](), list[tuple[int, int]]()
        for event in self._trace.events():
            match event:
                case AllocationEvent(_, address, nbytes, device) if device.type == self._device.type:
                    position = len(self.changes)
                    if nbytes > 0:
                        block = open_blocks[address] = AllocatedBlock(address, nbytes, position)
                        self._blocks.setdefault(address, []).append(block)
                        self.changes.append(Change(block, nbytes))
                    elif (freed := open_blocks.pop(address, None)) is not None:
                        freed.freed_at = position
                        self.changes.append(Change(freed, -freed.nbytes))
                    times += [event.time_ns] * (len(self.changes) - position)
                case MarkEvent():
                    self.positions.append(len(self.changes))
                case NodeEvent():
                    ends.append((len(self.changes), event.end_ns))
        self.functions = [(begin, bisect.bisect_left(times, end_ns)) for begin, end_ns in ends]

    def check_complete(self, where: str, storages: Iterable[RecordedStorage]) -> None:
        """Check that torch.profiler left no allocations of `where`, which made `storages`, out of the record.

        Raises:
            CannotProfile: it left out some, or all.
        """
        if not self.changes and any(storage.address for storage in storages):
            raise CannotProfile(
                where,
                f"the allocator of {self._device} reports nothing to torch.profiler, so no size is known",
                "let torch use its own (on CUDA the backend `native`, no pluggable one)",
            )
        self._trace.check_complete(where)

    def block_at(self, address: int, mark: int) -> AllocatedBlock | None:
        """Return the block at `address` that is live at `mark`."""
        position = self.positions[mark]
        blocks = self._blocks.get(address, [])
        i = bisect.bisect_left(blocks, position, key=lambda block: block.allocated_at) - 1
        if i >= 0 and ((freed := blocks[i].freed_at) is None or freed >= position):
            return blocks[i]
        return None
