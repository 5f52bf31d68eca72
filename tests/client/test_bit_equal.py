"""Train models, with dropout, autocast, shards and checkpoints of their own, plainly and under a budget.

Under every torch: the same numbers, within the budget, and some op is recomputed, else nothing is proven.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint as torchs
from stepping import SeenOps, scalar, seed, seeded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import ac_client
from autoac.planner import bounds, build, find_minimum_peak
from autoac.planner.units import GIB
from autoac.profiler import profile
from benchmarks.models.tiny import IRREGULAR, ZOO, ZooModel
from benchmarks.observed_step import same

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[], nn.Module]
Batch = Callable[[], dict[str, Any]]
Casts = Callable[[], contextlib.AbstractContextManager[Any]]

CASTS: dict[str, Casts] = {
    "fp32": contextlib.nullcontext,
    "bf16": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}
STEPS = 3


def budget_between(make: Make, batch: Batch, casts: Casts = contextlib.nullcontext) -> int:
    """Return a budget halfway between the plain peak and a peak near the smallest."""
    with casts():
        found = profile(seeded(make), **batch())
    smallest, plain = find_minimum_peak(found, gap=0.3, work_limit=0.3).found, bounds(build(found)).ceiling
    assert smallest < plain
    return (smallest + plain) // 2


def trained(
    make: Make, batch: Batch, budget: int | None = None, casts: Casts = contextlib.nullcontext
) -> list[Tensor | None]:
    """Train a new model, under a budget if one is passed.

    Returns:
        The loss, the gradients, the buffers and the state of the generator of each step.
    """
    model = seeded(make)
    numbers: list[Tensor | None] = []
    if budget is not None:
        ac_client.apply(model, budget / GIB)
    for number in range(STEPS):
        model.zero_grad()
        seed(number)
        measures = budget is not None and number == STEPS - 1
        with ac_client.applied(model).measure() if measures else contextlib.nullcontext():
            with casts():
                loss = scalar(model(**batch()))
            loss.backward()
        numbers += [loss.detach(), *(getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters())]
        numbers += [*map(torch.clone, model.buffers()), torch.get_rng_state()]
    if budget is not None:
        report = ac_client.applied(model).report()
        assert report.recomputed
        assert report.measured_peak_bytes <= budget
    return numbers


def assert_same(planned: list[Tensor | None], plain: list[Tensor | None]) -> None:
    for a, b in zip(planned, plain, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            assert same(a, b)


@pytest.mark.parametrize(
    ("entry", "casts"),
    [*((entry, "fp32") for entry in (*ZOO, *IRREGULAR)), *((entry, "bf16") for entry in ZOO)],
    ids=lambda value: getattr(value, "name", value),
)
def test_model_has_the_plain_numbers_within_the_budget(entry: ZooModel, casts: str) -> None:
    def make() -> nn.Module:
        return entry.make().train()

    budget = budget_between(make, entry.batch, CASTS[casts])
    planned = trained(make, entry.batch, budget, CASTS[casts])
    assert_same(planned, trained(make, entry.batch, casts=CASTS[casts]))


class Net(nn.Module):
    """Blocks with dropout, of which each runs under a checkpoint, or not."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(), nn.Linear(128, 32)) for _ in range(4)
        )
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.call(block, x)
        return x.square().mean()


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


def wave() -> dict[str, Any]:
    return {"x": torch.linspace(-1, 1, 64 * 32).reshape(64, 32)}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_taken_over_have_the_plain_numbers_within_the_budget(use_reentrant: bool) -> None:
    make = functools.partial(Net, functools.partial(torchs.checkpoint, use_reentrant=use_reentrant))
    budget = budget_between(make, wave)
    assert_same(trained(make, wave, budget), trained(lambda: Net(plainly), wave))


def test_shards_have_the_plain_numbers_within_the_budget(one_rank: None) -> None:
    def make() -> nn.Module:
        mesh, net = dist.init_device_mesh("cpu", (1,)), Net(plainly)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    budget = budget_between(make, wave)
    assert_same(trained(make, wave, budget), trained(make, wave))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Be the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_drop_in_with_selective_contexts_recomputes_the_same_numbers() -> None:
    saved = [torch.ops.aten.addmm.default]
    contexts = functools.partial(torchs.create_selective_checkpoint_contexts, saved)

    def numbers(checkpoint: Any) -> tuple[list[Tensor | None], list[str]]:
        options = {"use_reentrant": False, "context_fn": contexts}
        net = seeded(Net, lambda block, x: checkpoint(block, x, **options))
        seed(0)
        loss = net(**wave())
        with SeenOps() as backward:
            loss.backward()
        return [loss.detach(), *(p.grad for p in net.parameters())], backward.ops

    planned, ops = numbers(ac_client.checkpoint)
    assert "aten.gelu.default" in ops
    assert_same(planned, numbers(torchs.checkpoint)[0])
