"""Compare the measured peak of planned steps with the prediction, and correct it."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from blocks import WithLoss
from stepping import binding_budget, peaks
from torch import nn

import ac_client
from ac_client.planning.facts import peak_watch
from ac_client.planning.facts.peak_counter import least_peak
from ac_client.planning.trigger import MOST_CORRECTIONS
from autoac.planner.units import GIB, format_bytes
from autoac.profiler import profile

pytestmark = pytest.mark.usefixtures("no_comparison")

MIB = 1 << 20
BATCH = torch.randn(1024, 32)


@pytest.fixture(scope="module")
def bounds() -> tuple[int, int]:
    """Return the minimum peak found and the save-all peak."""
    model = ac_client.apply(WithLoss(), 1.0)
    run(model, None)
    plan = ac_client.applied(model).plan
    return peaks(plan.graph)


@pytest.fixture
def budget(bounds: tuple[int, int]) -> int:
    return sum(bounds) // 2


@dataclass
class Fake:
    """A counting allocator: each step has the peak of its plan plus `extra`."""

    extra: int
    peak: int = 0
    most_reserved: int = 0

    def allocated_peak(self) -> int:
        return self.peak

    def reserved_peak(self) -> int:
        return max(self.most_reserved, self.peak)

    def allocated(self) -> int:
        return 0

    def reserved(self) -> int:
        return self.most_reserved


def planned(
    budget: int, fake: Fake, monkeypatch: pytest.MonkeyPatch, *, optimizer: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    monkeypatch.setattr(peak_watch, "allocator_peak", lambda _device: fake)
    model = WithLoss()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0) if optimizer else None
    ac_client.apply(model, budget / GIB, optimizer=sgd)
    run(model, sgd)  # is observed
    return model, sgd


def run(model: nn.Module, sgd: torch.optim.Optimizer | None) -> None:
    model.zero_grad()
    torch.manual_seed(1)
    model(BATCH).backward()
    if sgd is not None:
        sgd.step()


def step(model: nn.Module, sgd: torch.optim.Optimizer | None, fake: Fake, *, reset: bool = False) -> int:
    """One step; returns the peak that it had."""
    run(model, sgd)
    plan = ac_client.applied(model).plan
    if reset:
        fake.peak = 0
    fake.peak = max(fake.peak, plan.peak + fake.extra)
    return plan.peak + fake.extra


def test_peak_over_the_budget_is_corrected_once_and_fits(
    budget: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Fake(extra=100_000)
    model, sgd = planned(budget, fake, monkeypatch)
    at = ac_client.applied(model)
    with caplog.at_level(logging.WARNING):
        peaks = [step(model, sgd, fake, reset=True) for _ in range(8)]
    assert peaks[0] > budget
    assert all(peak <= budget for peak in peaks[1:])
    report = at.report()
    assert report.corrections == 1
    assert report.corrected_by_bytes == fake.extra
    assert report.predicted_peak_bytes == peaks[-1]
    assert at.policy.budget_bytes == at.budget_bytes
    assert sum("planned again" in message for message in caplog.messages) == 1
    assert "planned again 1 times" in str(report)
    want, plain = [p.grad for p in model.parameters()], WithLoss()
    torch.manual_seed(1)
    plain(BATCH).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), want, strict=True))


def test_smaller_batch_that_needs_less_leaves_the_plan_as_it_is() -> None:
    model = WithLoss()
    at = ac_client.applied(ac_client.apply(model, binding_budget(profile(model, BATCH)) / GIB))
    peaks = []
    for rows in (1024, 1024, 512, 1024):
        model.zero_grad()
        with at.measure() if at.policy is not None else nullcontext():
            model(torch.randn(rows, 32)).backward()
        peaks.append(at.report().measured_peak_bytes)
    _, whole, smaller, again = peaks
    assert smaller < 0.9 * whole
    assert again == whole <= at.budget_bytes
    assert at.report().corrections == 0


def test_corrections_are_bounded_and_then_warned_of_once(
    budget: int, bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Worse(Fake):
        def allocated_peak(self) -> int:
            self.peak += budget  # whatever is planned
            return self.peak

    fake = Worse(extra=0)
    model, sgd = planned(budget, fake, monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            step(model, sgd, fake)
    at = ac_client.applied(model)
    assert at.report().corrections <= 2 * MOST_CORRECTIONS, "of the first profile, and of one more"
    assert at.plan.peak <= bounds[0] * 1.05, "no plan is tight enough, so the tightest is taken"
    assert len(caplog.messages) <= 2 * MOST_CORRECTIONS + 1


def test_evaluation_is_not_part_of_a_step(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(extra=0)
    model, sgd = planned(budget, fake, monkeypatch)
    for _ in range(5):
        step(model, sgd, fake)
        model.eval()
        with torch.no_grad():
            model(BATCH)
        fake.peak += 10 * budget
        model.train()
    assert ac_client.applied(model).report().corrections == 0


def test_measuring_on_a_cpu_corrects_too(budget: int, caplog: pytest.LogCaptureFixture) -> None:
    model = ac_client.apply(WithLoss(), budget / GIB)
    at = ac_client.applied(model)
    held = []

    def once() -> None:
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(BATCH)
        if at.report().steps:
            held.append(torch.empty(100_000, dtype=torch.uint8))  # not in the observed step
        loss.backward()
        held.clear()

    once()
    with caplog.at_level(logging.WARNING), at.measure():
        once()
    assert at.report().measured_peak_bytes > budget
    assert at.report().corrections == 1
    for _ in range(2):
        with at.measure():
            once()
        assert at.report().measured_peak_bytes <= budget
    assert at.report().corrections == 1
    assert sum("planned again" in message for message in caplog.messages) == 1


def test_gradients_dropped_in_a_measured_step_are_counted_until_then() -> None:
    model = ac_client.apply(WithLoss(), 1.0)
    at = ac_client.applied(model)
    peaks = []
    model(BATCH).backward()
    for before in (True, False):
        if before:
            model.zero_grad()
        with at.measure():
            model.zero_grad()
            model(BATCH).backward()
        peaks.append(at.report().measured_peak_bytes)
    assert peaks[0] == peaks[1]


def test_batch_made_before_the_measured_step_counts() -> None:
    """As in `for batch in loader`; else the measured peak would lack the batch."""

    model = WithLoss()
    sgd = torch.optim.SGD(model.parameters(), 1e-3)

    def step(batch: torch.Tensor) -> None:
        model(batch).backward()
        sgd.step()
        sgd.zero_grad()

    budget = binding_budget(profile(model, BATCH))
    at = ac_client.applied(ac_client.apply(model, budget / GIB, optimizer=sgd))
    batch = torch.randn(1024, 32)
    step(batch)
    batch = torch.randn(1024, 32)  # the one before is gone
    with at.measure():
        step(batch)
    assert at.report().measured_peak_bytes == at.policy.predicted.peak_bytes
    with at.measure():
        for _ in range(3):  # each takes the place of the one before, the first of one from before the block
            batch = None
            batch = torch.randn(1024, 32)
            step(batch)
    assert at.report().measured_peak_bytes == at.policy.predicted.peak_bytes
    assert at.report().corrections == 0


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with a budget"])
def test_policy_planned_elsewhere_is_not_planned_again_but_warned_of(
    budget: int, alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = ac_client.apply(WithLoss(), budget / GIB)
    first(BATCH).backward()
    policy = ac_client.applied(first).policy
    model = ac_client.apply(WithLoss(), None if alone else budget / GIB, policy=policy)
    at = ac_client.applied(model)
    model(BATCH).backward()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.zero_grad()
            with at.measure():
                held = torch.empty(budget, dtype=torch.uint8)
                model(BATCH).backward()
                del held
    assert at.policy == policy
    assert sum("planned elsewhere" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("readings", "seen"),
    [
        ((5, 9), 9),
        ((9, 9), 0),
        ((9, 5), 5),
        ((5, 7, 9, 9), 9),
        ((9, 9, 9, 9), 0),
        ((3, 7, 9, 3), 9),  # reset at the head of each step
        ((9, 9, 4, 6), 6),  # reset after forward
    ],
)
def test_readings_of_the_counter_bound_the_peak_from_below(readings: tuple[int, ...], seen: int) -> None:
    assert least_peak(readings) == seen


def test_report_predicts_what_the_allocator_reserves(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(extra=0)
    model, sgd = planned(budget, fake, monkeypatch)
    at = ac_client.applied(model)
    fake.most_reserved = budget + 3 * MIB
    for _ in range(4):
        step(model, sgd, fake)
    report = at.report()
    assert report.predicted_reserved_bytes == report.reserved_peak_bytes == budget + 3 * MIB
    assert f"predicted {format_bytes(budget + 3 * MIB)}" in str(report)
