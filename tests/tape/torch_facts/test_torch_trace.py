"""Test which events a trace contains and which it leaves out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepping import SeenOps
from torch.profiler import record_function

from autoac.tape.capture.allocations import AllocationRecord, allocated_between
from autoac.tape.torch_facts.torch_trace import AllocationEvent, MarkEvent, NodeEvent, TorchTrace

CPU = torch.device("cpu")


def traced(recording: TorchTrace) -> list[AllocationEvent | MarkEvent | NodeEvent]:
    """Return the trace of two allocations, nested ops, and a backward."""
    x = torch.ones(1000, requires_grad=True)
    with recording:
        recording.mark("first")
        y = torch.nn.functional.linear(x, torch.ones(500, 1000))
        recording.mark("second")
        y.sum().backward()
    return list(recording.events())


def test_trace_lists_allocations_and_marks_in_order_and_nothing_else() -> None:
    events = traced(TorchTrace(CPU))
    kinds = [type(entry) for entry in events]
    assert [entry.name for entry in events if isinstance(entry, MarkEvent)] == ["first", "second"]
    between = events[kinds.index(MarkEvent) + 1 : len(kinds) - 1 - kinds[::-1].index(MarkEvent)]
    assert next(entry.nbytes for entry in between if isinstance(entry, AllocationEvent)) == 2_000_000
    assert NodeEvent not in kinds
    assert [entry.time_ns for entry in events] == sorted(entry.time_ns for entry in events)


def test_ops_are_left_out_of_the_trace() -> None:
    """Their names would lie between tensors on the heap for as long as the trace is open."""
    traced(recording := TorchTrace(CPU))
    names = {event.name for event in every(recording._results.experimental_event_tree())}
    assert {name for name in names if "aten" in name or "Backward" in name} == set()


def every(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from every(event.children)


def test_dispatch_modes_do_not_see_marks() -> None:
    recording = TorchTrace(CPU)
    with SeenOps() as watching, recording:
        recording.mark("here")
        torch.ones(3).sin()
    assert watching.ops == ["aten.ones.default", "aten.sin.default"]
    assert [entry.name for entry in recording.events() if isinstance(entry, MarkEvent)] == ["here"]


class CDevice(ctypes.Structure):
    """Hold a `c10::Device`."""

    _fields_ = (("type", ctypes.c_int8), ("index", ctypes.c_int8))


@pytest.mark.parametrize(("kind", "device"), [("cpu", CDevice(0, -1)), ("cuda", CDevice(1, 0))])
def test_trace_has_what_the_allocator_of_a_device_reports(kind: str, device: CDevice) -> None:
    """Torch drops such an event of another device than the CPU where no range is open around it."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    report = library._ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
    report.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_size_t, CDevice]
    with (recording := TorchTrace()):
        report(0x1000, 4096, 0, 0, device)
        report(0x1000, -4096, 0, 0, device)
    found = [event for event in recording.events() if isinstance(event, AllocationEvent)]
    assert [(e.device.type, e.nbytes) for e in found] == [(kind, 4096), (kind, -4096)]


def test_events_that_are_neither_ops_nor_allocations_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the tree has calls of its runtime, whose fields have no scope."""
    x = torch.ones(4, requires_grad=True)
    with (trace := TorchTrace(CPU, nodes=True)):
        trace.backward_runs(True)
        x.sin().sum().backward()
    found, of_runtime = list(trace._walk()), SimpleNamespace(name="cudaLaunchKernel", end_time_ns=1)
    expected = list(trace.events())
    monkeypatch.setattr(trace, "_walk", lambda: [(0, of_runtime, SimpleNamespace()), *found])
    assert list(trace.events()) == expected
    assert sum(isinstance(event, NodeEvent) for event in expected) >= 2


def test_record_can_be_read_after_the_next_one_has_run() -> None:
    first, second = AllocationRecord(CPU), AllocationRecord(CPU)
    for record, length in ((first, 500), (second, 700)):
        with contextlib.closing(record.__enter__()):
            record.mark()
            x = torch.empty(length)
            record.mark()
        assert not record.changes
        del x
    for record, nbytes in ((second, 2800), (first, 2000)):
        record.read()
        assert [block.nbytes for block in allocated_between(record, 0, 1)] == [nbytes]


def test_range_that_outlives_a_trace_writes_nothing_into_freed_memory() -> None:
    """As those of the loop, and of messages between the stages of a pipeline, which end in a later trace."""
    ranges = []
    with TorchTrace(CPU, nodes=True) as trace:
        ranges += [record_function(str(i)).__enter__() for i in range(100)]
        trace.mark("still seen")
    assert [event.name for event in trace.events() if isinstance(event, MarkEvent)] == ["still seen"]
    del trace
    gc.collect()
    taken = [torch.zeros(nbytes // 4) for nbytes in (1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17) * 40]
    with TorchTrace(CPU):
        for one in ranges:
            one.__exit__(None, None, None)
    assert not any(block.any() for block in taken)


def test_nodes_of_a_backward_are_traced_where_it_is_told_of() -> None:
    with TorchTrace(CPU, nodes=True) as trace:
        x = torch.ones(8, requires_grad=True)
        x.exp().sum().backward()
        out = x.sin().sum()
        trace.backward_runs(True)
        out.backward()
        trace.backward_runs(False)
        with record_function("of the loop"):
            x.exp()
    names = [event.name for event in trace.events() if isinstance(event, NodeEvent)]
    assert names == ["SumBackward0", "SinBackward0", "torch::autograd::AccumulateGrad"]
