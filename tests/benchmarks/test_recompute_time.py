"""Check the summary and the table of `python -m benchmarks.recompute_time`."""

from __future__ import annotations

import pytest

from benchmarks.steps import standard_error


def test_the_standard_error_is_that_of_a_median() -> None:
    assert standard_error([1.0, 1.0, 1.0, 9.0]) == 0
    assert standard_error([0.0, 1.0, 2.0, 3.0]) == pytest.approx(0.929)
