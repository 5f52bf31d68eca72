"""Test the observed step of compiled models: each graph runs op by op, and code is compiled for the plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import BlockNet
from stepping import outcome, peak_of
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.nn import functional

import ac_client
from autoac.planner import find_minimum_peak, plan
from autoac.profiler import profile
from benchmarks.observed_profile import A_CPU, IN_BACKWARD, IN_KERNELS, differing

BATCH = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
ticks: list[int] = []


@torch.compiler.disable
def tick() -> None:
    ticks.append(1)


def whole(model: nn.Module, backend: Any = "aot_eager") -> nn.Module:
    model.compile(backend=backend)
    return model


def blocks(model: nn.Module, backend: Any = "aot_eager") -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "whole": lambda backend: whole(BlockNet(3), backend),
    "blocks": lambda backend: blocks(BlockNet(3), backend),
    "breaks": lambda backend: whole(BlockNet(3, tick), backend),
}


def budgets(make: Callable[[], nn.Module], share: float) -> float:
    found = profile(make(), BATCH)
    lowest, highest = find_minimum_peak(found, gap=0.3, work_limit=1).found, plan(found, budget_gb=1).peak
    return (lowest + share * (highest - lowest)) / 2**30


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_trains_as_the_unplanned_compiled_model_and_keeps_the_peak(kind: str) -> None:
    plain = KINDS[kind]("aot_eager")
    want = [outcome(plain, BATCH) for _ in range(3)]
    budget = budgets(lambda: KINDS[kind]("aot_eager"), 0.4)
    torch.compiler.reset()
    model = ac_client.apply(KINDS[kind]("aot_eager"), budget)
    for wanted in want:
        assert all(map(torch.equal, outcome(model, BATCH), wanted))
    report, policy = ac_client.applied(model).report(), ac_client.applied(model).policy
    assert report.recomputed > 0
    assert not report.off_path
    predicted = policy.predicted
    assert predicted.peak_bytes <= budget * 2**30
    model.zero_grad()
    assert peak_of(model, BATCH) + predicted.static_bytes == predicted.peak_bytes


@pytest.mark.parametrize("kind", ["whole", "blocks"])
def test_nothing_is_compiled_before_the_plan(kind: str) -> None:
    compiled = []

    def compile_half(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return boxed_nop(module, inputs)

    backend = aot_autograd(fw_compiler=compile_half)
    budget = budgets(lambda: KINDS[kind]("aot_eager"), 0.4)
    torch.compiler.reset()
    model = ac_client.apply(KINDS[kind](backend), budget)
    outcome(model, BATCH)
    assert not compiled
    outcome(model, BATCH)
    n = len(compiled)
    assert n == 2 if kind == "whole" else n > 0
    outcome(model, BATCH)
    assert len(compiled) == n


@pytest.mark.parametrize("kind", KINDS)
def test_profile_is_that_of_a_fake_step(kind: str) -> None:
    fake = profile(KINDS[kind]("aot_eager"), BATCH, on=A_CPU)
    observed = profile(KINDS[kind]("aot_eager"), BATCH)
    assert not differing(observed, fake, *IN_BACKWARD, *IN_KERNELS)


class Dropping(nn.Module):
    """Return the output of dropout, and a loss whose backward needs the mask again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = functional.dropout(x * self.scale, 0.5)
        return dropped, dropped.sum()


def test_inductors_random_numbers_are_the_same_in_backward_and_leave_the_generator_as_training_does() -> None:
    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(2)
        out, loss = model(torch.ones(256, 32))
        loss.backward()
        return out, torch.rand(4)

    plain, model = whole(Dropping(), "inductor"), whole(Dropping(), "inductor")
    ac_client.apply(model, 1.0)
    out, drawn = step(model)
    assert torch.equal(model.scale.grad, out.detach())
    assert 0.3 < (out != 0).float().mean() < 0.7
    assert torch.equal(drawn, step(plain)[1])


def test_batch_norm_whose_statistics_the_backend_does_not_write_itself_runs_again() -> None:
    """AOTAutograd writes them after the graph, which has read the old ones."""
    backend = aot_autograd(fw_compiler=boxed_nop)
    plain = whole(BlockNet(3), backend)
    model = ac_client.apply(copy.deepcopy(whole(BlockNet(3), backend)), 1.0)
    assert all(map(torch.equal, outcome(model, BATCH), outcome(plain, BATCH)))
