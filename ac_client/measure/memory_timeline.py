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

from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from autoac.profiler import ProfilerBusy
from autoac.profiler.torch_facts.torch_trace import AllocationEvent, MarkEvent, OpEvent, TorchTrace

_RELEASED, _FOUND = "released ", "found "


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
    the first tensor is made; or if all that is there at its beginning is in `base`, or told as `found` when
    the block comes to it, and outlives the block or is told as `released`.

    Args:
        device: whose memory.
        base: bytes live at the beginning; on CUDA this is known and the argument is not read.
        ops: names of ops, `aten::mm`, whose runs are noted in `ran`, with the marks and what backward ran.

    Raises:
        RuntimeError: another torch profiler is running.
        CannotProfile: at the end of the block: torch.profiler left allocations out of its record.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, base: int = 0, ops: Collection[str] = ()
    ) -> None:
        self.device = torch.device(device)
        self.events: tuple[Change, ...] = ()
        self.marks: dict[str, Change] = {}
        self.ran: tuple[MarkEvent | OpEvent, ...] = ()  # in order of time; nothing without `ops`
        self._ops = frozenset(ops)
        self._base = base
        self._counted_peak: int | None = None
        self._recording: TorchTrace | None = None

    def __enter__(self) -> Self:
        recording = TorchTrace(self.device, ops=self._ops)
        try:
            recording.__enter__()
        except ProfilerBusy:
            raise RuntimeError(
                "another torch profiler is running on this thread; end it before measuring"
            ) from None
        if self.device.type == "cuda":
            if self.device.index is None:  # whose counter torch means
                self.device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base = torch.cuda.memory_allocated(self.device)
        self._recording = recording
        return self

    def mark(self, name: str) -> None:
        """Name this moment, for `marks` and `peak_since`. A name used again moves."""
        assert self._recording is not None
        self._recording.mark(name)

    def found(self, storage: torch.UntypedStorage) -> None:
        """The block has come to `storage`: unless it was made in here, it was there before. Once for each."""
        if self._recording is not None and self.device.type == storage.device.type == "cpu":
            self._recording.mark(f"{_FOUND}{storage.data_ptr()} {storage.nbytes()}")

    def released(self, nbytes: int, address: int = 0) -> None:
        """So many bytes that were there before are given back at this moment. On CUDA this is known.

        Args:
            nbytes: of `base`; or, with its `address`, of a storage that was `found`.
        """
        if self._recording is not None and self.device.type == "cpu":
            self._recording.mark(f"{_RELEASED}{nbytes} {address}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._counted_peak = torch.cuda.max_memory_allocated(self.device)
        recording.__exit__(kind, error, traceback)
        if kind is None:
            recording.check_complete("this block")
            self._read(recording)

    def _read(self, recording: TorchTrace) -> None:
        live, events = self._base, []
        ran: list[MarkEvent | OpEvent] = []
        of_device = (self.device.type, self.device.index or 0)
        ours: set[int] = set()  # addresses given out in this block
        found: set[int] = set()  # and not in this block
        before = 0  # bytes of these
        for entry in recording.events():
            match entry:
                case AllocationEvent(time_ns, address, nbytes, device):
                    if (device.type, device.index or 0) != of_device:
                        continue
                    if nbytes > 0:
                        ours.add(address)
                    elif self.device.type == "cpu" and address not in ours:
                        continue  # of an earlier profiler's time: it was not counted when it came
                    else:
                        ours.discard(address)
                    live += nbytes
                    events.append(Change(time_ns, live))
                case MarkEvent(_, name) if name.startswith(_FOUND):
                    address, nbytes = map(int, name.removeprefix(_FOUND).split())
                    if address not in ours:
                        found.add(address)
                        before += nbytes
                case MarkEvent(time_ns, name) if name.startswith(_RELEASED):
                    nbytes, address = map(int, name.removeprefix(_RELEASED).split())
                    if address and address not in found:
                        continue  # made in here: its end is in the record
                    found.discard(address)
                    live -= nbytes
                    events.append(Change(time_ns, live))
                case MarkEvent(time_ns, name):
                    self.marks[name] = Change(time_ns, live)
                    if self._ops:
                        ran.append(entry)
                case OpEvent():
                    ran.append(entry)
        self._base += before
        self.events = tuple(Change(event.time_ns, event.live_bytes + before) for event in events)
        self.marks = {
            name: Change(mark.time_ns, mark.live_bytes + before) for name, mark in self.marks.items()
        }
        self.ran = tuple(ran)

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
