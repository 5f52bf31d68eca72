"""Check the summary of `python -m benchmarks.profile_cost`."""

from __future__ import annotations

from benchmarks.profile_cost import FakeCost, Row, render


def test_the_summary_counts_models_within_the_limits() -> None:
    lean = Row("lean", 300, 90, plain_s=1.0, ratios=[1.5, 1.9, 9.0])
    greedy = Row("greedy", 300, 180, plain_s=0.5, ratios=[2.6, 2.7, 2.8])
    page = render([lean, greedy], FakeCost(7, [1.0, 0.5], 2**30))
    assert (
        "at most half of the memory in 1 of 2 models, and a profile takes at most 2 plain steps in 1." in page
    )
    assert "| lean | 1000 | 300 B | 90 B | 0.30 | 1.90 |" in page
    assert "| greedy | 500 | 300 B | 180 B | 0.60 | 2.70 |" in page
