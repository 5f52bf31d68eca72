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
from itertools import pairwise

import torch


class CudaPeak:
    """PyTorch's caching allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_peak(self) -> int:
        """Return the most bytes handed out at once since the counter was last reset."""
        return self._count("allocated_bytes", "peak")

    def reserved_peak(self) -> int:
        """Return the most bytes taken from the device since that counter was last reset."""
        return self._count("reserved_bytes", "peak")

    def reserved(self) -> int:
        """Return the bytes taken from the device and not given back."""
        return self._count("reserved_bytes", "current")

    def _count(self, of: str, which: str) -> int:
        """Read a counter; `torch.cuda.max_memory_allocated` takes longer, since it sorts all of them."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats[of]["all"][which]) if stats else 0


def allocator_peak(device: torch.device) -> CudaPeak | None:
    """Return the allocator of `device` if it counts; on a CPU only torch.profiler does, so None."""
    return CudaPeak(device) if device.type == "cuda" else None


def least_peak(readings: Sequence[int]) -> int:
    """Return the bytes that a step needed at least, by readings of the counter from before it to after it.

    See NOTE [ The counter is the user's ].
    """
    return max((after for before, after in pairwise(readings) if after != before), default=0)
