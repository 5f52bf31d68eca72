"""The allocator's own record of a stretch of code: every block, from allocation to free, with marks."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoac.profiler.capture.garbage_collection import not_collecting
from autoac.profiler.timing.op_timer import Clock, clock_of
from autoac.profiler.torch_facts.torch_trace import AllocationEvent, MarkEvent, TorchTrace


@dataclass(slots=True, eq=False)
class Block:
    """One allocation on the profiled device. Places are positions in `AllocationRecord.changes`."""

    address: int
    nbytes: int
    allocated: int
    freed: int | None = None  # None: it outlived the record


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the record: a block comes or goes."""

    block: Block
    nbytes: int  # negative: a free


class Allocations(Protocol):
    """What is read off a record of allocations, whoever took it."""

    changes: list[Change]  # every allocation and free, in order
    places: list[int]  # for each mark, how many changes came before it
    times_ns: list[int]  # for each mark, when it was

    def mark(self) -> int: ...

    def block_at(self, address: int, mark: int) -> Block | None: ...


class AllocationRecord:
    """Use as a context manager; `mark()` inside it, the rest after it.

    Attributes:
        changes: every allocation and free, in order.
        places: for each mark, how many changes came before it.
        times_ns: for each mark, when it was, on the clock that was given, which is stopped while marks are
            placed. Known when the block has ended.

    Raises:
        ProfilerBusy: another profiler is running on this thread.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._device_type = device.type
        self._clock = clock or clock_of(device)
        self._marks = 0
        self._recording = TorchTrace(device)
        self.changes: list[Change] = []
        self.places: list[int] = []
        self.times_ns: list[int] = []
        self._blocks: dict[int, list[Block]] = {}  # by address, in order

    def __enter__(self) -> AllocationRecord:
        self._recording.__enter__()
        return self

    def mark(self) -> int:
        """Place a mark; returns its number, counted from 0."""
        self._clock.stop()
        self._recording.mark()
        self._clock.go_on()
        self._marks += 1
        return self._marks - 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._recording.__exit__(kind, error, trace)
        if kind is None:
            with not_collecting():
                self._read()
            self.times_ns = self._clock.times_ns()
            assert len(self.places) == self._marks == len(self.times_ns), "the profiler lost a mark"

    def _read(self) -> None:
        open_blocks: dict[int, Block] = {}
        for entry in self._recording.events():
            match entry:
                case AllocationEvent(_, address, nbytes, device):
                    if device.type != self._device_type:
                        continue
                    place = len(self.changes)
                    if nbytes > 0:
                        block = open_blocks[address] = Block(address, nbytes, place)
                        self._blocks.setdefault(address, []).append(block)
                        self.changes.append(Change(block, nbytes))
                    elif (freed := open_blocks.pop(address, None)) is not None:
                        freed.freed = place
                        self.changes.append(Change(freed, -freed.nbytes))
                case MarkEvent():
                    self.places.append(len(self.changes))
                case _:
                    pass

    def check_complete(self, where: str) -> None:
        """Raise CannotProfile if torch.profiler left some allocations of `where` out of the record."""
        self._recording.check_complete(where)

    def freed_between(self, first: int, last: int) -> list[Block]:
        """The blocks that are live at mark number `first` and not at mark number `last`."""
        began, ended = self.places[first], self.places[last]
        gone = (change.block for change in self.changes[began:ended] if change.nbytes < 0)
        return [block for block in gone if block.allocated < began]

    def block_at(self, address: int, mark: int) -> Block | None:
        """The block at `address` that is live at mark number `mark`."""
        place = self.places[mark]
        blocks = self._blocks.get(address, [])
        i = bisect.bisect_left(blocks, place, key=lambda block: block.allocated) - 1
        if i >= 0 and ((freed := blocks[i].freed) is None or freed >= place):
            return blocks[i]
        return None
