"""Test eager models with compiled blocks, and what compiled code rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stepping import needs_compiled_plans
from torch import Tensor, nn

import ac_client
from ac_client import save_recompute_policy
from autoac.profiler import CannotProfile

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.compiler.disable:UserWarning"),  # of hooks, issued once
    # Dynamo hides these two from users in a way that fails if warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*set_eval_frame:UserWarning"),
]

BACKEND = "aot_eager"
BUDGET_GB = 1.0
TIGHT_GB = 0.0012  # 1.23 MiB, where the step below takes 1.55


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch() -> Tensor:
    return torch.randn(64, 8, 32, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor | None]:
    model.zero_grad()
    (call or model)(batch()).square().mean().backward()
    return [p.grad for p in model.parameters()]


def equal(got: list[Tensor | None], want: list[Tensor | None]) -> bool:
    return all(g is not None and w is not None and torch.equal(g, w) for g, w in zip(got, want, strict=True))


@needs_compiled_plans
@pytest.mark.parametrize("budget_gb", [BUDGET_GB, TIGHT_GB])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_compiled_before_apply_stay_whole_and_give_the_same_gradients(
    budget_gb: float, fullgraph: bool, in_place: bool
) -> None:
    def make() -> tuple[Net, Any]:
        from torch._dynamo.testing import CompileCounterWithBackend

        model, counter = Net(), CompileCounterWithBackend(BACKEND)
        if in_place:
            model.blocks[1].compile(backend=counter, fullgraph=fullgraph)
        else:
            model.blocks[1] = torch.compile(model.blocks[1], backend=counter, fullgraph=fullgraph)
        return model, counter

    plain, plain_counter = make()
    want = gradients(plain)
    model, counter = make()
    ac_client.apply(model, budget_gb)
    for _ in range(3):
        assert equal(gradients(model), want)
    assert counter.op_count == plain_counter.op_count * counter.frame_count / plain_counter.frame_count
    assert (ac_client.applied(model).report().recomputed > 0) == (budget_gb == TIGHT_GB)


def test_evaluation_may_be_compiled() -> None:
    model = ac_client.apply(Net(), BUDGET_GB).eval()
    want = model(batch())
    assert torch.allclose(torch.compile(model, backend=BACKEND)(batch()), want)
    exported = torch.export.export(model, (batch(),))
    assert torch.allclose(exported.module()(batch()), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("trace", [torch.export.export, torch.jit.trace])
def test_tracing_a_planned_model_in_training_is_rejected(trace: Callable[..., Any]) -> None:
    model = ac_client.apply(Net(), BUDGET_GB)
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
