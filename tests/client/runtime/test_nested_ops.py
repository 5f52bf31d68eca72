"""Test ops whose kernels call other ops: they compute under a plan what they compute without a mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from stepping import assert_same, step, timed_by_flops
from torch import Tensor, nn

from autoac.planner import bounds, build, find_minimum_peak, plan
from autoac.profiler import profile
from autoac.tape.unseen.fingerprints import Comparison


@torch.library.custom_op("autoac_nested::scores", mutates_args=())
def scores(x: Tensor, y: Tensor) -> Tensor:
    return x @ y.T @ y


scores.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[0], g * ctx.saved_tensors[1]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("autoac_nested::outer", mutates_args=())
def outer(x: Tensor, y: Tensor) -> Tensor:
    return scores(x, y).float() @ y.T @ y


outer.register_autograd(lambda ctx, g: (g, g))


@torch.library.custom_op("autoac_nested::casted", mutates_args=())
def casted(x: Tensor, y: Tensor) -> Tensor:
    return x @ y.T @ y


casted.register_autograd(lambda ctx, g: (g, g))
casted.register_autocast("cpu", torch.float32)


@torch.library.custom_op("autoac_nested::without_gradient", mutates_args=())
def without_gradient(x: Tensor, y: Tensor) -> Tensor:
    return x @ y.T @ y


@torch.library.custom_op("autoac_nested::written", mutates_args=("out",))
def written(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.copy_(x @ y.T @ y)


library = torch.library.Library("autoac_nested", "DEF")
library.define("tracked(Tensor x, Tensor y) -> Tensor")
library.impl("tracked", lambda x, y: (x @ y.T @ y).sigmoid().float(), "CPU")
library.define("composite(Tensor x, Tensor y) -> Tensor")
library.impl("composite", lambda x, y: scores(x, y).float().exp(), "CompositeImplicitAutograd")
tracked, composite = torch.ops.autoac_nested.tracked, torch.ops.autoac_nested.composite


def in_32_bits(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return scores(x.float(), y.float())


def in_halves(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return scores(x, y)


def into_a_buffer(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    written(x.detach(), y.detach(), out)
    return out * x.float()


def bilinear(x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, x.shape[1] ** 3).view(x.shape[1], x.shape[1], x.shape[1])
    return torch.nn.functional.bilinear(x.float(), y.float(), weight)


def detached(x: Tensor, y: Tensor) -> Tensor:
    return without_gradient(x.detach(), y.detach()).float() * x.float()


BODIES = [scores, outer, casted, detached, tracked, composite, in_32_bits, in_halves, into_a_buffer, bilinear]


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            y = layer(x).tanh()
            x = (self.body(y, y.float().cos().to(y.dtype)).float() * 0.1).sin() + x
        return {"loss": x.square().mean()}


def batch() -> Tensor:
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def name_of(body: Any) -> str:
    return str(getattr(body, "__name__", body))


pytestmark = pytest.mark.filterwarnings("ignore:autoac_nested.*an autograd kernel was not registered")


@pytest.mark.parametrize("policy", ["recompute_all", "must_save_all"])
@pytest.mark.parametrize("around", [bf16, nullcontext], ids=["autocast", "plain"])
@pytest.mark.parametrize("body", BODIES, ids=name_of)
def test_region_changes_no_bit(body: Any, around: Callable[[], Any], policy: str) -> None:
    x = batch()
    plain = step(lambda: Net(body), x, around=around)
    planned = step(lambda: Net(body), x, around=around, policy=policy)
    assert_same(plain, planned)
    assert bool(planned.recomputed()) == (policy == "recompute_all")


@pytest.mark.parametrize("body", BODIES, ids=name_of)
def test_tight_plan_changes_no_bit(body: Any) -> None:
    x = batch()
    with bf16():
        profiled = timed_by_flops(profile(Net(body), x))
    policy = plan(profiled, budget_bytes=find_minimum_peak(profiled, gap=0.2).found, gap=0.5).policy()
    planned = step(lambda: Net(body), x, around=bf16, policy=policy)
    assert_same(step(lambda: Net(body), x, around=bf16), planned)
    assert planned.recomputed()


def test_kernel_that_autograd_records_keeps_the_predicted_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "enabled", False)  # it takes memory in the first step
    x = batch()
    profiled = timed_by_flops(profile(Net(tracked), x))
    graph = build(profiled)
    for budget in (find_minimum_peak(profiled, gap=0.2).found, bounds(graph).ceiling):
        policy = plan(profiled, budget_bytes=budget, gap=0.5).policy()
        outcome = step(lambda: Net(tracked), x, policy=policy, standing=graph.static_bytes)
        assert outcome.peak == policy.predicted.peak_bytes
