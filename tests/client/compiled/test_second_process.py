"""Test that a second process loads the code of a plan, and never the code of another plan or model."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from stepping import allocated_peak
from torch import Tensor, nn

import ac_client
from ac_client.measure.forked_call import run_in_child
from ac_client.planning import plan_batch

TIGHT, LOOSE = 460_000, 590_000


class Products(nn.Module):
    """A chain of products, for which Inductor compiles no kernel of its own."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(6))
        self.order = slice(None, None, -1 if backward else 1)

    def forward(self, x: Tensor) -> Tensor:
        for weight in list(self.weights)[self.order]:
            x = x @ weight
        return x


@dataclass(frozen=True)
class Outcome:
    """Results of two steps in a process."""

    traced: int  # first stages
    compiled: int  # halves of a graph
    planned: int
    decisions: list[str]
    gradients: list[bytes]
    peak: int


def train(cache: Path, budget_bytes: int, backward: bool = False) -> Outcome:
    import torch._functorch.aot_autograd as aot
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)  # part of the profile's circumstances
    traced, compiled = 0, counters["inductor"]["fxgraph_cache_miss"]
    capture = aot.aot_stage1_graph_capture

    def counted(*args: Any) -> Any:
        nonlocal traced
        traced += 1
        return capture(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "aot_stage1_graph_capture", counted)
        patch.setattr(plan_batch, "plan", planning := Mock(wraps=plan_batch.plan))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        model = Products(backward=backward)
        call = ac_client.apply(torch.compile(model), budget_bytes / 2**30)
        x = torch.ones(512, 32)

        def step() -> None:
            model.zero_grad()
            call(x).backward(torch.ones(512, 32))

        step()
        peak = allocated_peak(step)
    return Outcome(
        traced,
        counters["inductor"]["fxgraph_cache_miss"] - compiled,
        planning.call_count,
        list(ac_client.applied(model).policy.decisions.values()),  # type: ignore[union-attr]
        [parameter.grad.numpy().tobytes() for parameter in model.parameters()],  # type: ignore[union-attr]
        peak,
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    importlib.import_module("torch._inductor.compile_fx")  # once, and not in each child

    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def first(cache: Path) -> Outcome:
    found = run_in_child(train, cache, TIGHT)
    assert "recompute" in found.decisions
    assert (found.traced, found.compiled, found.planned) == (1, 2, 1)
    return found


def test_second_process_plans_and_compiles_nothing(cache: Path, first: Outcome) -> None:
    second = run_in_child(train, cache, TIGHT)
    assert (second.compiled, second.planned) == (0, 0)
    assert (second.decisions, second.gradients, second.peak) == (first.decisions, first.gradients, first.peak)


def test_other_decisions_have_other_code(cache: Path, first: Outcome) -> None:
    loose = run_in_child(train, cache, LOOSE)
    assert loose.decisions.count("recompute") < first.decisions.count("recompute")
    assert (loose.traced, loose.compiled, loose.planned) == (1, 2, 1)
    assert loose.gradients == first.gradients
    assert loose.peak > first.peak


def test_model_that_only_computes_something_else_has_other_code(cache: Path, first: Outcome) -> None:
    """All that a plan depends on is the same, so the policy is the same."""
    other = run_in_child(train, cache, TIGHT, True)
    assert (other.traced, other.compiled, other.planned) == (1, 2, 0)
    assert other.gradients != first.gradients
