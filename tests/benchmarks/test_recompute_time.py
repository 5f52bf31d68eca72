"""What the page of `python -m benchmarks.recompute_time` says of its figures."""

from __future__ import annotations

import pytest

from benchmarks.recompute_time import Row, error, render

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


def test_a_prediction_is_compared_by_medians_of_what_differs_within_a_round() -> None:
    assert ROW.both_s == pytest.approx([1.0, 0.7, 1.4])
    assert ROW.extra_s == pytest.approx([1.2, 1.5, 1.5])
    assert ROW.off_backward == pytest.approx(0.9 / 1.2 - 1)
    assert ROW.off == pytest.approx(1.0 / 1.5 - 1)


def test_the_error_is_that_of_a_median() -> None:
    assert error([1.0, 1.0, 1.0, 9.0]) == 0
    assert error([0.0, 1.0, 2.0, 3.0]) == pytest.approx(0.929)


def test_the_page_counts_what_was_within_15_percent_of_the_step_and_of_backward() -> None:
    page = render([ROW])
    assert "with recording: 0 of 1." in page
    assert "where ops run again: 0." in page
    shown = (
        "| GPT-2 | 1.00 GiB | 3 | 7 | 1500 | 900 | 100 | 1200 ± 107 | 200 ± 107 | 1500 ± 0 | -33% | -25% |"
    )
    assert shown in page
