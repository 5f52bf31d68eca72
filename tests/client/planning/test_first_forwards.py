"""Test models whose first forward differs from the later ones: the later ones are observed and planned."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.planner.units import GIB

WIDTH, LENGTH, STEPS = 48, 64, 7
BANK = 4 * LENGTH * WIDTH * 4  # bytes

TERMS: dict[str, Callable[[int], bool]] = {  # by kind: which forwards have one
    "later term": lambda n: n > 1,
    "late term": lambda n: n > 4,
    "term in turns": lambda n: n % 2 == 0,
    "term in every third": lambda n: n % 3 == 0,
}


class Net(nn.Module):
    """Residual layers; what else a forward does is a matter of the kind, and of the forwards before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.forwards = kind, 0
        self.bank: deque[Tensor] = deque(maxlen=1)
        self.rotation: tuple[Tensor, Tensor] | None = None
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.kind == "memory bank" and self.bank:
            x = torch.cat([*self.bank, x], 1)
        if self.kind == "rotary cache":
            if self.rotation is None:
                angles = torch.outer(torch.arange(LENGTH).float(), torch.ones(WIDTH))
                self.rotation = angles.cos(), angles.sin()
            x = x * self.rotation[0] + x.flip(-1) * self.rotation[1]
        for layer in self.layers:
            x = x + layer(x)
            if self.kind in TERMS and TERMS[self.kind](self.forwards):
                x = x.sin() * x.cos()
        self.bank.append(x[:, -LENGTH:].detach())
        return x.square().mean()


def trained(
    kind: str, budget: int | None = None, steps: int = STEPS, measured: int = 2
) -> tuple[list[Tensor], list[ac_client.Report]]:
    """Train for some steps; return the weights, and the reports of the last, measured ones."""
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ac_client.apply(model, (budget or GIB) / GIB, optimizer=optimizer)
    reports = []
    for i in range(steps):
        with ac_client.applied(model).measure() if i >= steps - measured else nullcontext():
            model(torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(i))).backward()
            optimizer.step()
            optimizer.zero_grad()
        reports.append(ac_client.applied(model).report())
    return [parameter.detach() for parameter in model.parameters()], reports[-measured:]


@pytest.mark.parametrize("share", [0.7, 0.95])
@pytest.mark.parametrize("kind", ["memory bank", "rotary cache", "later term"])
def test_later_forwards_are_planned_if_they_run_other_ops_than_the_first(
    kind: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    plain, reports = trained(kind)
    budget = int(share * (reports[-1].measured_peak_bytes or 0))
    caplog.set_level(logging.INFO)
    weights, reports = trained(kind, budget)
    assert all(map(torch.equal, weights, plain))
    for report in reports:
        assert report.off_path == report.stale == ""
        assert report.recomputed > 0
        assert report.predicted_peak_bytes <= budget
        banks = 0 if kind == "later term" else BANK  # that of the step before is not in the measurement
        assert 0 <= report.predicted_peak_bytes - (report.measured_peak_bytes or 0) <= banks
    assert sum("observing one step" in r.getMessage() for r in caplog.records) == 2


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("kind", ["late term", "term in turns", "term in every third"])
def test_forwards_that_gain_ops_late_or_in_turns_keep_the_budget(
    kind: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    plain, reports = trained(kind, steps=24, measured=3)
    budget = int(share * max(report.measured_peak_bytes or 0 for report in reports))
    caplog.clear()
    caplog.set_level(logging.INFO)
    weights, reports = trained(kind, budget, steps=24, measured=3)
    assert all(map(torch.equal, weights, plain))
    assert all(0 < (report.measured_peak_bytes or 0) <= budget for report in reports)
    assert sum("left its policy" in r.getMessage() for r in caplog.records) == 1
    assert sum("observing one step" in r.getMessage() for r in caplog.records) <= 3


def test_a_last_microbatch_with_more_ops_is_observed_with_the_gradients_that_it_finds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def steps(budget: float) -> list[Tensor]:
        torch.manual_seed(0)
        model = ac_client.apply(Net("term in every third"), budget)
        for i in range(12):
            model(torch.randn(4, LENGTH, WIDTH)).backward()
            if i % 3 == 2:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 1e-2 * parameter.grad
                model.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    plain = steps(1)
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert all(map(torch.equal, steps(3.5 / 1024), plain))
    assert sum("observing one step" in r.getMessage() for r in caplog.records) <= 4
