"""What is in the record of an allocator, what is left out of it, and the clock of its marks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoac.profiler import ProfilerBusy
from autoac.profiler.capture.allocations import AllocationRecord
from autoac.profiler.restore.backward_hooks import BackwardHooks
from autoac.profiler.restore.batch import Batch
from autoac.profiler.restore.isolated_call import Call
from autoac.profiler.restore.written_tensors import Originals
from autoac.profiler.timing.on_device import seconds
from autoac.profiler.timing.op_timer import (
    CLOCK_READ_EVERY,
    DeviceClock,
    HostClock,
    clock_of,
    host_clock,
    timed_forward,
)
from autoac.profiler.torch_facts.torch_trace import AllocationEvent, MarkEvent, OpEvent, TorchTrace

CPU = torch.device("cpu")


def taken(recording: TorchTrace) -> list[AllocationEvent | MarkEvent | OpEvent]:
    """What is recorded of two allocations, an op inside another, and a backward."""
    x = torch.ones(1000, requires_grad=True)
    with recording:
        recording.mark("first")
        y = torch.nn.functional.linear(x, torch.ones(500, 1000))
        recording.mark("second")
        y.sum().backward()
    return list(recording.events())


def test_allocations_and_marks_come_in_order_and_nothing_else() -> None:
    events = taken(TorchTrace(CPU))
    kinds = [type(entry) for entry in events]
    assert [entry.name for entry in events if isinstance(entry, MarkEvent)] == ["first", "second"]
    between = events[kinds.index(MarkEvent) + 1 : len(kinds) - 1 - kinds[::-1].index(MarkEvent)]
    assert next(entry.nbytes for entry in between if isinstance(entry, AllocationEvent)) == 2_000_000
    assert OpEvent not in kinds
    assert [entry.time_ns for entry in events] == sorted(entry.time_ns for entry in events)


def test_ops_that_nobody_asks_for_leave_no_trace() -> None:
    """Their names would lie between tensors on the heap for as long as the record is open."""
    taken(recording := TorchTrace(CPU))
    names = {event.name for event in every(recording._results.experimental_event_tree())}
    assert {name for name in names if "aten" in name or "Backward" in name} == set()


def every(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from every(event.children)


def test_ops_that_were_asked_for_are_told_and_the_nodes_of_backward() -> None:
    ran = [
        entry
        for entry in taken(TorchTrace(CPU, ops=["aten::linear", "aten::mv"]))
        if isinstance(entry, OpEvent)
    ]
    assert [entry.name for entry in ran if not entry.node] == ["aten::linear"], "mv runs inside linear"
    assert "SumBackward0" in [entry.name for entry in ran if entry.node]


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_marks_are_no_ops_for_modes() -> None:
    recording = TorchTrace(CPU)
    with Watching() as watching, recording:
        recording.mark("here")
        torch.ones(3).sin()
    assert watching.seen == ["aten.ones.default", "aten.sin.default"]
    assert [entry.name for entry in recording.events() if isinstance(entry, MarkEvent)] == ["here"]


def test_one_record_at_a_time() -> None:
    with TorchTrace(CPU), pytest.raises(ProfilerBusy), TorchTrace(CPU):
        pass
    with TorchTrace(CPU):
        pass


def test_the_clock_of_marks_stands_still_while_they_are_placed() -> None:
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


def test_the_clock_of_marks_never_runs_backward() -> None:
    readings = iter([0, 9, 9, 10, 11])  # the first mark takes 9, the others nothing
    host = HostClock(lambda: next(readings))
    for _ in range(4):
        host.stop()
        host.resume()
    assert host.times_ns() == [0, 0, 0, 0]


def test_a_record_counts_its_marks_by_the_clock() -> None:
    ticks = itertools.count()
    with AllocationRecord(CPU, HostClock(lambda: next(ticks))) as record:
        for _ in range(4):
            record.mark()
    assert len(record.times_ns) == len(record.positions) == 4


def test_the_clock_is_the_threads_own_only_where_backward_runs_on_that_thread() -> None:
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
    """A device that takes 1.5 us for whatever comes between two events."""

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
        """Without a stream torch takes the current device's, which is another one here."""
        assert stream == torch.device("cuda", 1)
        self.at_ms = Event.made * 1.5e-3
        Event.made += 1

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_on_a_device_marks_are_timed_by_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "get_device_module", lambda device: stream)
    clock = clock_of(torch.device("cuda", 1))
    assert isinstance(clock, DeviceClock)
    with AllocationRecord(CPU, clock) as record:
        assert [record.mark() for _ in range(4)] == [0, 1, 2, 3]
    assert record.times_ns == [0, 1500, 3000, 4500]
    assert stream.synchronized, "elapsed times are there once the device has come to the events"


def test_an_op_on_a_device_is_timed_by_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "get_device_module", lambda device: stream)
    second = torch.device("cuda", 1)
    assert seconds(lambda: None, second) == pytest.approx(1.5e-6)
    originals = Originals()
    batch = Batch((torch.ones(2),), {}, torch.Tensor.detach, originals)
    samples = timed_forward(Call(nn.Tanh(), batch, originals, lambda: None, BackwardHooks()), second)
    assert [value for found in samples.values() for value in found] == pytest.approx([1.5])
    assert stream.synchronized


def test_a_record_without_marks_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Stream())
    assert DeviceClock(torch.device("cuda")).times_ns() == []
