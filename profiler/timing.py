"""How long each op takes on the device."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from typing import Any

import torch


class DeviceClock:
    """Stamps before and after each op. On the CPU the marks of the allocation record are the clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[Any] = []

    def stamp(self) -> None:
        if self._device.type != "cpu":
            event = torch.Event(device=self._device, enable_timing=True)
            event.record()
            self._stamps.append(event)

    def runtimes_us(self, mark_times_ns: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[float]:
        """Run time of each op; `spans` are the marks around each."""
        if self._device.type == "cpu":
            return [(mark_times_ns[b] - mark_times_ns[a]) / 1e3 for a, b in spans]
        torch.get_device_module(self._device).synchronize(self._device)
        pairs = zip(self._stamps[::2], self._stamps[1::2], strict=True)
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def by_signature(
    runtimes_us: Sequence[float], signatures: Sequence[Hashable]
) -> tuple[list[float], list[float]]:
    """Median and median absolute deviation over the calls that do the same work, for each call.

    Models repeat their blocks, so one step measures most kinds of op many times.
    """
    samples: dict[Hashable, list[float]] = {}
    for runtime, signature in zip(runtimes_us, signatures, strict=True):
        samples.setdefault(signature, []).append(runtime)
    middle = {key: statistics.median(values) for key, values in samples.items()}
    spread = {
        key: statistics.median(abs(value - middle[key]) for value in values)
        for key, values in samples.items()
    }
    return [round(middle[s], 3) for s in signatures], [round(spread[s], 3) for s in signatures]
