"""Check a few rows of `make bench-peak`, and its summary."""

from __future__ import annotations

import pytest

import ac_client
from benchmarks import peak
from benchmarks.peak import Case

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "case",
    [
        Case("LSTM", "fp32", "SGD", 2),
        Case("LSTM", "bf16 autocast", "Adafactor", 1),
        Case("mixture of experts", "fp32", "Adam", 1),
        Case("mixture of experts", "fp32", "Adafactor", 2),
        Case("U-Net", "bf16 autocast", "Adam", 2),
    ],
    ids=lambda case: case.name,
)
def test_a_planned_step_peaks_where_it_was_predicted(case: Case) -> None:
    planned, policy = peak.plan_case(case)
    assert planned.recomputed
    assert planned.minimum_peak < planned.budget < planned.save_all_peak
    assert peak.measure_peak(case, policy) == planned.predicted <= planned.budget


@pytest.mark.parametrize("optimizer", peak.OPTIMIZERS)
def test_a_step_planned_by_apply_peaks_where_it_was_predicted(optimizer: str) -> None:
    """Plan in the first forward, before the optimizer has any state; measure the second step."""
    case = Case("LSTM", "fp32", optimizer, 1)
    planned, _ = peak.plan_case(case)
    model, made, batch = peak.build_training(case)
    ac_client.apply(model, planned.budget / 2**30, optimizer=made)
    peak.train_step(case, model, made, batch)
    with ac_client.applied(model).measure():
        peak.train_step(case, model, made, batch)
    report = ac_client.applied(model).report()
    assert report.recomputed
    assert report.measured_peak_bytes == report.predicted_peak_bytes
