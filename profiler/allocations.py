"""The allocator's own record of a stretch of code: every allocation and free, in order, with marks.

PyTorch's profiler reports each allocation and free of its CPU and CUDA allocators, those inside kernels
included. A mark is a named range in the same record, so what happened between two marks is known
exactly, without a clock of our own.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.profiler import ProfilerActivity

from autoac.profiler.errors import ProfilerBusy

_MARK = "autoac.mark"


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


def profiler_is_running() -> bool:
    """Whether torch.profiler runs on this thread, so that no record can be taken."""
    return torch._C._autograd._profiler_enabled()


class AllocationRecord:
    """Use as a context manager; `mark()` inside it, the rest after it.

    Attributes:
        changes: every allocation and free, in order.
        places: for each mark, how many changes came before it.
        times_ns: for each mark, when it was, on the profiler's clock.

    Raises:
        ProfilerBusy: another profiler is running on this thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._n_marks = 0
        self.changes: list[Change] = []
        self.places: list[int] = []
        self.times_ns: list[int] = []
        self._blocks: dict[int, list[Block]] = {}  # by address, in order

    def __enter__(self) -> AllocationRecord:
        if profiler_is_running():
            raise ProfilerBusy
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else kineto prints a line at start and stop
        self._profiler.__enter__()
        return self

    def mark(self) -> int:
        """Place a mark; returns its number, counted from 0."""
        with _RecordFunctionFast(_MARK):
            pass
        self._n_marks += 1
        return self._n_marks - 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._profiler.__exit__(kind, error, trace)
        if kind is None:
            self._read()
            assert len(self.places) == self._n_marks, "the profiler lost a mark"

    def _read(self) -> None:
        profiler = self._profiler.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        events = list(_walk(profiler.kineto_results.experimental_event_tree()))
        events.sort(key=lambda event: event.start_time_ns)
        open_blocks: dict[int, Block] = {}
        for event in events:
            if event.tag == _EventType.Allocation:
                fields = event.typed[1]
                if fields.device.type != self._device_type:
                    continue
                place = len(self.changes)
                if fields.alloc_size > 0:
                    block = open_blocks[fields.ptr] = Block(fields.ptr, fields.alloc_size, place)
                    self._blocks.setdefault(fields.ptr, []).append(block)
                    self.changes.append(Change(block, block.nbytes))
                elif (freed := open_blocks.pop(fields.ptr, None)) is not None:
                    freed.freed = place
                    self.changes.append(Change(freed, -freed.nbytes))
            elif event.name == _MARK:
                self.places.append(len(self.changes))
                self.times_ns.append(event.start_time_ns)

    def block_at(self, address: int, mark: int) -> Block | None:
        """The block at `address` that is live at mark number `mark`."""
        place = self.places[mark]
        blocks = self._blocks.get(address, [])
        i = bisect.bisect_left(blocks, place, key=lambda block: block.allocated) - 1
        if i >= 0 and ((freed := blocks[i].freed) is None or freed >= place):
            return blocks[i]
        return None


def _walk(roots: list[Any]) -> Iterator[Any]:
    stack = list(roots)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)
