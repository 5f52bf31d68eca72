"""Steps that differentiate one graph several times are planned for all passes, and peak where predicted."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import find_minimum_peak
from autoac.planner.units import GIB

WIDTH, ROWS = 32, 256

Losses = Callable[[nn.Module, Tensor], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + self.drop(self.down(torch.nn.functional.relu(hidden, inplace=True).tanh()))


class Net(nn.Module):
    """Returns what its middle and its end make of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2:
                middle = x.square().mean(1)
        return middle, x


def auxiliary_first(model: nn.Module, x: Tensor) -> None:
    middle, end = model(x)
    first, second = middle.mean(), end.square().mean()
    del middle, end
    first.backward(retain_graph=True)
    second.backward()


def weighted_by_the_last_layer(model: nn.Module, x: Tensor) -> None:
    end = model(x)[1]
    last = model.get_submodule("blocks.5.down").weight
    near, smooth = end.abs().mean(), end.diff(dim=1).square().mean()
    (a,) = torch.autograd.grad(near, last, retain_graph=True)
    (b,) = torch.autograd.grad(smooth, last, retain_graph=True)
    (near + (a.norm() / (b.norm() + 1e-4)).detach() * smooth).backward()


def twice_over_all(model: nn.Module, x: Tensor) -> None:
    end = model(x)[1]
    first, second = end.mean(), end.square().mean()
    first.backward(retain_graph=True)
    second.backward()


def one_row_at_a_time(model: nn.Module, x: Tensor) -> None:
    end = model(x)[1].unflatten(0, (4, -1)).square().mean((1, 2))
    for number, each in enumerate(end):
        each.backward(retain_graph=number < 3)


def train(losses: Losses, budget: float | None) -> tuple[list[list[Tensor]], nn.Module]:
    torch.manual_seed(0)
    model = Net()
    if budget is not None:
        ac_client.apply(model, budget / GIB)
    found = []
    for step in range(4):
        model.zero_grad()
        torch.manual_seed(step)
        losses(model, torch.randn(ROWS, WIDTH))
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found, model


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "losses", [auxiliary_first, weighted_by_the_last_layer, twice_over_all, one_row_at_a_time]
)
def test_passes_peak_where_predicted(losses: Losses, part: float, caplog: pytest.LogCaptureFixture) -> None:
    plain, _ = train(losses, None)
    _, free = train(losses, GIB)
    at = ac_client.applied(free)
    assert at.plan is not None
    assert at.plan.profile is not None
    lowest, highest = find_minimum_peak(at.plan.profile).found, at.plan.peak
    budget = lowest + part * (highest - lowest)
    planned, model = train(losses, budget)
    for one, other in zip(plain, planned, strict=True):
        assert all(map(torch.equal, one, other))
    at = ac_client.applied(model)
    model.zero_grad()
    with at.measure():
        losses(model, torch.randn(ROWS, WIDTH))
    report = at.report()
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget
    assert report.recomputed
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
