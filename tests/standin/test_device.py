"""Test the behavior of the stand-in that the other tests of this folder rely on."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from autoac.planner.memory.caching_allocator import Allocate, replay
from tests.planner.memory.test_caching_allocator import random_log

MIB = 1 << 20


def test_tensors_count_in_blocks_of_512_bytes(gpu):
    before = gpu.live(0)
    held = torch.ones(129, device="cuda")
    assert held.device == torch.device("cuda", 0)
    assert gpu.live(0) == before + 1024 == torch.cuda.memory_allocated()


def blocks_of(*nbytes: int) -> list[torch.Tensor]:
    return [torch.empty(n, dtype=torch.uint8, device="cuda") for n in nbytes]


def test_freed_memory_is_nan(gpu: ModuleType) -> None:
    (first,) = blocks_of(512)
    address = first.fill_(1).data_ptr()
    del first
    (second,) = blocks_of(512)
    assert second.data_ptr() == address
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert second.view(dtype).isnan().all()


def on_side(
    work: object, *, waits: bool = True, recorded: bool = True
) -> tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]:
    """Make a tensor on the current stream, and from it another on a side stream."""
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = work(x)
    if recorded:
        x.record_stream(side)
    return side, x, y


def test_work_that_waits_for_what_it_reads_is_right(gpu: ModuleType) -> None:
    side, x, y = on_side(torch.exp)
    torch.cuda.current_stream().wait_event(side.record_event())
    assert torch.equal((x.exp() - y).cpu(), torch.zeros(4))
    torch.cuda.synchronize()
    assert gpu.take_races() == []


def test_work_of_a_side_stream_is_late(gpu: ModuleType) -> None:
    _, _, y = on_side(torch.exp)
    assert (y + 1).isnan().all()
    assert "aten::add on stream 0 of cuda:0 reads what aten::exp on stream" in gpu.take_races()[0]


def test_work_of_the_current_stream_is_late_for_a_side_stream(gpu: ModuleType) -> None:
    side, _, y = on_side(torch.exp, waits=False)
    side.synchronize()
    assert y.isnan().all()
    assert "reads what aten::fill_ on stream 0" in gpu.take_races()[0]


def test_write_must_wait_for_the_readers(gpu: ModuleType) -> None:
    _, x, _ = on_side(torch.exp)
    assert x.zero_().isnan().all()
    assert "writes what aten::exp" in gpu.take_races()[0]


def test_memory_must_not_be_freed_while_another_stream_uses_it(gpu: ModuleType) -> None:
    side, x, _ = on_side(torch.exp, recorded=False)
    del x
    assert "is freed while aten::exp on stream" in gpu.take_races()[0]
    side.synchronize()
    held = on_side(torch.exp, recorded=False)
    held[0].synchronize()
    del held
    assert gpu.take_races() == []


def test_recorded_memory_serves_again_once_the_stream_is_over(gpu: ModuleType) -> None:
    torch.cuda.empty_cache()  # waits for all earlier work
    side, x, _ = on_side(torch.exp)
    address = x.data_ptr()
    del x
    held = torch.ones(4, device="cuda")
    assert held.data_ptr() != address
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.current"] == stats["allocated_bytes.all.current"] + 512
    side.synchronize()
    others = [torch.ones(4, device="cuda") for _ in range(3)]
    assert address in [other.data_ptr() for other in others]


def test_copies_between_devices_wait_for_each_other(gpu: ModuleType) -> None:
    x = torch.ones(4, device="cuda:0") * 2
    y = x.to("cuda:1") + 1
    assert y.tolist() == [3.0] * 4
    assert x.mul_(0).to("cuda:1").tolist() == [0.0] * 4


def test_random_allocations_reserve_what_the_planner_predicts(gpu: ModuleType) -> None:
    for seed in range(12):
        log = random_log(random.Random(seed), 60)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        held: dict[int, torch.Tensor] = {}
        reserved = []
        for event in log:
            if isinstance(event, Allocate):
                (held[event.name],) = blocks_of(event.nbytes)
            else:
                del held[event.name]
            reserved.append(torch.cuda.memory_reserved())
        assert reserved == replay(log), seed
        held.clear()


def test_full_device_gives_back_its_cache_before_it_is_out_of_memory(gpu: ModuleType) -> None:
    torch.cuda.empty_cache()
    gpu.set_limit(0, 40 * MIB)
    held = blocks_of(12 * MIB, 12 * MIB)
    del held[0]
    held += blocks_of(28 * MIB)  # in the place of the first segment
    assert torch.cuda.memory_reserved() == 40 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        blocks_of(1)
