"""Predict how many bytes CUDA's caching allocator takes from the GPU to hand out those that a plan holds."""

from __future__ import annotations

from collections.abc import Sequence

from autoac.planner.units import rounded_bytes

MIB = 1 << 20
LAST_SEGMENTS = 60 * MIB  # that are rarely full


def reserved_for(allocated: int, blocks: Sequence[int]) -> int:
    """Return how many bytes the allocator reserves to hand out `allocated`, in blocks of about these sizes.

    Segments are filled with blocks of one size each (tests/standin/caching_allocator.py has the rules).
    That is rather too much than too little, since a step may run out of memory before it shows the fragments.
    """
    return round(allocated * _reserved_per_byte(blocks)) + LAST_SEGMENTS


def most_allocated(reserved: int, blocks: Sequence[int]) -> int:
    """Return how many bytes may be handed out for `reserved_for` to be `reserved`; at least 1."""
    return max(1, int((reserved - LAST_SEGMENTS) / _reserved_per_byte(blocks)))


def _reserved_per_byte(blocks: Sequence[int]) -> float:
    reserved = sum(_segment(block) / (_segment(block) // block) for block in blocks if block)
    return reserved / sum(blocks) if reserved else 1.0


def _segment(block: int) -> int:
    """Return the size of the segment that a block is cut from."""
    if block >= 10 * MIB:
        return rounded_bytes(block, 2 * MIB)
    return 2 * MIB if block <= MIB else 20 * MIB
