"""The loop: what the allocator says of a planned step, beside what was predicted of it.

NOTE [ The counter is the user's ] CUDA's allocator counts the most bytes that it has handed out since its
counter was last reset, and only a reset could tell one step from those before. But the counter belongs to
the user, and cannot be set back to what it was. So it is only read: before a step, at the end of forward,
after the optimizer has stepped, and when the next forward begins. If it rose, the step has that peak
exactly. If it stayed the same, the step stayed below, which is enough to say that it keeps its budget. If it
fell from one reading to the next, the user has reset it, and what came between that reading and the reset is
unknown: the step had at least the most that was read. Many loops reset the counter at the head of each step.
Before a step and after it such a loop shows the bytes at rest, twice; only the readings inside the step show
that the counter fell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from autoac.planner.units import rounded_bytes

WATCHED_STEPS = 3  # after each planning: the optimizer's state and gradients that stay come with the second
MOST_CORRECTIONS = 2  # of one policy
FAR_UNDER = 0.03  # of the budget: less is not worth planning again


class AllocatorPeak(Protocol):
    """A device's allocator. Bytes."""

    def allocated_peak(self) -> int:
        """The most that was handed out at once, since the counter was last reset."""

    def reserved_peak(self) -> int:
        """The most that was taken from the device, since that counter was last reset."""


class CudaPeak:
    """torch's caching allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reserved_peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


def allocator_peak(device: torch.device) -> AllocatorPeak | None:
    """What counts on `device`, if it counts by itself: on a CPU only torch.profiler does."""
    return CudaPeak(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a step's peak: it is at least and at most so many bytes."""

    at_least: int
    at_most: int | None  # None: not known

    @classmethod
    def exactly(cls, nbytes: int) -> Seen:
        return cls(nbytes, nbytes)

    @classmethod
    def of(cls, readings: Sequence[int]) -> Seen:
        """From readings of the counter, from before a step to after it.

        See NOTE [ The counter is the user's ].
        """
        pairs = list(pairwise(readings))
        was_reset = any(after < before for before, after in pairs)
        at_least = max((after for before, after in pairs if after != before), default=0)
        return cls(at_least, None if was_reset else readings[-1])

    def joined(self, other: Seen) -> Seen:
        """Of two steps, the larger peak."""
        unknown = self.at_most is None or other.at_most is None
        at_most = None if unknown else max(self.at_most or 0, other.at_most or 0)
        return Seen(max(self.at_least, other.at_least), at_most)


def too_much(seen: Seen, predicted: int, limit: int) -> int:
    """By how many bytes the prediction has to rise, 0 if what was seen is within `limit`."""
    return max(0, seen.at_least - predicted) if seen.at_least > limit else 0


def too_little(seen: Seen, predicted: int, limit: int) -> int:
    """By how many bytes the prediction may fall, 0 if it is not worth it."""
    if seen.at_most is None or predicted - seen.at_most <= FAR_UNDER * limit:
        return 0
    return predicted - seen.at_most


def proposed_headroom(allocated_peak: int, reserved_peak: int, budget: int) -> int:
    """What to leave free of the budget so that what the allocator reserves stays within it, in bytes.

    Fragments are what was reserved beyond what was handed out. With room for both nothing is to be left.
    """
    if reserved_peak <= budget:
        return 0
    block = 2 << 20  # the caching allocator's
    return rounded_bytes(max(0, reserved_peak - allocated_peak), block)
