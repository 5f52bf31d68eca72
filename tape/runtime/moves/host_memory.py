"""Hand out memory of the host for what the device does not hold: pages that the driver registers once.

torch's pinned allocator rounds to powers of two and may wait for the device. Here chunks are cut from a few
large arenas. A chunk goes back when nothing refers to it: with the last saved tensor that needs it.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import Any, NamedTuple

import torch

from autoac.planner.units import format_bytes

ARENA_NBYTES = 64 << 20  # at least
ROUNDING = 512  # of chunks, as of the blocks of a GPU's allocator; a CPU's are not rounded


class _Range(NamedTuple):
    """Bytes of an arena."""

    begin: int
    end: int


class HostChunk:
    """Bytes of the host, from `HostMemory.allocate` until this object dies.

    Attributes:
        data: uint8 [nbytes].
    """

    def __init__(self, memory: HostMemory, arena: _Arena, taken: _Range, nbytes: int) -> None:
        self._memory, self._arena, self._range = memory, arena, taken
        self.data = arena.data[taken.begin : taken.begin + nbytes]

    def __del__(self) -> None:
        self._memory._returned.append((self._arena, self._range))


class _Arena:
    """Pages of the host, and which of them are free, by address."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = device  # whose streams order the copies from and to it
        self.data = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.free = [_Range(0, nbytes)]


class HostMemory:
    """All chunks of this process.

    Attributes:
        peak: most bytes in chunks so far; set it to start again.
    """

    def __init__(self) -> None:
        self._used = self.peak = 0
        self._arenas: list[_Arena] = []
        self._lock = threading.Lock()
        # Of chunks that have died. A garbage collection may end a chunk anywhere, also in the middle of a
        # method of this class on the same thread: so the end of a chunk changes nothing else.
        self._returned: deque[tuple[_Arena, _Range]] = deque()

    @property
    def used(self) -> int:
        """Return the bytes in chunks now, rounded as blocks of the device that they are copied from."""
        with self._lock:
            self._take_back()
            return self._used

    @property
    def reserved(self) -> int:
        """Return the bytes of all arenas."""
        return sum(arena.data.numel() for arena in self._arenas)

    def allocate(self, nbytes: int, device: torch.device) -> HostChunk:
        """Return `nbytes` of the host for copies from and to `device`.

        Raises:
            MemoryError: the host has too little memory, or may register no more.
        """
        rounding = 1 if device.type == "cpu" else ROUNDING
        rounded = -(-nbytes // rounding) * rounding
        with self._lock:
            self._take_back()
            found = self._cut(rounded, device)
            if found is None:
                self._add_arena(max(rounded, ARENA_NBYTES), device)
                found = self._cut(rounded, device)
                assert found is not None
            arena, free = found
            chunk = HostChunk(self, arena, free, nbytes)
            self._used += rounded
            self.peak = max(self.peak, self._used)
            return chunk

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Have arenas of at least `nbytes` in all, for copies from and to `device`.

        Raises:
            MemoryError: the host has too little memory, or may register no more.
        """
        with self._lock:
            missing = nbytes - sum(a.data.numel() for a in self._arenas if a.device == device)
            if missing > 0:
                self._add_arena(max(missing, ARENA_NBYTES), device)

    def release(self) -> None:
        """Give back the arenas of which no chunk is in use, once all copies are over."""
        with self._lock:
            self._take_back()
            for arena in list(self._arenas):
                if arena.free == [_Range(0, arena.data.numel())]:
                    self._arenas.remove(arena)
                    if (cudart := _cudart(arena.device)) is not None:
                        torch.cuda.synchronize(arena.device)
                        cudart.cudaHostUnregister(arena.data.data_ptr())

    def _cut(self, nbytes: int, device: torch.device) -> tuple[_Arena, _Range] | None:
        """Take `nbytes` from the smallest free range that is large enough."""
        fitting = [
            (free.end - free.begin, i, arena)
            for arena in self._arenas
            for i, free in enumerate(arena.free)
            if arena.device == device and free.end - free.begin >= nbytes
        ]
        if not fitting:
            return None
        _, i, arena = min(fitting, key=lambda entry: entry[0])
        free = arena.free[i]
        rest = free._replace(begin=free.begin + nbytes)
        arena.free[i : i + 1] = [rest] if rest.begin < rest.end else []
        return arena, free._replace(end=rest.begin)

    def _add_arena(self, nbytes: int, device: torch.device) -> None:
        try:
            arena = _Arena(nbytes, device)
        except OSError as error:
            raise MemoryError(_too_much(nbytes, self.reserved, str(error))) from error
        if (cudart := _cudart(device)) is not None:
            status = int(cudart.cudaHostRegister(arena.data.data_ptr(), nbytes, 0))
            if status:
                raise MemoryError(_too_much(nbytes, self.reserved, f"cudaHostRegister returned {status}"))
        self._arenas.append(arena)

    def _take_back(self) -> None:
        """Free the ranges of chunks that have died. The caller holds the lock."""
        while self._returned:
            arena, returned = self._returned.popleft()
            self._used -= returned.end - returned.begin
            ranges = sorted([*arena.free, returned])
            i = ranges.index(returned)
            if i + 1 < len(ranges) and ranges[i].end == ranges[i + 1].begin:
                ranges[i : i + 2] = [_Range(returned.begin, ranges[i + 1].end)]
            if i and ranges[i - 1].end == ranges[i].begin:
                ranges[i - 1 : i + 1] = [_Range(ranges[i - 1].begin, ranges[i].end)]
            arena.free = ranges


def _cudart(device: torch.device) -> Any:
    """Return the library that registers memory of the host; None if none does for `device`."""
    return torch.cuda.cudart() if device.type == "cuda" else None


def _too_much(nbytes: int, reserved: int, why: str) -> str:
    return (
        f"the host must have {format_bytes(nbytes)} for what is moved there, in addition to "
        f"{format_bytes(reserved)} in use for that: {why}. Pass a smaller host_budget_gb, or raise the "
        "limit of locked memory (ulimit -l)"
    )


host_memory = HostMemory()
