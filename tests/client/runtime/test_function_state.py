"""Test custom Functions that read Python state which differs when backward runs them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import stepping
import torch
from torch import Tensor, nn

import ac_client
from ac_client import ContentsDiffer, save_recompute_policy

SCALE = [1.0]


def scaled() -> Any:
    """Return a new Function, whose kinds no step has seen."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scaling: bool) -> Tensor:
            out = x * SCALE[0]
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (out,) = ctx.saved_tensors
            return grad * out, None

    return Scaled


class Net(nn.Module):
    """Layers that scale by their number where a step asks for it, and by 1 otherwise."""

    def __init__(self, function: Any, run: Any = lambda layer, *args: layer(*args)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(function) for _ in range(3))
        self.scaling, self.run = False, run

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            SCALE[0] = 1.0 + i if self.scaling else 1.0
            x = self.run(layer, x, self.scaling)
        return x.sin().sum()


class Layer(nn.Module):
    """Call the Function; with another `scaling`, the call is of another kind."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(16, 16)

    def forward(self, x: Tensor, scaling: bool) -> Tensor:
        return self.function.apply(self.linear(x), scaling).sin()  # type: ignore[no-any-return]


def in_region(layer: Layer, x: Tensor, scaling: bool) -> Tensor:
    with save_recompute_policy("recompute_all"):
        return layer(x, scaling)  # type: ignore[no-any-return]


def planned(function: Any) -> nn.Module:
    """Return a model under a plan that recomputes all that it can."""
    model = Net(function)
    ac_client.pin(model, "must_recompute")
    return ac_client.apply(model, budget_gb=1.0)


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    return stepping.gradients(model, torch.randn(8, 16, generator=torch.Generator().manual_seed(step)))


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "plan": planned,
    "checkpoint": lambda function: Net(function, ac_client.checkpoint),
    "region": lambda function: Net(function, in_region),
}


@pytest.mark.parametrize("name", MODELS)
def test_kind_that_differs_in_a_later_step_is_an_error_and_then_saved(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](scaled())
    plain = Net(scaled())
    plain.load_state_dict(model.state_dict())
    for step in range(3):
        assert all(map(torch.equal, gradients(model, step), gradients(plain, step)))
    model.scaling = plain.scaling = True
    with pytest.raises(ContentsDiffer):
        gradients(model, 3)
    for step in range(4, 6):
        assert all(map(torch.equal, gradients(model, step), gradients(plain, step)))
