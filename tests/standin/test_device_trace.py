"""Test that torch.profiler's trace of a device's allocator is complete, or refused."""

from __future__ import annotations

import threading
from itertools import accumulate
from types import ModuleType

import pytest
import torch
from blocks import Body
from torch import Tensor, nn

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import bounds, build
from autoac.profiler import CannotProfile, profile
from autoac.tape.capture.allocations import AllocationRecord
from autoac.tape.torch_facts.torch_trace import AllocationEvent, TorchTrace
from benchmarks.models.modules import Transformer

CUDA = torch.device("cuda", 0)


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Transformer(layers=1).cuda(), torch.randn(2, 8, 32, device="cuda")


def traced(recording: TorchTrace, model: nn.Module, x: Tensor) -> list[AllocationEvent]:
    """Return the trace of a forward on this thread and a backward on the device's thread."""
    with recording:
        sum(out.sum() for out in model(x).values()).backward()
    return [e for e in recording.events() if isinstance(e, AllocationEvent) and e.device.type == "cuda"]


def test_trace_has_every_allocation_and_free_of_a_step(gpu: ModuleType) -> None:
    model, x = small()
    before = gpu.live(0)
    gpu.reset_peak(0)
    recording = TorchTrace(CUDA)
    found = traced(recording, model, x)
    live = list(accumulate((entry.nbytes for entry in found), initial=before))
    assert live[-1] == gpu.live(0)
    assert max(live) == gpu.peak(0)
    recording.check_complete("a step")


def test_trace_of_every_device_has_all_allocations(gpu: ModuleType) -> None:
    with (recording := TorchTrace()):
        held = [torch.empty(1000, device=device) for device in ("cpu", "cuda:0", "cuda:1")]
    found = {entry.device.type: entry for entry in recording.events() if isinstance(entry, AllocationEvent)}
    assert set(found) == {"cpu", "cuda"}
    assert found["cuda"].address == held[2].data_ptr()


def test_record_has_a_mark_of_each_thread_that_it_covers(gpu: ModuleType) -> None:
    """Other threads may let go of tensors of a step, and that of backward when the record has ended."""
    numbers: list[int] = []

    def mark(_: object = None) -> None:
        numbers.append(record.mark())

    with AllocationRecord(CUDA) as record:
        mark()
        (thread := threading.Thread(target=mark)).start()
        thread.join()
        x = torch.ones((), device=CUDA, requires_grad=True).clone()
        x.register_hook(mark)
        x.backward()
        mark()
    mark()
    assert numbers == [0, 0, 1, 2, 2]
    assert record.positions == sorted(record.positions)
    assert len(record.positions) == len(record.times_ns) == 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_trace_that_lacks_allocations_is_refused(gpu: ModuleType) -> None:
    """Their bytes, here those of a thread of TorchScript, would be missing from every plan."""

    @torch.jit.script
    def forked(x: Tensor) -> Tensor:
        return torch.jit.wait(torch.jit.fork(torch.sin, x))

    model = Body(lambda m, x: forked(m.inner(x)) @ m.weight).cuda()
    x = torch.randn(4, 4, device="cuda")
    with pytest.raises(CannotProfile, match="on threads that") as caught:
        profile(model, x)
    assert caught.value.where == "Body"
    with pytest.raises(CannotProfile, match="this block"), AllocatorTimeline("cuda"):
        model(x)


def test_allocator_that_reports_nothing_is_refused(gpu: ModuleType) -> None:
    """CUDA's `cudaMallocAsync` and pluggable allocators report nothing to torch.profiler."""
    model, x = small()
    gpu.set_reports(False)
    with pytest.raises(CannotProfile, match="reports nothing"):
        profile(model, x)


def test_larger_blocks_count_in_the_plan_but_not_in_the_fingerprint(gpu: ModuleType) -> None:
    """CUDA's caching allocator does not split a block if less than 1 MiB would remain."""
    model, x = small()
    exact = profile(model, x)
    gpu.set_slack(512)
    found = profile(model, x)
    assert found.fingerprint == exact.fingerprint
    assert found.storages.nbytes == exact.storages.nbytes
    slack = [512 if nbytes else 0 for nbytes in found.storages.nbytes]
    assert list(found.storages.slack_nbytes) == slack
    more = bounds(build(found)).ceiling - bounds(build(exact)).ceiling
    assert more > 0
    assert more % 512 == 0


def test_gpu_without_an_index_is_the_current_one(gpu: ModuleType) -> None:
    """The counter of that device is read, so its events must be traced too."""
    gpu.set_device(1)
    with AllocatorTimeline("cuda") as timeline:
        held = [torch.empty(100, device=f"cuda:{index}") for index in range(2)]
    assert timeline.device == torch.device("cuda", 1)
    assert [event.live_bytes for event in timeline.events] == [gpu.live(1)]
    del held


def test_events_are_absolute_and_the_peak_is_that_of_the_allocator(gpu: ModuleType) -> None:
    held = torch.empty(1 << 18, device="cuda")
    with AllocatorTimeline("cuda") as timeline:
        torch.empty(1 << 18, device="cuda")
    assert timeline.peak_bytes == gpu.peak(0) == 2 * held.nbytes
    assert [event.live_bytes for event in timeline.events] == [2 * held.nbytes, held.nbytes]
