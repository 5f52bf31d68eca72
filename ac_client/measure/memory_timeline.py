"""Measure the bytes live on a device during a with-block, as PyTorch's allocator reports them.

    with AllocatorTimeline() as timeline:
        step()
        timeline.mark("second step")
        step()
    timeline.peak_bytes, timeline.peak_since("second step")

The numbers are those of the allocator: every allocation and free of every kernel as `torch.profiler` reports
them, workspaces and temporaries included. No part of the planner or the runtime takes part in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from autoac.profiler import ProfilerBusy
from autoac.tape.torch_facts.torch_trace import AllocationEvent, MarkEvent, TorchTrace

_RELEASED, _EXISTING = "released ", "existing "


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Bytes live just after an allocation or a free."""

    time_ns: int  # on the profiler's clock
    live_bytes: int


class AllocatorTimeline:
    """Record the bytes live on `device` after each allocation and free during a with-block.

    `events` and the peaks are available after the block. On CUDA `peak_bytes` is
    `torch.cuda.max_memory_allocated`, so the block resets that counter.

    At most one torch profiler runs at a time, so a block must not contain `autoac.profiler.profile` or the
    step that `ac_client.apply` profiles.

    On a CPU the counts start at `base`. Frees of memory that was allocated before the block do not count,
    because torch reports only some of them. The counts are absolute if no tensor exists when the block
    begins. They are also absolute if each existing tensor is counted in `base` or passed to `note_existing`,
    and its release, if it is released in the block, to `note_release`.

    Args:
        device: the device to measure.
        base: bytes live at the beginning; ignored on CUDA, whose allocator knows them.

    Attributes:
        events: live bytes after each allocation and free.
        marks: live bytes at each mark.

    Raises:
        RuntimeError: another torch profiler is running.
        CannotProfile: at the end of the block: torch.profiler left allocations out of its record.
    """

    def __init__(self, device: torch.device | str = "cpu", *, base: int = 0) -> None:
        self.device = torch.device(device)
        self.events: tuple[LiveBytes, ...] = ()
        self.marks: dict[str, LiveBytes] = {}
        self._base = base
        self._counted_peak: int | None = None
        self._trace: TorchTrace | None = None

    def __enter__(self) -> Self:
        trace = TorchTrace(self.device)
        try:
            trace.__enter__()
        except ProfilerBusy:
            raise RuntimeError(
                "another torch profiler is running on this thread; end it before measuring"
            ) from None
        if self.device.type == "cuda":
            if self.device.index is None:  # the device whose counter torch reads
                self.device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base = torch.cuda.memory_allocated(self.device)
        self._trace = trace
        return self

    def mark(self, name: str) -> None:
        """Mark this moment for `marks` and `peak_since`. A repeated name moves its mark."""
        assert self._trace is not None
        self._trace.mark(name)

    def note_existing(self, storage: torch.UntypedStorage) -> None:
        """Count `storage` as live before the block, unless the block made it. Call once for each storage."""
        if self._trace is not None and self.device.type == storage.device.type == "cpu":
            self._trace.mark(f"{_EXISTING}{storage.data_ptr()} {storage.nbytes()}")

    def note_release(self, nbytes: int, address: int = 0) -> None:
        """Count `nbytes` that were live before the block as released now. Does nothing on CUDA.

        Args:
            nbytes: a part of `base`; or, with `address`, the size of a storage passed to `note_existing`.
            address: of that storage.
        """
        if self._trace is not None and self.device.type == "cpu":
            self._trace.mark(f"{_RELEASED}{nbytes} {address}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        trace, self._trace = self._trace, None
        assert trace is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._counted_peak = torch.cuda.max_memory_allocated(self.device)
        trace.__exit__(kind, error, traceback)
        if kind is None:
            trace.check_complete("this block")
            self._read(trace)

    def _read(self, trace: TorchTrace) -> None:
        live, events = self._base, []
        of_device = (self.device.type, self.device.index or 0)
        allocated: set[int] = set()  # addresses of live memory that was allocated in the block
        existing: set[int] = set()  # addresses of noted storages that are older than the block
        before = 0  # bytes of these
        for entry in trace.events():
            match entry:
                case AllocationEvent(time_ns, address, nbytes, device):
                    if (device.type, device.index or 0) != of_device:
                        continue
                    if nbytes > 0:
                        allocated.add(address)
                    elif self.device.type == "cpu" and address not in allocated:
                        continue  # older than the block, and not counted at its allocation
                    else:
                        allocated.discard(address)
                    live += nbytes
                    events.append(LiveBytes(time_ns, live))
                case MarkEvent(_, name) if name.startswith(_EXISTING):
                    address, nbytes = map(int, name.removeprefix(_EXISTING).split())
                    if address not in allocated:
                        existing.add(address)
                        before += nbytes
                case MarkEvent(time_ns, name) if name.startswith(_RELEASED):
                    nbytes, address = map(int, name.removeprefix(_RELEASED).split())
                    if address and address not in existing:
                        continue  # made in the block: the record has its release
                    existing.discard(address)
                    live -= nbytes
                    events.append(LiveBytes(time_ns, live))
                case MarkEvent(time_ns, name):
                    self.marks[name] = LiveBytes(time_ns, live)
        self._base += before
        self.events = tuple(LiveBytes(event.time_ns, event.live_bytes + before) for event in events)
        self.marks = {
            name: LiveBytes(mark.time_ns, mark.live_bytes + before) for name, mark in self.marks.items()
        }

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes live at once in the whole block."""
        if self._counted_peak is not None:
            return self._counted_peak
        return max([self._base, *(event.live_bytes for event in self.events)])

    def peak_since(self, mark: str) -> int:
        """Return the most bytes live at once from `mark` to the end of the block."""
        start = self.marks[mark]
        return max([start.live_bytes, *(e.live_bytes for e in self.events if e.time_ns >= start.time_ns)])
