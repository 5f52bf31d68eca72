"""Test that the stand-in captures and replays as CUDA does: NOTE [ Capture ] in capture.h."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

MIB = 1 << 20


def captured(work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def test_nothing_runs_before_the_replay(gpu: ModuleType) -> None:
    x, total = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph, out = captured(lambda: total.add_(x).exp())
    assert out.isnan().all()
    assert torch.equal(total.cpu(), torch.zeros(4))
    for step in (1.0, 2.0):
        graph.replay()
        assert torch.equal(out.cpu(), torch.full((4,), step).exp())
    x.copy_(torch.full((4,), 3.0))
    graph.replay()
    assert torch.equal(total.cpu(), torch.full((4,), 5.0))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.current_stream().record_event().query(),
        lambda x: torch.cuda.empty_cache(),
        lambda x: x.add_(torch.ones(4).to("cuda")),
    ],
    ids=["item", "cpu", "bool", "nonzero", "device", "stream", "event", "cache", "from host"],
)
def test_host_that_waits_in_a_capture_is_an_error(gpu: ModuleType, read: Callable[[Tensor], object]) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="the capture is invalid") as raised:
        captured(lambda: (read(x), x)[1])
    assert "operation not permitted when stream is capturing" in str(raised.value.__context__)
    graph, out = captured(lambda: x + 1)  # the next capture is not affected
    graph.replay()
    assert torch.equal(out.cpu(), torch.full((4,), 2.0))


def test_random_numbers_of_replays_are_those_of_eager_calls(gpu: ModuleType) -> None:
    x = torch.ones(64, device="cuda")
    torch.manual_seed(3)
    eager = [(F.dropout(x).cpu(), torch.rand(2, device="cuda").cpu()) for _ in range(6)]
    torch.manual_seed(3)
    graph, out = captured(lambda: F.dropout(x))
    for dropped, drawn in eager:
        graph.replay()
        assert torch.equal(out.cpu(), dropped)
        assert torch.equal(torch.rand(2, device="cuda").cpu(), drawn)


def test_set_state_rewinds_within_a_capture_and_sets_no_other_seed(gpu: ModuleType) -> None:
    x = torch.ones(64, device="cuda")

    def twice() -> Tensor:
        state = torch.cuda.get_rng_state()
        first = F.dropout(x)
        torch.cuda.set_rng_state(state)
        return first - F.dropout(x)

    graph, out = captured(twice)
    for _ in range(2):
        graph.replay()
        assert torch.equal(out.cpu(), torch.zeros(64))
    with pytest.raises(RuntimeError, match="only if new seed is the same"):
        captured(lambda: (torch.manual_seed(7), x)[1])
    generator = torch.cuda.default_generators[0]
    for call in (generator.get_offset, generator.seed, lambda: generator.set_offset(4)):
        with pytest.raises(RuntimeError, match="during CUDA graph capture"):
            captured(lambda call=call: (call(), x)[1])


def test_graph_has_memory_of_its_own(gpu: ModuleType) -> None:
    torch.cuda.empty_cache()
    x = torch.ones(4 * MIB, device="cuda")
    reserved = torch.cuda.memory_reserved()
    gpu.reset_peak(0)
    live = gpu.live(0)
    graph, out = captured(lambda: (x * 2 + 1).sum())
    assert gpu.peak(0) == live + 32 * MIB
    assert gpu.live(0) == live + 512
    pools = [one for one in torch.cuda.memory_snapshot() if any(one["segment_pool_id"])]
    assert sum(one["total_size"] for one in pools) == 34 * MIB
    assert sum(one["allocated_size"] for one in pools) == 512
    assert torch.cuda.memory_reserved() == reserved + 34 * MIB
    held = torch.ones(4 * MIB, device="cuda")  # not in the pool
    graph.replay()
    assert out.item() == 12 * MIB
    assert torch.equal(held.cpu(), torch.ones(4 * MIB))
    del graph, out, held
    torch.cuda.empty_cache()
    assert not any(any(one["segment_pool_id"]) for one in torch.cuda.memory_snapshot())
