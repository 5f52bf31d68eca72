"""Predict what CUDA's caching allocator reserves on the device for given allocations and frees.

NOTE [ Rules of the caching allocator ]

PyTorch cuts allocations from *segments* that it takes from the device. All segments together are the
*reserved* bytes; a budget counts *allocated* ones. c10/cuda/CUDACachingAllocator.cpp defines these rules,
given here for its default settings.

a. *Round.* A request is rounded up to a multiple of 512 bytes.
b. *Pools.* A request of up to 1 MiB is served from the small pool, and a larger one from the large pool.
c. *Best fit.* The smallest free block of the pool that is large enough serves the request. Of equally large
   ones it is the one with the lowest address.
d. *Segments.* If no free block fits, a segment is taken from the device: 2 MiB in the small pool; in the
   large pool 20 MiB for a request below 10 MiB, and for others the request, rounded up to 2 MiB.
e. *Split.* What remains of the block becomes a free block if it is at least 512 bytes in the small pool, or
   more than 1 MiB in the large pool. Otherwise the request gets the remainder too.
f. *Merge.* A freed block merges with free neighbors of its segment. The segment stays reserved.
g. *Expandable segments.* With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, each pool has one segment.
   It grows by whole pages, 2 MiB in the small pool and 20 MiB in the large one, and a free block at its end
   serves a part of the request. In rule c, that block counts with the size that it can grow to. A remainder
   of at least 512 bytes is split off in both pools.

Not here: several streams, which share no blocks, and a full device, to which free segments go back.

A worked example, in MiB. What is left of the first segment has room for C only in two pieces:

    event        segments                                     allocated   reserved
    allocate A 8 [AAAAAAAA............]                               8         20
    allocate B 8 [AAAAAAAABBBBBBBB....]                              16         20
    free A       [........BBBBBBBB....]                               8         20
    allocate C 9 [........BBBBBBBB....] [CCCCCCCCC...........]       17         40
    allocate D 30 needs a segment of its own, of 30 MiB              47         70

Expandable, C begins right behind B and ends in the second page, and D begins right behind C: 8 + 8 + 9 + 30
MiB fit into three pages, and 60 MiB are reserved.

>>> MIB = 1 << 20
>>> log = [Allocate(0, 8 * MIB), Allocate(1, 8 * MIB), Release(0), Allocate(2, 9 * MIB)]
>>> log.append(Allocate(3, 30 * MIB))
>>> [nbytes // MIB for nbytes in replay(log)]
[20, 20, 20, 40, 70]
>>> [nbytes // MIB for nbytes in replay(log, expandable_segments=True)]
[20, 20, 20, 40, 60]

This file knows nothing of graphs and plans: a log may come from a simulated step or from a recorded one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from autoac.planner.units import rounded_bytes

_MIB = 1 << 20
_ROUNDING = 512
_SMALL_REQUEST = _MIB  # and the least remainder of a large block that is not split off
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB  # pages of an expandable segment, too
_OWN_SEGMENT = 10 * _MIB  # from here on, a request has a segment of its own
_SEGMENT_ROUNDING = 2 * _MIB
_ADDRESSES = 1 << 60  # of each segment, and so the most that an expandable one grows to


@dataclass(frozen=True, slots=True)
class Allocate:
    """A request for `nbytes`."""

    name: int  # by which `Release` finds it
    nbytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """The end of the last allocation of that name."""

    name: int


def replay(log: Iterable[Allocate | Release], *, expandable_segments: bool = False) -> list[int]:
    """Return the reserved bytes after each event of `log`, of an allocator that is empty at first.

    Args:
        log: allocations and frees, in order. No two allocations of one name are live at once.
        expandable_segments: as in PYTORCH_CUDA_ALLOC_CONF (rule g).
    """
    allocator = _Allocator(expandable_segments)
    live: dict[int, _Block] = {}
    reserved: list[int] = []
    for event in log:
        match event:
            case Allocate(name, nbytes):
                assert name not in live
                live[name] = allocator.allocate(nbytes)
            case Release(name):
                allocator.free(live.pop(name))
        reserved.append(allocator.reserved)
    return reserved


class _Block:
    """A part of a segment: allocated, free, or (in an expandable segment) not mapped to memory yet."""

    __slots__ = ("address", "after", "allocated", "before", "mapped", "nbytes", "pool")

    def __init__(self, pool: _Pool, address: int, nbytes: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.nbytes = nbytes
        self.mapped = mapped
        self.allocated = False
        self.before: _Block | None = None  # neighbors in the segment
        self.after: _Block | None = None

    def cut(self, nbytes: int) -> _Block:
        """Shorten the block to `nbytes`, and return the block that the rest becomes."""
        rest = _Block(self.pool, self.address + nbytes, self.nbytes - nbytes, mapped=self.mapped)
        rest.before, rest.after = self, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.nbytes = rest, nbytes
        return rest

    def grown_nbytes(self) -> int:
        """Return the size that a free block can grow to."""
        after = self.after
        return self.nbytes + (after.nbytes if after is not None and not after.mapped else 0)


class _Sorted:
    """Blocks in the order of a key that does not change while a block is in here."""

    def __init__(self, *, by_size: bool) -> None:
        self._by_size = by_size
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, int], _Block] = {}

    def _key(self, block: _Block) -> tuple[int, int]:
        return (block.nbytes if self._by_size else 0, block.address)

    def add(self, block: _Block) -> None:
        insort(self._keys, self._key(block))
        self._blocks[self._key(block)] = block

    def remove(self, block: _Block) -> None:
        del self._keys[bisect_left(self._keys, self._key(block))]
        del self._blocks[self._key(block)]

    def blocks(self, at_least: int = 0) -> list[_Block]:
        """Return the blocks of at least that size, in order."""
        return [self._blocks[key] for key in self._keys[bisect_left(self._keys, (at_least, 0)) :]]

    def first(self, at_least: int) -> _Block | None:
        """Return the first block of at least that size, or None."""
        found = bisect_left(self._keys, (at_least, 0))
        return self._blocks[self._keys[found]] if found < len(self._keys) else None


class _Pool:
    """The blocks of one pool."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        self.free = _Sorted(by_size=True)
        self.unmapped = _Sorted(by_size=False)

    def of(self, block: _Block) -> _Sorted:
        """Return the set in which `block` is while it is not allocated."""
        return self.free if block.mapped else self.unmapped


class _Allocator:
    """The state of the allocator. Only this module uses it; callers see the reserved bytes."""

    def __init__(self, expandable_segments: bool) -> None:
        self.reserved = 0
        self._expandable = expandable_segments
        self._pools = {small: _Pool(small=small) for small in (False, True)}
        self._segments = 0  # so far; a later one has higher addresses

    def allocate(self, nbytes: int) -> _Block:
        """Return a block of at least `nbytes`."""
        nbytes = max(_ROUNDING, rounded_bytes(nbytes, _ROUNDING))
        small = nbytes <= _SMALL_REQUEST
        pool = self._pools[small]
        block = self._best_fit(pool, nbytes) or self._fresh(pool, nbytes)
        pool.free.remove(block)
        remaining = block.nbytes - nbytes
        if remaining >= _ROUNDING if small or self._expandable else remaining > _SMALL_REQUEST:
            pool.free.add(block.cut(nbytes))
        block.allocated = True
        return block

    def free(self, block: _Block) -> None:
        """Take back an allocated block."""
        block.allocated = False
        self._merge(block)

    def _merge(self, block: _Block) -> None:
        """Add `block` to those of its kind, together with its neighbors of that kind (rule f)."""
        pool = block.pool
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            pool.of(other).remove(other)
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
            block.nbytes += other.nbytes
        pool.of(block).add(block)

    def _best_fit(self, pool: _Pool, nbytes: int) -> _Block | None:
        if not self._expandable:
            return pool.free.first(nbytes)
        best: _Block | None = None
        for block in pool.free.blocks(nbytes):
            if best is not None and block.grown_nbytes() >= best.grown_nbytes():
                break
            best = block
        return best

    def _fresh(self, pool: _Pool, nbytes: int) -> _Block:
        """Return a free block in memory that is taken from the device now (rules d and g)."""
        if self._expandable:
            return self._expanded(pool, nbytes)
        segment = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        if nbytes >= _OWN_SEGMENT:
            segment = rounded_bytes(nbytes, _SEGMENT_ROUNDING)
        self.reserved += segment
        block = _Block(pool, self._new_address(), segment)
        pool.free.add(block)
        return block

    def _new_address(self) -> int:
        self._segments += 1
        return self._segments * _ADDRESSES

    def _expanded(self, pool: _Pool, nbytes: int) -> _Block:
        """Map pages at the first address with room for `nbytes`, free blocks there included."""
        if not pool.unmapped.blocks():
            pool.unmapped.add(_Block(pool, self._new_address(), _ADDRESSES, mapped=False))
        for block in pool.unmapped.blocks():
            if block.before is not None and not block.before.allocated:
                block = block.before
            if _room_from(block) >= nbytes:
                break
        else:
            raise AssertionError("the end of an expandable segment has room for everything")
        while not block.mapped or block.nbytes < nbytes:
            missing = block
            if block.mapped:
                assert block.after is not None
                missing = block.after
            lacking = nbytes - block.nbytes if block.mapped else nbytes
            self._map(missing, min(lacking, missing.nbytes))
            block = missing
        return block

    def _map(self, block: _Block, nbytes: int) -> None:
        """Map the first pages of an unmapped block."""
        pool = block.pool
        nbytes = rounded_bytes(nbytes, pool.page)
        self.reserved += nbytes
        pool.unmapped.remove(block)
        if nbytes < block.nbytes:
            pool.unmapped.add(block.cut(nbytes))
        block.mapped = True
        self._merge(block)


def _room_from(block: _Block) -> int:
    """Return the bytes from `block` to the next allocated one, mapped or not."""
    nbytes = 0
    each: _Block | None = block
    while each is not None and not each.allocated:
        nbytes += each.nbytes
        each = each.after
    return nbytes
