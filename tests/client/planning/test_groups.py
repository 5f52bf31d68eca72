"""Forwards of several shapes before one backward are one group, which is found by their shapes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import find_minimum_peak
from autoac.planner.units import GIB

WIDTH = 64


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def step(model: nn.Module, *lengths: int) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    means = [model(torch.randn(length, WIDTH)).mean(0) for length in lengths]
    sum((means[0] - other).pow(2).sum() for other in means[1:]).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def budget_for(*lengths: int) -> int:
    """Return a third of the way from the smallest peak to that of plain training."""
    model = ac_client.apply(encoder(), 1.0)
    for _ in range(2):
        step(model, *lengths)
    plan = ac_client.applied(model).plan
    assert plan is not None
    assert plan.profile is not None
    least = find_minimum_peak(plan.profile).found
    return least + (plan.peak - least) // 3


def measured(model: nn.Module, *lengths: int) -> tuple[int, int]:
    at = ac_client.applied(model)
    model.zero_grad()
    with at.measure():
        found = step(model, *lengths)
    assert all(map(torch.equal, found, step(encoder(), *lengths)))
    report = at.report()
    assert report.measured_peak_bytes is not None
    assert report.predicted_peak_bytes is not None
    return report.measured_peak_bytes, report.predicted_peak_bytes


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [each for each in said if "was observed, without a plan" not in each]


@pytest.mark.parametrize("lengths", [(256, 512), (512, 256), (512, 128, 384)])
def test_lengths_in_flight_together_peak_where_predicted(
    lengths: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    budget = budget_for(*lengths)
    model = ac_client.apply(encoder(), budget / GIB)
    for _ in range(3):
        step(model, *lengths)
    peak, predicted = measured(model, *lengths)
    assert peak == predicted <= budget
    assert len(ac_client.applied(model).policies.buckets) == 1
    shorter = tuple(length - 8 for length in lengths)
    assert measured(model, *shorter)[0] <= budget
    assert not words(caplog)


@pytest.mark.parametrize(("first", "before", "second"), [(256, 384, 512), (512, 128, 384)])
def test_longer_batch_in_the_middle_of_a_step_is_said_and_planned_for(
    first: int, before: int, second: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it is shorter than the first one, whose plan does not cover it there."""
    budget = budget_for(first, second)
    model = ac_client.apply(encoder(), budget / GIB)
    for length in (before, before, second):
        step(model, first, length)
    assert f"no bucket covers a batch of 0=float32[{second}, 64]" in words(caplog)[0]
    for length in (second, before, second):
        step(model, first, length)
    peak, predicted = measured(model, first, second)
    assert peak == predicted <= budget
    assert len(words(caplog)) == 1
