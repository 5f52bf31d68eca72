"""Models wrapped by torch.distributed: profiled without harm, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import ConvNet
from ranks import told_by_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ac_client
from ac_client.measure import AllocatorTimeline
from autoac.planner import bounds, build
from autoac.profiler import DATASHEETS, CannotProfile, observe, profile
from autoac.profiler.randomness import generators_restored
from autoac.profiler.wrappers import buckets_of

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """A world of this process alone, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(before)


def made() -> nn.Module:
    torch.manual_seed(0)
    return ConvNet()


def batch() -> Tensor:
    with generators_restored(torch.device("cpu")):
        torch.manual_seed(1)
        return torch.randn(16, 3, 8, 8)


def step(model: nn.Module) -> Tensor:
    torch.manual_seed(2)
    out = model(batch())
    loss = out.square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_as_if_nothing_had_been_profiled(way: str) -> None:
    def trained(profiled: bool) -> list[Tensor]:
        model = DistributedDataParallel(made(), **WAYS[way])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            if profiled:
                profile(model, batch(), loss=torch.sum)
            losses.append(step(model))
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *model.parameters(), *model.buffers()]

    for a, b in zip(trained(False), trained(True), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_sent_and_no_attribute_changed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(made(), **WAYS[way])
    attributes = dict(vars(model))
    monkeypatch.setattr(model, "_sync_buffers", lambda: pytest.fail("buffers were sent"))
    monkeypatch.setattr(model, "reducer", Reducer())
    profile(model, batch(), loss=torch.sum)
    monkeypatch.undo()
    assert vars(model).keys() == attributes.keys()
    assert all(vars(model)[name] is value for name, value in attributes.items())


class Reducer:
    """Fails where a real one would reduce."""

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"the reducer was asked to {name}")


@pytest.mark.parametrize("way", ["plain", "gradients in buckets"])
def test_buckets_are_in_the_peak(way: str) -> None:
    def run(standing: int) -> int:
        model = DistributedDataParallel(made(), **WAYS[way])
        x = batch()
        step(model)  # buckets are laid out anew after the first backward
        step(model)
        model.zero_grad()
        with AllocatorTimeline(base=standing) as timeline:
            out = model(x)
            out.sum().backward()
        return timeline.peak_bytes

    model = DistributedDataParallel(made(), **WAYS[way])
    found = profile(model, batch(), loss=torch.sum)
    parameters = sum(p.nbytes for p in model.parameters())
    assert found.static.gradients == parameters
    assert found.gradient_nbytes == (0 if way == "gradients in buckets" else parameters)
    predicted = bounds(build(found)).ceiling
    assert run(found.static.total) == pytest.approx(predicted, rel=0.01)


def test_a_model_inside_its_wrapper_knows_of_the_buckets() -> None:
    """`DistributedDataParallel(apply(model))`: it is profiled inside the forward of its wrapper."""
    model = made()
    found: list[int] = []

    def once(module: nn.Module, args: Any) -> None:
        handle.remove()
        found.append(observe(module, args, {}, loss=torch.sum).static.gradients)

    handle = model.register_forward_pre_hook(once)
    step(DistributedDataParallel(model))
    assert found[0] == sum(p.nbytes for p in model.parameters())


def test_a_planned_model_trains_in_its_wrapper() -> None:
    plain, planned = DistributedDataParallel(made()), made()
    ac_client.apply(planned, 1.0)
    wrapped = DistributedDataParallel(planned)
    for _ in range(2):
        assert torch.equal(step(plain), step(wrapped))
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("on", [None, DATASHEETS["h100"]], ids=["hollow", "fake"])
def test_a_sharded_model_is_refused_and_left_whole(on: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = model(torch.ones(1, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(CannotProfile, match=r"FSDPLinear at 0.*not sharded"):
        profile(model, torch.ones(1, 4), on=on)
    assert torch.equal(model(torch.ones(1, 4)), expected)


RANK = """
from torch.nn.parallel import DistributedDataParallel
from models import ConvNet
from ranks import told_by_ranks
from autoac.profiler import profile

torch.manual_seed(0)
model = DistributedDataParallel(ConvNet())
for i in range(3):
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * i + rank))
    if rank == 0 and i != 1:  # alone: between the first two steps the reducer itself talks
        profile(model, x, loss=torch.sum)
    torch.manual_seed(i)
    model(x).sum().backward()
print([round(p.grad.sum().item(), 4) for p in model.parameters()])
"""


def test_one_rank_of_two_may_profile_alone(tmp_path: Path) -> None:
    told = told_by_ranks(RANK, tmp_path / "store")
    assert told[0] == told[1] != ""


def test_buckets_count_for_a_module_around_the_wrapped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = DistributedDataParallel(made())
    around = nn.Sequential(wrapped.module)
    assert buckets_of(around, None).nbytes == 0
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", wrapped)  # as in its forward
    assert buckets_of(around, None).nbytes == sum(p.nbytes for p in wrapped.parameters())
    assert buckets_of(nn.Linear(2, 2), None).nbytes == 0
