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


def follows(model: Momentum) -> None:
    """Update a teacher as MoCo and BYOL do."""
    for own, of_teacher in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
        of_teacher.data.mul_(0.9).add_(own.data, alpha=0.1)


def follows_at_once(model: Momentum) -> None:
    torch._foreach_lerp_(list(model.teacher.parameters()), list(model.student.parameters()), 0.1)


def follows_by_name(model: Momentum) -> None:
    for name, value in model.teacher.state_dict().items():
        value.copy_(value * 0.9 + model.student.state_dict()[name] * 0.1)


def normalizes(model: Momentum) -> None:
    """Normalize the student's own weights, as EDM2 does."""
    weight = model.student.weight
    weight.copy_(weight / (weight.norm(dim=1, keepdim=True) + 0.1))


def follows_in_a_list(model: Momentum) -> None:
    """Update a teacher that is not a submodule."""
    for own, of_teacher in zip(model.student.parameters(), model.hidden[0].parameters(), strict=True):
        of_teacher.mul_(0.9).add_(own, alpha=0.1)
    model.student.bias.data += model.hidden[0].weight.sum()


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
        self.hidden = [copy.deepcopy(self.student)]
        self.averages = Averages(self.student)
        self.banks = {"one": [torch.zeros(4, 4)]}
        self.student.weight.data.add_(1)  # ahead of the teacher
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.update(self)
        out: Tensor = (self.student(x).tanh() - self.teacher(x)).square().sum()
        return out


UPDATES = [
    follows,
    follows_at_once,
    follows_by_name,
    normalizes,
    follows_in_a_list,
    follows_in_an_object,
    fills_a_bank,
]


def contents(model: Momentum) -> list[Tensor]:
    hidden = [*model.hidden[0].parameters(), *model.averages.of.values(), *model.banks["one"]]
    return [*model.parameters(), *hidden]


@pytest.mark.parametrize("update", [update for update in UPDATES if update is not follows_in_a_list])
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
