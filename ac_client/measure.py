"""What PyTorch's allocator itself says about memory: bytes live on a device over a with-block.

    with AllocatorTimeline() as timeline:
        step()
        timeline.mark("second step")
        step()
    timeline.peak_bytes, timeline.peak_since("second step")

The numbers are the allocator's own: every allocation and every free of every kernel, as
`torch.profiler` reports them, workspaces and temporaries included. Nothing of autoac is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "autoac.mark:"
_NO_KINETO_BANNER = "6"  # kineto writes "USDT: ... profiler_start" to stderr at every lower level


@dataclass(frozen=True, slots=True)
class Change:
    """The allocator gave out memory or took it back."""

    time_ns: int  # on the profiler's clock
    live_bytes: int  # after the change


class AllocatorTimeline:
    """Bytes live on `device` during a with-block, after every allocation and free.

    `events` and the peaks are there once the block has ended. On CUDA `peak_bytes` is
    `torch.cuda.max_memory_allocated`, so the block resets that counter.

    At most one torch profiler runs at a time, so a block cannot span `autoac.profiler.profile` or the step
    that `ac_client.apply` profiles.

    On CPU the counts start at `base`, and frees of memory that was allocated before the block do not
    count (torch reports some of them and not others). The counts are absolute if the block begins before
    the first tensor is made, or if all that is there at its beginning, `base` bytes, outlives it.

    Args:
        device: whose memory.
        base: bytes live at the beginning; on CUDA this is known and the argument is not read.

    Raises:
        RuntimeError: another torch profiler is running.
    """

    def __init__(self, device: torch.device | str = "cpu", *, base: int = 0) -> None:
        self.device = torch.device(device)
        self.events: tuple[Change, ...] = ()
        self.marks: dict[str, Change] = {}
        self._base = base
        self._counted_peak: int | None = None
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another torch profiler is running on this thread; end it before measuring")
        os.environ.setdefault("KINETO_LOG_LEVEL", _NO_KINETO_BANNER)  # read when kineto is first used
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base = torch.cuda.memory_allocated(self.device)
        self._profiler = profile(activities=activities, profile_memory=True)
        self._profiler.start()
        return self

    def mark(self, name: str) -> None:
        """Name this moment, for `marks` and `peak_since`. A name used again moves."""
        with record_function(_MARK + name):
            pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._profiler is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._counted_peak = torch.cuda.max_memory_allocated(self.device)
        self._profiler.stop()
        if kind is None:
            self._read(self._profiler)
        self._profiler = None

    def _read(self, profiler: profile) -> None:
        recorded = profiler.profiler
        assert recorded is not None
        assert recorded.kineto_results is not None
        live, events = self._base, []
        of_device = (self.device.type, self.device.index or 0)
        ours: set[int] = set()  # addresses given out in this block
        for event in sorted(_walk(recorded.kineto_results.experimental_event_tree()), key=_start):
            if event.tag == _EventType.Allocation:
                change = event.typed[1]
                if (change.device.type, change.device.index or 0) != of_device:
                    continue
                if change.alloc_size > 0:
                    ours.add(change.ptr)
                elif self.device.type == "cpu" and change.ptr not in ours:
                    continue  # of an earlier profiler's time: it was not counted when it came
                else:
                    ours.discard(change.ptr)
                live += change.alloc_size
                events.append(Change(_start(event), live))
            elif event.name.startswith(_MARK):
                self.marks[event.name.removeprefix(_MARK)] = Change(_start(event), live)
        self.events = tuple(events)

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once in the whole block."""
        if self._counted_peak is not None:
            return self._counted_peak
        return max([self._base, *(event.live_bytes for event in self.events)])

    def peak_since(self, mark: str) -> int:
        """The most bytes live at once from `mark` to the end of the block."""
        start = self.marks[mark]
        return max([start.live_bytes, *(e.live_bytes for e in self.events if e.time_ns >= start.time_ns)])


def _walk(roots: Iterable[Any]) -> Iterator[Any]:
    stack = list(roots)[::-1]
    while stack:
        event = stack.pop()
        yield event
        stack.extend(reversed(event.children))


def _start(event: Any) -> int:
    return int(event.start_time_ns)
