"""Check the summary and the table of `python -m benchmarks.recompute_time`."""

from __future__ import annotations

import pytest

from benchmarks.recompute_time import Row, render
from benchmarks.steps import standard_error

ROW = Row(
    model="GPT-2",
    budget=2**30,
    recomputed=7,
    plain_s=[1.5, 1.4, 1.9],
    profile_s=[3.0, 2.1, 3.8],
    predicted_s=[0.9, 0.6, 1.0],
    recording_s=[0.1, 0.1, 0.4],
    extra_s=[1.2, 1.5, 1.5],
)


def test_the_standard_error_is_that_of_a_median() -> None:
    assert standard_error([1.0, 1.0, 1.0, 9.0]) == 0
    assert standard_error([0.0, 1.0, 2.0, 3.0]) == pytest.approx(0.929)


def test_medians_over_rounds_are_compared_and_rows_within_the_tolerance_counted() -> None:
    page = render([ROW])
    assert ROW.error == pytest.approx(1.0 / 1.5 - 1)
    assert "Within 15%: 0 of 1 rows" in page
    assert "| GPT-2 | 1.00 GiB | 7 | 1500 | 900 + 100 | 1500 ± 0 | -33% | 2.00 |" in page
