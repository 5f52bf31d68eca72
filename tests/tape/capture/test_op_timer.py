"""Test the clocks that time ops: the host's, a thread's, and events of a device's stream."""

from __future__ import annotations

import time

import pytest
import torch

from autoac.tape.capture.allocations import AllocationRecord
from autoac.tape.capture.op_timer import CLOCK_READ_EVERY, DeviceClock, HostClock, clock_of, host_clock

CPU = torch.device("cpu")


def test_clock_stands_still_while_a_mark_is_placed() -> None:
    now, read = 0, 0

    def clock() -> int:
        nonlocal read
        read += 1
        return now

    host = HostClock(clock)
    for _ in range(40):
        now += 100  # work
        host.stop()
        now += 7  # a mark
        host.resume()
    assert host.times_ns() == list(range(100, 4100, 100))
    assert read == 40 + 40 // CLOCK_READ_EVERY  # a system call each


def test_times_of_marks_never_decrease() -> None:
    readings = iter([0, 9, 9, 10, 11])  # the first mark takes 9, the others nothing
    host = HostClock(lambda: next(readings))
    for _ in range(4):
        host.stop()
        host.resume()
    assert host.times_ns() == [0, 0, 0, 0]


def test_thread_clock_is_used_only_if_all_work_is_on_that_thread() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert host_clock(CPU) is time.thread_time_ns
        assert host_clock(torch.device("cuda")) is time.perf_counter_ns
        torch.set_num_threads(2)
        assert host_clock(CPU) is time.perf_counter_ns
    finally:
        torch.set_num_threads(threads)


class Stream:
    """A device that takes 1.5 us between any two events."""

    synchronized = False

    def synchronize(self, device: torch.device) -> None:
        self.synchronized = True

    def current_stream(self, device: torch.device) -> torch.device:
        return device


class Event:
    made = 0

    def __init__(self, *, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing
        assert device.type == "cuda"

    def record(self, stream: torch.device) -> None:
        """Check the stream: by default torch takes that of the current device, here another one."""
        assert stream == torch.device("cuda", 1)
        self.at_ms = Event.made * 1.5e-3
        Event.made += 1

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_marks_on_a_device_are_timed_by_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "get_device_module", lambda device: stream)
    clock = clock_of(torch.device("cuda", 1))
    assert isinstance(clock, DeviceClock)
    with AllocationRecord(CPU, clock) as record:
        assert [record.mark() for _ in range(4)] == [0, 1, 2, 3]
    assert record.times_ns == [0, 1500, 3000, 4500]
    assert stream.synchronized, "elapsed times exist once the device has reached the events"


def test_time_of_a_device_never_runs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mark is in a stream that is behind the first one's, and that catches up."""
    at_ms = iter([0.0, 5.0, 3.0, 3.0, 4.0, 4.0, 7.0, 7.0])  # of stops and starts by turns
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Event, "record", lambda self, stream: setattr(self, "at_ms", next(at_ms)))
    monkeypatch.setattr(torch, "get_device_module", lambda device: Stream())
    with AllocationRecord(CPU, clock_of(torch.device("cuda", 1))) as record:
        for _ in range(4):
            record.mark()
    assert record.times_ns == [0, 0, 0, 2_000_000]


def test_clock_without_marks_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Stream())
    assert DeviceClock(torch.device("cuda")).times_ns() == []
