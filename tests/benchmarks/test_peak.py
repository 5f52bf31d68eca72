"""A few rows of `make bench-peak`, and its page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ac_client
from benchmarks import peak
from benchmarks.peak import Case, Row


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """oneDNN takes more workspace with more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
def test_the_whole_step_peaks_where_it_was_predicted(case: Case) -> None:
    decided = peak.planned(case)
    assert decided.recomputed
    assert decided.smallest < decided.budget < decided.ceiling
    assert peak.measured(case, decided.policy) == decided.predicted <= decided.budget


def test_the_page_counts_rows_that_are_off_and_over() -> None:
    case = Case("LSTM", "fp32", "SGD", 1)
    rows = [Row(case, 50, 200, 125, 100, 100, 3), Row(case, 50, 200, 125, 100, 130, 3)]
    page = peak.render(rows)
    assert "1 as predicted to the byte, 1 within 1 %, 1 over budget" in page
    assert "the worst +30.00% (LSTM, fp32, SGD, 1 x)" in page
    assert "| 100 | 130 | +30.000% |" in page


def test_there_is_a_row_for_every_model_precision_optimizer_and_number_of_microbatches() -> None:
    assert len(list(peak.cases())) == 14 * 2 * 3 * 2


@pytest.mark.parametrize("optimizer", peak.OPTIMIZERS)
def test_a_step_that_apply_planned_by_itself_peaks_where_it_was_predicted(optimizer: str) -> None:
    """Planned in its first forward, before the optimizer has any state; measured in its second step."""
    case = Case("LSTM", "fp32", optimizer, 1)
    decided = peak.planned(case)
    model, made, batch = peak.made(case)
    ac_client.apply(model, decided.budget / 2**30, optimizer=made)
    peak.train(case, model, made, batch)
    with ac_client.applied(model).measure():
        peak.train(case, model, made, batch)
    report = ac_client.applied(model).report()
    assert report.recomputed
    assert report.measured_peak_bytes == report.predicted_peak_bytes
