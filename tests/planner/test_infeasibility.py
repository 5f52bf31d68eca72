"""Check why no plan fits, as data and as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import chain

from autoac.planner import InfeasibleBudget, plan
from autoac.planner.infeasibility import Blame, PinnedBytes, blame_in_words


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
