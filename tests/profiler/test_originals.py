"""Parameters that a forward writes over are trained as if nothing had been profiled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.profiler import profile

X = torch.linspace(-1, 2, 32).view(8, 4)


def follows(model: Momentum) -> None:
    """As MoCo and BYOL have it."""
    for own, of_teacher in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
        of_teacher.data.mul_(0.9).add_(own.data, alpha=0.1)


def follows_at_once(model: Momentum) -> None:
    torch._foreach_lerp_(list(model.teacher.parameters()), list(model.student.parameters()), 0.1)


def follows_by_name(model: Momentum) -> None:
    for name, value in model.teacher.state_dict().items():
        value.copy_(value * 0.9 + model.student.state_dict()[name] * 0.1)


def normalizes(model: Momentum) -> None:
    """As EDM2 has it; the student itself is what is written."""
    weight = model.student.weight
    weight.copy_(weight / (weight.norm(dim=1, keepdim=True) + 0.1))


class Momentum(nn.Module):
    def __init__(self, update: Callable[[Momentum], None]) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.student.weight.data.add_(1)  # ahead of the teacher
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.update(self)
        out: Tensor = (self.student(x).tanh() - self.teacher(x)).square().sum()
        return out


UPDATES = [follows, follows_at_once, follows_by_name, normalizes]


@pytest.mark.parametrize("mode", ["hollow", "measured"])
@pytest.mark.parametrize("update", UPDATES)
def test_a_profile_does_not_move_what_a_forward_writes(update: Callable[[Momentum], None], mode: str) -> None:
    model = Momentum(update)
    before = copy.deepcopy(model.state_dict())
    profile(model, X, mode=mode)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("update", UPDATES)
def test_training_moves_it_once_a_step(update: Callable[[Momentum], None]) -> None:
    def trained(planned: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Momentum(update)
        optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
        if planned:
            ac_client.apply(model, 1.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).backward()
            optimizer.step()
        return model.state_dict()

    plain, planned = trained(planned=False), trained(planned=True)
    assert all(torch.equal(planned[name], value) for name, value in plain.items())
