"""Hand out memory of the host for what the device does not hold: pages that the driver registers once.

torch's pinned allocator rounds to powers of two and may wait for the device. Here chunks are cut from a few
large arenas. A chunk goes back when nothing refers to it: with the last saved tensor that needs it.
"""

from __future__ import annotations

import mmap
import threading
from typing import NamedTuple

import torch

from autoac.planner.units import format_bytes

ARENA_NBYTES = 64 << 20  # at least
ALIGNMENT = 512


class Read(NamedTuple):
    """A copy from the host. All of a device run on one stream, so a later one ends later."""

    number: int
    event: torch.Event


class _Free(NamedTuple):
    """A free range of an arena, and the last copy that reads it."""

    begin: int
    end: int
    read: Read | None


class HostChunk:
    """Bytes of the host, from `HostMemory.allocate` until this object dies.

    Attributes:
        data: uint8 [nbytes].
        written_after: the copy from the same memory that a copy to `data` must wait for, or None.
        read: the last copy from `data`, which `copies.py` sets.
    """

    __slots__ = ("_arena", "_begin", "_memory", "data", "read", "written_after")

    def __init__(self, memory: HostMemory, arena: _Arena, begin: int, nbytes: int) -> None:
        self._memory, self._arena, self._begin = memory, arena, begin
        self.data = arena.data[begin : begin + nbytes]
        self.written_after: Read | None = None
        self.read: Read | None = None

    def __del__(self) -> None:
        self._memory._give_back(self._arena, self._begin, self.data.numel(), self.read or self.written_after)


class _Arena:
    """Pages of the host, and which of them are free, by address."""

    __slots__ = ("data", "free")

    def __init__(self, nbytes: int) -> None:
        self.data = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.free = [_Free(0, nbytes, None)]


class HostMemory:
    """All chunks of this process.

    Attributes:
        used: bytes in chunks now.
        peak: most bytes in chunks so far; set it to start again.
    """

    def __init__(self) -> None:
        self.used = self.peak = 0
        self._arenas: list[_Arena] = []
        self._lock = threading.RLock()  # a chunk may die while another is allocated

    @property
    def reserved(self) -> int:
        """Return the bytes of all arenas."""
        return sum(arena.data.numel() for arena in self._arenas)

    def allocate(self, nbytes: int, device: torch.device) -> HostChunk:
        """Return `nbytes` of the host for copies from and to `device`.

        Raises:
            MemoryError: the host has too little memory, or may register no more.
        """
        with self._lock:
            found = self._cut(_aligned(nbytes))
            if found is None:
                self._add_arena(max(_aligned(nbytes), ARENA_NBYTES), device)
                found = self._cut(_aligned(nbytes))
                assert found is not None
            arena, free = found
            chunk = HostChunk(self, arena, free.begin, nbytes)
            chunk.written_after = free.read
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            return chunk

    def _cut(self, nbytes: int) -> tuple[_Arena, _Free] | None:
        """Take `nbytes` from the smallest free range that is large enough."""
        fitting = [
            (free.end - free.begin, i, arena)
            for arena in self._arenas
            for i, free in enumerate(arena.free)
            if free.end - free.begin >= nbytes
        ]
        if not fitting:
            return None
        _, i, arena = min(fitting, key=lambda entry: entry[0])
        free = arena.free[i]
        rest = free._replace(begin=free.begin + nbytes)
        arena.free[i : i + 1] = [rest] if rest.begin < rest.end else []
        return arena, free

    def _add_arena(self, nbytes: int, device: torch.device) -> None:
        try:
            arena = _Arena(nbytes)
        except OSError as error:
            raise MemoryError(_too_much(nbytes, self.reserved, str(error))) from error
        cudart = torch.cuda.cudart() if device.type == "cuda" else None
        if cudart is not None:
            status = int(cudart.cudaHostRegister(arena.data.data_ptr(), nbytes, 0))
            if status:
                raise MemoryError(_too_much(nbytes, self.reserved, f"cudaHostRegister returned {status}"))
        self._arenas.append(arena)

    def _give_back(self, arena: _Arena, begin: int, nbytes: int, read: Read | None) -> None:
        with self._lock:
            self.used -= nbytes
            returned = _Free(begin, begin + _aligned(nbytes), read)
            ranges = sorted([*arena.free, returned], key=lambda free: free.begin)
            i = ranges.index(returned)
            if i + 1 < len(ranges) and ranges[i].end == ranges[i + 1].begin:
                ranges[i : i + 2] = [_joined(ranges[i], ranges[i + 1])]
            if i and ranges[i - 1].end == ranges[i].begin:
                ranges[i - 1 : i + 1] = [_joined(ranges[i - 1], ranges[i])]
            arena.free = ranges


def _joined(a: _Free, b: _Free) -> _Free:
    reads = [read for read in (a.read, b.read) if read is not None]
    return _Free(a.begin, b.end, max(reads, key=lambda read: read.number, default=None))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _too_much(nbytes: int, reserved: int, why: str) -> str:
    return (
        f"the host must have {format_bytes(nbytes)} more for what is moved there, beside "
        f"{format_bytes(reserved)} that it has given: {why}. Pass a smaller host_budget_gb, or raise the "
        "limit of locked memory (ulimit -l)"
    )


host_memory = HostMemory()
