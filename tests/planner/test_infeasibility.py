"""Check why no plan fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import chain

from autoac.planner import InfeasibleBudget, plan


def test_smaller_batch_is_no_advice_where_the_peak_is_the_optimizers() -> None:
    with pytest.raises(InfeasibleBudget, match="a smaller batch does not help"):
        plan(replace(chain(1, 8, 1), closing_bytes=100), budget_bytes=50)
    with pytest.raises(InfeasibleBudget, match="or use a smaller batch"):
        plan(replace(chain(1, 8, 1), closing_bytes=1), budget_bytes=2)
