"""Test that a profile leaves an optimizer unchanged, and that cached weights are the training ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import ac_client
from autoac.profiler import observe


class Wrapping(torch.optim.Optimizer):
    """Forward everything to the wrapped optimizer, as accelerate's wrapper does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state


def test_wrapped_optimizer_is_counted_and_left_unchanged() -> None:
    model = nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters())
    groups, state = inner.param_groups, inner.state
    found = observe(model, (torch.randn(2, 4),), {}, loss=torch.sum, optimizer=Wrapping(Wrapping(inner)))
    assert inner.param_groups is groups
    assert inner.state is state
    assert not state
    assert found.static.optimizer_state == 2 * sum(p.nbytes for p in model.parameters()) + 2 * 4


@pytest.mark.parametrize("already", [False, True])
def test_parametrize_cache_holds_weights_of_the_training_parameters(already: bool) -> None:
    x = torch.linspace(-1, 2, 32).view(8, 4)

    def gradients(planned: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh())
        if planned:
            ac_client.apply(model, 1.0)
        with parametrize.cached():
            before = model[0](x).sum() if already else torch.zeros(())  # before the model is planned
            (model(x).square().mean() + model(-x).mean() + before).backward()
        return [p.grad for p in model.parameters()]

    for plain, planned in zip(gradients(planned=False), gradients(planned=True), strict=True):
        assert torch.equal(planned, plain)
