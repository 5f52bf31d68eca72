"""The allocator's counter, and what its readings show of the peak of a step.

NOTE [ The counter is the user's ] CUDA's allocator counts the most bytes that it has handed out since its
counter was last reset, and only a reset could tell one step from those before. But the counter belongs to
the user, and cannot be set back to what it was. So it is only read: before a step, at the end of forward,
after the optimizer has stepped, and when the next forward begins. If it rose, the step has that peak
exactly. If it stayed the same, the step stayed below, which is enough to say that it keeps its budget. If it
fell from one reading to the next, the user has reset it, and what came between that reading and the reset is
unknown: the step had at least the most that was read. Many loops reset the counter at the head of each step.
Such a loop shows the bytes at rest before a step and again after it; only the readings inside the step show
that the counter fell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


class CudaPeak:
    """PyTorch's caching allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_peak(self) -> int:
        """Return the most bytes handed out at once since the counter was last reset."""
        return torch.cuda.max_memory_allocated(self._device)

    def reserved_peak(self) -> int:
        """Return the most bytes taken from the device since that counter was last reset."""
        return torch.cuda.max_memory_reserved(self._device)

    def allocated(self) -> int:
        """Return the bytes handed out now."""
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        """Return the bytes taken from the device and not given back."""
        return torch.cuda.memory_reserved(self._device)


def allocator_peak(device: torch.device) -> CudaPeak | None:
    """Return the allocator of `device` if it counts; on a CPU only torch.profiler does, so None."""
    return CudaPeak(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class PeakBounds:
    """Bounds of the peak of a step, in bytes.

    Invariant: `at_least <= at_most` if `at_most` is known.
    """

    at_least: int
    at_most: int | None  # None: not known

    @classmethod
    def exactly(cls, nbytes: int) -> PeakBounds:
        """Return the bounds of a peak that was measured."""
        return cls(nbytes, nbytes)

    @classmethod
    def of(cls, readings: Sequence[int]) -> PeakBounds:
        """Return the bounds that readings of the counter show, from before a step to after it.

        See NOTE [ The counter is the user's ].
        """
        pairs = list(pairwise(readings))
        was_reset = any(after < before for before, after in pairs)
        at_least = max((after for before, after in pairs if after != before), default=0)
        return cls(at_least, None if was_reset else readings[-1])

    def joined(self, other: PeakBounds) -> PeakBounds:
        """Return the bounds of the larger peak of two steps."""
        unknown = self.at_most is None or other.at_most is None
        at_most = None if unknown else max(self.at_most or 0, other.at_most or 0)
        return PeakBounds(max(self.at_least, other.at_least), at_most)
