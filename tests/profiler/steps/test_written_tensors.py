"""Test that a fake step does not change parameters and other tensors that a forward writes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.profiler import DATASHEETS, profile

X = torch.linspace(-1, 2, 32).view(8, 4)


def follows_at_once(model: Momentum) -> None:
    """Update a teacher as MoCo and BYOL do."""
    torch._foreach_lerp_(list(model.teacher.parameters()), list(model.student.parameters()), 0.1)


def follows_in_an_object(model: Momentum) -> None:
    average = model.averages.of["weight"]
    rows = average.view(2, 8)  # only a part of it is written
    rows[1].lerp_(model.student.weight.view(2, 8)[1], 0.1)
    torch.add(rows[0], 1, out=rows[0])
    model.student.bias.data += average.sum()


def fills_a_bank(model: Momentum) -> None:
    """Update averages, and tensors that the forward itself makes, writes and keeps."""
    made = torch.zeros(4)
    made[0] = 1
    made += model.student.bias
    model.banks["one"][0].roll(1, 0)
    model.banks["one"][0][:2] += made
    model.student.bias.data += model.banks["one"][0].sum()


class Averages:
    def __init__(self, module: nn.Module) -> None:
        self.of = {name: p.detach().clone() for name, p in module.named_parameters()}


class Momentum(nn.Module):
    def __init__(self, update: Callable[[Momentum], None]) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.averages = Averages(self.student)
        self.banks = {"one": [torch.zeros(4, 4)]}
        self.student.weight.data.add_(1)  # ahead of the teacher
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.update(self)
        return (self.student(x).tanh() - self.teacher(x)).square().sum()


UPDATES = [follows_at_once, follows_in_an_object, fills_a_bank]


def contents(model: Momentum) -> list[Tensor]:
    return [*model.parameters(), *model.averages.of.values(), *model.banks["one"]]


@pytest.mark.parametrize("update", UPDATES)
def test_fake_step_restores_tensors_written_in_forward(update: Callable[[Momentum], None]) -> None:
    model = Momentum(update)
    before = copy.deepcopy(contents(model))
    profile(model, X, on=DATASHEETS["h100"])
    assert all(map(torch.equal, contents(model), before))


@pytest.mark.parametrize("update", UPDATES)
def test_each_training_step_updates_them_once(update: Callable[[Momentum], None]) -> None:
    def trained(planned: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Momentum(update)
        optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
        if planned:
            ac_client.apply(model, 1.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).backward()
            optimizer.step()
        return contents(model)

    assert all(map(torch.equal, trained(planned=True), trained(planned=False)))
