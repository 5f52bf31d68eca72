"""Check the summary and the table of `python -m benchmarks.recompute_time`."""

from __future__ import annotations

import pytest

from benchmarks.recompute_time import Row, render
from benchmarks.step_timing import standard_error

ROW = Row(
    model="GPT-2",
    budget=2**30,
    recomputed=7,
    plain_s=[1.5, 1.4, 1.9],
    predicted_s=[0.9, 0.6, 1.0],
    recording_s=[0.1, 0.1, 0.4],
    forward_s=[0.1, 0.3, 0.2],
    backward_s=[1.1, 1.2, 1.3],
)


def test_medians_of_differences_within_rounds_are_compared() -> None:
    assert ROW.predicted_extra_s == pytest.approx([1.0, 0.7, 1.4])
    assert ROW.extra_s == pytest.approx([1.2, 1.5, 1.5])
    assert ROW.backward_error == pytest.approx(0.9 / 1.2 - 1)
    assert ROW.step_error == pytest.approx(1.0 / 1.5 - 1)


def test_the_standard_error_is_that_of_a_median() -> None:
    assert standard_error([1.0, 1.0, 1.0, 9.0]) == 0
    assert standard_error([0.0, 1.0, 2.0, 3.0]) == pytest.approx(0.929)


def test_the_summary_counts_rows_within_the_tolerance() -> None:
    page = render([ROW])
    assert "extra time of the step in 0 of 1 rows" in page
    assert "extra time of backward in 0." in page
    assert (
        "| GPT-2 | 1.00 GiB | 3 | 7 | 1500 | 900 | 100 | 1200 ± 107 | 200 ± 107 | 1500 ± 0 | -33% | -25% |"
    ) in page
