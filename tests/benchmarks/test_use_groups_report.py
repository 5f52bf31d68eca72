"""Check the tables of plans with and without use groups."""

from __future__ import annotations

from graphs import gpt2

from benchmarks.plans.use_groups import ROUNDS, TIMED_SHARES, frontier_rows, timed, times_row

SMALL = gpt2(1, batch=2, length=64, width=48, vocabulary=64)


def test_a_frontier_begins_at_the_minimum_peak_and_takes_less_time_with_more_memory() -> None:
    rows = frontier_rows("small", SMALL)
    times = [float(row[2]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert all(row[2:5] == row[5:] for row in rows)  # a transformer has no use groups


def test_a_budget_without_a_plan_is_a_row_with_the_error() -> None:
    error, seconds = timed(SMALL, 1, True)
    assert type(error).__name__ == "InfeasibleBudget"
    assert seconds >= 0


def test_plan_times_are_medians_of_plans_in_turn() -> None:
    name, n_groups, *_, ratio = times_row("small", SMALL)
    assert (name, n_groups) == ("small", "0")
    assert float(ratio) > 0
    assert ROUNDS * len(TIMED_SHARES) > 1
