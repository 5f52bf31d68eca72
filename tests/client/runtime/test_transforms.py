"""Test transforms of torch.func inside of a planned forward: their ops are saved, and gradients are plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import trained
from torch import Tensor, nn

import ac_client
from ac_client import checkpoint, save_recompute_policy

Transform = Callable[[Tensor, Tensor], Any]


def energy(weight: Tensor, x: Tensor) -> Tensor:
    return (x @ weight).sin().square().mean()


def vjp(weight: Tensor, x: Tensor) -> Any:
    _, pull = torch.func.vjp(energy, weight, x)
    return pull(torch.ones(()))[0]


def jvp(weight: Tensor, x: Tensor) -> Any:
    return torch.func.jvp(lambda w: (x @ w).sin(), (weight,), (weight.cos(),))[1].mean(0)


TRANSFORMS: dict[str, Transform] = {
    "grad": torch.func.grad(energy),
    "grad of grad": torch.func.grad(lambda w, x: torch.func.grad(energy)(w, x).square().sum()),
    "vmap of grad": lambda w, x: torch.func.vmap(torch.func.grad(energy), (None, 0))(w, x).mean(0),
    "vmap": lambda w, x: torch.func.vmap(lambda row: (row @ w).tanh())(x).mean(0),
    "vjp": vjp,
    "jvp": jvp,
    "jacrev": lambda w, x: torch.func.jacrev(lambda v: (x @ (w * v)).sin().mean(0))(torch.ones(16)),
}


class Learner(nn.Module):
    """Take a step on fast weights inside of forward."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.transform = transform
        self.start = nn.Parameter(torch.eye(16))
        self.key, self.mlp = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.start - 0.1 * self.transform(self.start, self.key(x).tanh())
        return x @ weight + self.mlp(x)


def gradients(transform: str, how: Callable[[nn.Module], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Learner(TRANSFORMS[transform]) for _ in range(3)))
    return trained(model, lambda _: torch.randn(128, 16), call=how(model))


def planned(model: nn.Module) -> nn.Module:
    ac_client.apply(model, budget_gb=1.0)
    return model


def in_checkpoint(model: nn.Module) -> Any:
    return lambda x: checkpoint(model, x)


def in_region(model: nn.Module) -> Any:
    def call(x: Tensor) -> Any:
        with save_recompute_policy([torch.ops.aten.mm.default]):
            return model(x)

    return call


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by jvp, once
@pytest.mark.parametrize("how", [planned, in_checkpoint, in_region])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_are_plain(transform: str, how: Callable[[nn.Module], Any]) -> None:
    want = gradients(transform, lambda model: model)
    got = gradients(transform, how)
    assert len(got) == len(want)
    assert all(map(torch.equal, got, want))


def test_hooks_of_others_are_refused_as_without_a_plan() -> None:
    refused = "saved tensor hooks"
    with torch.autograd.graph.save_on_cpu(), pytest.raises(RuntimeError, match=refused):
        gradients("grad", lambda model: model)

    def inside(model: nn.Module) -> Any:
        def call(x: Tensor) -> Any:
            with save_recompute_policy("recompute_all"), torch.autograd.graph.save_on_cpu():
                return model(x)

        return call

    with pytest.raises(RuntimeError, match=refused):
        gradients("grad", inside)
