"""Measure how long each kind of op takes on the device.

Times come from the ops of an observed step and from what its backward recomputes, which is warm. A step runs
each kind of op once per block, so there are several samples of most kinds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from autoac.tape.capture.backlog import Backlog, record_event

SAMPLES = 5  # enough for one kind of op
LEAST_SAMPLES = 3  # of replays, with which those of forward are not used
CLOCK_READ_EVERY = 8  # stops of the clock

OpTime = tuple[float, float, int]
"""Median and median absolute deviation in microseconds, and the number of samples."""

Samples = dict[Hashable, list[float]]
"""Run times in microseconds, by signature."""


def host_clock(device: torch.device) -> Callable[[], int]:
    """Return the host's clock for a step on `device`, in nanoseconds.

    On a CPU with one thread, the clock is the CPU time of that thread, which other processes do not affect.
    Otherwise it is the time of day, since the CPU time of one thread would leave out the other threads. On
    other devices than a CPU, torch runs backward on such a thread.
    """
    single_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time_ns if single_thread else time.perf_counter_ns


class HostClock:
    """The host's clock, which stands still from `stop` to `resume`.

    Reading a thread's clock is a system call, which can take longer than an op. So only one stop in
    `CLOCK_READ_EVERY` is measured, and every stop is taken to be as long as the median of the measured ones.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._stopped_ns: list[int] = []
        self._lost_ns: list[int] = []  # duration of each measured stop

    def stop(self) -> None:
        self._stopped_ns.append(self._now_ns())

    def resume(self) -> None:
        if len(self._stopped_ns) % CLOCK_READ_EVERY == 1:
            self._lost_ns.append(self._now_ns() - self._stopped_ns[-1])

    def times_ns(self) -> list[int]:
        """Return the time of each `stop` in ns, without the time that reading the clock took."""
        lost = round(statistics.median(self._lost_ns)) if self._lost_ns else 0
        times = (stopped - i * lost for i, stopped in enumerate(self._stopped_ns))
        return list(itertools.accumulate(times, max))  # never backward


class DeviceClock:
    """Events in the device's stream: when the device, not the host, reached each mark.

    Between `stop` and `resume`, the clock stands still. If the device runs out of work, the time in which it
    waits for the host counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stops: list[torch.Event] = []
        self._starts: list[torch.Event] = []  # after each stop

    def stop(self) -> None:
        self._stops.append(record_event(self._device))

    def resume(self) -> None:
        self._starts.append(record_event(self._device))

    def times_ns(self) -> list[int]:
        """Wait for the device, and return the time of each stop, relative to the first."""
        torch.get_device_module(self._device).synchronize(self._device)
        # Between neighbors, so that a float of milliseconds can resolve microseconds. Where the two are in
        # different streams, the second may be earlier.
        spans = zip(self._starts, self._stops[1:], strict=False)
        steps_ms = (begin.elapsed_time(end) for begin, end in spans)
        times_ms = itertools.accumulate(itertools.accumulate(steps_ms, initial=0.0), max)
        return [round(ms * 1e6) for ms in times_ms][: len(self._stops)]


Clock = HostClock | DeviceClock
"""Measures when each mark of a step is reached. The clock is stopped while a mark is placed."""


def clock_of(device: torch.device) -> Clock:
    """Return the clock that times the ops of a step on `device`."""
    return HostClock(host_clock(device)) if device.type == "cpu" else DeviceClock(device)


class OpSpans:
    """Measure the run times of ops: by the clock on the CPU, by events of the device's stream elsewhere.

    Work is queued ahead of each op (backlog.py).

    Args:
        device: that runs the ops.
        backlog: of the device.
        sparing: work is queued only where the device has caught up with its host. So a step takes about as
            long as its host does, and more kinds of op have late times alone.
    """

    def __init__(self, device: torch.device, backlog: Backlog, *, sparing: bool = False) -> None:
        self._on_cpu = device.type == "cpu"
        self._device = device
        self._backlog = backlog
        self._sparing = sparing
        self._host_now = host_clock(device)
        self._spans: list[tuple[Hashable, Any, Any]] = []  # signature, begin, end
        self._late: set[int] = set()  # spans that may include time of the host

    def begin(self) -> Any:
        """Return when an op begins, for `end`."""
        if self._on_cpu:
            return self._host_now()
        latest = len(self._spans) - 1
        if not self._sparing or latest < 0 or latest in self._late or self._spans[latest][2].query():
            self._backlog.queue()
        return record_event(self._device)

    def end(self, signature: Hashable, began: Any) -> None:
        """Note that an op of the kind `signature` ends, which began at `began`."""
        ended = self._host_now() if self._on_cpu else record_event(self._device)
        self._spans.append((signature, began, ended))
        if not self._on_cpu and not self._backlog.was_ahead(began):
            self._late.add(len(self._spans) - 1)

    def samples(self) -> Samples:
        """Return the run times; those that may include time of the host only if a kind has no others.

        Waits for a device with a stream.
        """
        if not self._on_cpu and self._spans:
            torch.get_device_module(self._device).synchronize(self._device)
        on_time = {span[0] for i, span in enumerate(self._spans) if i not in self._late}
        found: Samples = {}
        for i, (signature, began, ended) in enumerate(self._spans):
            if i not in self._late or signature not in on_time:
                us = (ended - began) / 1e3 if self._on_cpu else began.elapsed_time(ended) * 1e3
                found.setdefault(signature, []).append(float(us))
        return found

    def note(self) -> str:
        """Return a sentence on times that may include time of the host; "" if none does."""
        return self._backlog.note()


def median_and_spread(
    in_step_us: Sequence[float], signatures: Sequence[Hashable], more: Mapping[Hashable, Sequence[float]]
) -> dict[Hashable, OpTime]:
    """Return median, median absolute deviation and number of samples, by kind of op.

    If `more` has enough samples of a kind, those of the profiled step are not used: recording the allocations
    makes each op a little slower.
    """
    samples: Samples = {}
    for runtime, signature in zip(in_step_us, signatures, strict=True):
        samples.setdefault(signature, []).append(runtime)
    found: dict[Hashable, OpTime] = {}
    for signature, own in samples.items():
        others = list(more.get(signature, ()))
        used = others if len(others) >= LEAST_SAMPLES else own + others
        median, spread = median_and_deviation(used)
        found[signature] = (round(median, 3), round(spread, 3), len(used))
    return found


def median_and_deviation(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median and the median absolute deviation."""
    median = statistics.median(samples)
    return median, statistics.median(abs(sample - median) for sample in samples)
