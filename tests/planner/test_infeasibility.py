"""Check why no plan fits, as data and as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import chain

from autoac.planner import Constraints, InfeasibleBudget, plan
from autoac.planner.infeasibility import Blame, PinnedBytes, blame_in_words, find_blame


def blame(constraints: Constraints, budget: int) -> Blame:
    graph = chain(1, 8, 1, 8, 0)
    with pytest.raises(InfeasibleBudget) as caught:
        plan(graph, budget_bytes=budget, constraints=constraints)
    return find_blame(caught.value, graph, constraints, constraints.forward_budget_bytes)


def test_pins_are_blamed_with_the_bytes_that_they_hold() -> None:
    found = blame(Constraints(pin_save=("op1", "op3")), 10)
    assert sum(pin.nbytes for pin in found.pins) == 16
    assert {pin.n_ops for pin in found.pins} == {1}
    assert found.forward_limit is None


def test_limit_of_forward_is_blamed_if_a_plan_fits_without_it() -> None:
    found = blame(Constraints(forward_budget_bytes=5), 12)
    assert (found.forward_limit, found.reserve, found.pins) == (5, 7, ())
    assert found.peak_without_limit <= 12


def test_blame_is_written_a_line_for_each_constraint() -> None:
    assert not list(blame_in_words(Blame()))
    held = PinnedBytes("pin_save 'm'", 2, 2048)
    pins = Blame(pins_at="op4, forward", pins=(held,), n_pinned_to_recompute=3)
    assert list(blame_in_words(pins)) == [
        "Pins alone hold 2.00 KiB at op4, forward:",
        "    2.00 KiB  2 ops  (pin_save 'm')",
        "pin_recompute has 3 ops recomputed, whose outputs are live from their first use on.",
    ]


def test_smaller_batch_is_no_advice_where_the_peak_is_the_optimizers() -> None:
    with pytest.raises(InfeasibleBudget, match="a smaller batch does not help"):
        plan(replace(chain(1, 8, 1), closing_bytes=100), budget_bytes=50)
    with pytest.raises(InfeasibleBudget, match="or use a smaller batch"):
        plan(replace(chain(1, 8, 1), closing_bytes=1), budget_bytes=2)
