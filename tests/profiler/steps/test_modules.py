"""Test that a fake step leaves the counters of a model, and each profile its optimizer, unchanged."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import ac_client
from autoac.profiler import DATASHEETS, observe, profile


class Counting(nn.Module):
    """Count calls in every kind of state that a module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0
        self.list = [0]
        self.last: deque[int] = deque([0], maxlen=3)
        self.table: dict[str, Any] = {"calls": 0}
        self.seen = {0}
        self.tensor = torch.zeros(2)
        self.inside: dict[str, Any] = {"by": [{"calls": 0}, ({0}, [0])], "draws": [random.Random(0)]}
        self.draws = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.list.append(self.calls)
        self.last.append(self.calls)
        self.table["calls"] += 1
        self.table[str(self.calls)] = x.sum()
        self.seen.discard(0)
        self.seen.add(self.calls)
        self.tensor += 1
        counts, (numbers, order) = self.inside["by"]
        counts["calls"] += 1
        numbers.add(self.calls)
        order.append(self.inside["draws"][0].random() + self.draws.random())
        out: Tensor = self.inner(x)
        return out


def test_counters_of_a_model_are_restored_after_a_fake_step() -> None:
    model = Counting()
    held = (model.list, model.last, model.table, model.seen, model.tensor)
    profile(model, torch.randn(2, 4), loss=torch.sum, on=DATASHEETS["h100"])
    now = (model.list, model.last, model.table, model.seen, model.tensor)
    assert all(a is b for a, b in zip(now, held, strict=True))
    assert (model.calls, model.list, list(model.last), model.table, model.seen) == (
        0,
        [0],
        [0],
        {"calls": 0},
        {0},
    )
    assert torch.equal(model.tensor, torch.zeros(2))
    assert model.inside["by"] == [{"calls": 0}, ({0}, [0])]
    assert model.inside["draws"][0].random() == random.Random(0).random()
    assert model.draws.random() == numpy.random.default_rng(0).random()


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
    model = Counting()
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
        assert plain is not None
        assert planned is not None
        assert torch.equal(planned, plain)
