"""Test compiled planned models in training loops: graph breaks, dynamic shapes, accumulation, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ac_client

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BACKEND = "aot_eager"
TIGHT_GB = 0.75 / 1024


class Net(nn.Module):
    """A chain of layers, with a graph break in the middle if `breaks`."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x)).exp()
        if self.breaks:
            torch._dynamo.graph_break()
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x)).exp()
        return x.square().mean()


def batch(rows: int = 512, seed: int = 1) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


Loop = Callable[[nn.Module, Callable[[Tensor], Tensor]], list[Tensor]]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def one_step(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    call(batch()).backward()
    return gradients(model)


def accumulation(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    for seed in range(3):
        call(batch(seed=seed)).backward()
    return gradients(model)


def two_forwards(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    (call(batch(seed=1)) + call(batch(seed=2))).backward()
    return gradients(model)


def evaluation_between(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    call(batch()).backward()
    model.eval()
    with torch.no_grad():
        loss = call(batch(seed=3))
    model.train()
    call(batch(seed=2)).backward()
    return [*gradients(model), loss]


def retained_graph(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    loss = call(batch())
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def other_shapes(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    for rows in (512, 384, 512, 96):
        call(batch(rows)).backward()
    return gradients(model)


def optimizer(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        call(batch(seed=seed)).backward()
        sgd.step()
        sgd.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


LOOPS = [
    one_step,
    accumulation,
    two_forwards,
    evaluation_between,
    retained_graph,
    other_shapes,
    optimizer,
]


def run(loop: Loop, plan: bool, *, breaks: bool, **options: Any) -> list[Tensor]:
    torch.compiler.reset()
    model = Net(breaks=breaks)
    call = torch.compile(model, backend=BACKEND, **options)
    if plan:
        ac_client.apply(model, TIGHT_GB)
    results = loop(model, call)
    if plan:
        assert ac_client.applied(model).report().recomputed > 0
    return results


@pytest.mark.parametrize(
    ("loop", "breaks"),
    [
        *((loop, False) for loop in LOOPS),
        *((loop, True) for loop in (accumulation, two_forwards, retained_graph)),
    ],
)
def test_results_are_those_of_the_unplanned_compiled_model(loop: Loop, breaks: bool) -> None:
    want = run(loop, plan=False, breaks=breaks)
    assert all(map(torch.equal, run(loop, plan=True, breaks=breaks), want))


@pytest.mark.parametrize("loop", [one_step, other_shapes])
def test_dynamic_shapes(loop: Loop) -> None:
    want = run(loop, plan=False, breaks=False, dynamic=True)
    assert all(map(torch.equal, run(loop, plan=True, breaks=False, dynamic=True), want))
