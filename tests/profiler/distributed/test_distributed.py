"""Test that models wrapped by torch.distributed are profiled in a step of all ranks, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from awkward_modules import ConvNet
from ranks import outputs_of_ranks
from stepping import seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import bounds, build, plan
from autoac.profiler import DATASHEETS, CannotProfile, ProfilerBusy, observe, profile
from autoac.tape.torch_facts.rng import generators_restored

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture(autouse=True, scope="module")
def one_rank(one_thread: None) -> Iterator[None]:
    """Provide a process group with this process as its only rank, on one thread."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
def test_profile_does_not_change_training(way: str) -> None:
    def trained(profiled: bool) -> list[Tensor]:
        model = DistributedDataParallel(seeded(ConvNet), **WAYS[way])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            if profiled:
                profile(model, batch(), loss=torch.sum)
            losses.append(step(model))
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *model.parameters(), *model.buffers()]

    assert_equal(trained(True), trained(False))


@pytest.mark.parametrize("way", ["plain", "gradients in buckets"])
def test_buckets_count_in_the_peak(way: str) -> None:
    def run(standing: int) -> int:
        model = DistributedDataParallel(seeded(ConvNet), **WAYS[way])
        x = batch()
        step(model)  # DDP rebuilds its buckets after the first backward
        step(model)
        model.zero_grad()
        with AllocatorTimeline(base=standing) as timeline:
            out = model(x)
            out.sum().backward()
        return timeline.peak_bytes

    model = DistributedDataParallel(seeded(ConvNet), **WAYS[way])
    found = profile(model, batch(), loss=torch.sum)
    parameters = sum(p.nbytes for p in model.parameters())
    assert found.static.gradients == parameters
    assert found.gradient_nbytes == (0 if way == "gradients in buckets" else parameters)
    predicted = bounds(build(found)).ceiling
    assert run(found.static.total) == pytest.approx(predicted, rel=0.01)


def test_buckets_count_for_a_model_inside_its_wrapper() -> None:
    """With `DistributedDataParallel(apply(model))`, the model is profiled in its wrapper's forward."""
    model = seeded(ConvNet)
    found: list[int] = []

    def once(module: nn.Module, args: Any) -> None:
        handle.remove()
        found.append(observe(module, args, {}, loss=torch.sum).static.gradients)

    handle = model.register_forward_pre_hook(once)
    step(DistributedDataParallel(model))
    assert found[0] == sum(p.nbytes for p in model.parameters())


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def sharded(**settings: Any) -> nn.Sequential:
    model = layers()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def shards(model: nn.Module) -> list[Tensor]:
    """Return this rank's part of the gradients of a sharded model."""
    return [cast("DTensor", parameter.grad).to_local() for parameter in model.parameters()]


def assert_same_gradients(plain: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Assert that a sharded model on one rank has the gradients of a plain one."""
    plain(x).sum().backward()
    model(x).sum().backward()
    assert_equal(shards(model), [p.grad for p in plain.parameters()])


def test_profile_leaves_a_sharded_model_unchanged() -> None:
    model, x = sharded(), torch.ones(1, 4)
    fired: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    before = list(model.parameters())
    found = profile(model, x, loss=torch.sum)
    assert found.static.parameters == sum(p.nbytes for p in layers().parameters())
    assert [op.name for op in build(found).ops if op.must_save] == [
        "0/aten.addmm.default#0",  # another unit reads its output
        "./aten.sum.default#0",  # the loss
    ]
    assert all(a is b and a.grad is None for a, b in zip(before, model.parameters(), strict=True))
    assert not fired
    assert_same_gradients(layers(), model, x)
    assert len(fired) == len(before)


class KeepsLoss(nn.Module):
    """Keep a loss, which backward reaches before it reaches the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        out = self.second(y)
        self.loss = y.exp().square().mean()
        return out


class WithItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = KeepsLoss(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.block(x).relu()).sum()
        return out + self.block.loss


def test_tensors_unpacked_while_their_unit_is_freed_are_saved() -> None:
    def sharded_with_its_loss() -> nn.Module:
        torch.manual_seed(0)
        model = WithItsLoss()
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    plain, planned, x = sharded_with_its_loss(), sharded_with_its_loss(), torch.ones(3, 4)
    found = profile(planned, x)
    saved = {op.name: op.must_save for op in build(found).ops if op.must_save}
    assert saved["block/aten.exp.default#0"] == "its FSDP unit is freed when backward asks for it"
    assert "block/aten.tanh.default#0" not in saved
    policy = plan(found, budget_bytes=bounds(build(found)).ceiling).policy()
    decisions = {key: "save" if key in saved else "recompute" for key in policy.decisions}
    observed = sharded_with_its_loss()
    ac_client.apply(observed, 1.0)
    ac_client.apply(planned, policy=policy.model_copy(update={"decisions": decisions}))
    for model in (plain, planned, observed):
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
    for model in (planned, observed):
        assert_equal(shards(model), shards(plain))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "offloaded": (
        lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "offloaded to the host",
    ),
    "FSDP1": (
        lambda: FullyShardedDataParallel(
            layers(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
        ),
        "unsharded copy",
    ),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_sharding_that_no_real_step_supports_is_refused(setting: str) -> None:
    make, why = REFUSED[setting]
    model = make()
    with pytest.raises(CannotProfile, match=why):
        profile(model, torch.ones(1, 4), loss=torch.sum)


def in_two_layouts() -> nn.Sequential:
    tensor, data = (init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in "td")
    return fully_shard(parallelize_module(layers(), tensor, {"0": ColwiseParallel()}), mesh=data)


MESHES: dict[str, Callable[[], nn.Sequential]] = {
    "one dimension": lambda: fully_shard(layers(), mesh=init_device_mesh("cpu", (1,))),
    "replicas": lambda: fully_shard(
        layers(), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s"))
    ),
    "two layouts": in_two_layouts,
}


@pytest.mark.parametrize("setting", MESHES)
def test_sharded_model_is_profiled_on_any_mesh_and_trains_on(setting: str) -> None:
    model, plain, x = MESHES[setting](), layers(), torch.ones(1, 4)
    found = profile(model, x, loss=torch.sum)
    assert found.gradient_nbytes == sum(p.nbytes for p in plain.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert_same_gradients(plain, model, x)


def test_gradients_that_are_not_reduced_forbid_a_profile() -> None:
    model, x = sharded(), torch.ones(1, 4)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    with pytest.raises(ProfilerBusy, match="not reduced"):
        profile(model, x, loss=torch.sum)


def test_fake_step_of_a_sharded_model_is_refused() -> None:
    with pytest.raises(CannotProfile, match="a fake step runs on a copy"):
        profile(sharded(), torch.ones(1, 4), on=DATASHEETS["h100"])


def test_plan_applied_before_fully_shard_is_refused() -> None:
    model = layers()
    ac_client.apply(model, 1.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(CannotProfile, match=r"call ac_client\.apply after fully_shard"):
        model(torch.ones(1, 4))


RANK = """
from torch.nn.parallel import DistributedDataParallel
from awkward_modules import ConvNet
from autoac.profiler import profile

def train(profiles):
    torch.manual_seed(0)
    model = DistributedDataParallel(ConvNet())
    for i in range(3):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * i + rank))
        if profiles:
            assert profile(model, x, loss=torch.sum).ops
        torch.manual_seed(i)
        model(x).sum().backward()
    return [*(p.grad for p in model.parameters()), *model.buffers()]

assert all(map(torch.equal, train(False), train(True)))
"""


def test_ranks_that_profile_together_train_as_ranks_that_do_not(tmp_path: Path) -> None:
    outputs_of_ranks(RANK, tmp_path / "store")  # fails if the script of a rank does
