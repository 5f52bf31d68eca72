"""Test eager models with compiled blocks, and what compiled code rejects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ac_client
from ac_client import save_recompute_policy
from autoac.profiler import CannotProfile

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.compiler.disable:UserWarning"),  # of hooks, issued once
    # Dynamo hides these two from users in a way that fails if warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*set_eval_frame:UserWarning"),
]

BACKEND = "aot_eager"
BUDGET_GB = 1.0


def new_model() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def batch() -> Tensor:
    return torch.randn(64, 8, 32, generator=torch.Generator().manual_seed(1))


def test_evaluation_may_be_compiled() -> None:
    model = ac_client.apply(new_model(), BUDGET_GB).eval()
    want = model(batch())
    assert torch.allclose(torch.compile(model, backend=BACKEND)(batch()), want)
    exported = torch.export.export(model, (batch(),))
    assert torch.allclose(exported.module()(batch()), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("trace", [torch.export.export, torch.jit.trace])
def test_tracing_a_planned_model_in_training_is_rejected(trace: Callable[..., Any]) -> None:
    model = ac_client.apply(new_model(), BUDGET_GB)
    with pytest.raises(CannotProfile, match=r"remove\(\) first"):
        trace(model, (batch(),))


def test_region_inside_compiled_code_is_rejected() -> None:
    @torch.compile(backend=BACKEND)
    def step(x: Tensor) -> Tensor:
        with save_recompute_policy("recompute_all"):
            return x.sin().exp().sum()

    with pytest.raises(RuntimeError, match=r"inside of torch\.compile"):
        step(torch.ones(3, requires_grad=True))


def test_checkpoint_behind_a_graph_break_gives_the_same_gradients() -> None:
    def chain(x: Tensor) -> Tensor:
        return x.sin().exp().cos()

    @torch.compile(backend=BACKEND)
    def step(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return ac_client.checkpoint(chain, y).sum()

    x = torch.linspace(0, 1, 5, requires_grad=True)
    (want,) = torch.autograd.grad(chain(x * 2).sum(), x)
    (got,) = torch.autograd.grad(step(x), x)
    assert torch.equal(got, want)
