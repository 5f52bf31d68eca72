"""Random training loops keep their budget or say that they do not; `make bench-loops` runs many more."""

from __future__ import annotations

from types import ModuleType

import pytest

from benchmarks.loops.random_loops import drawn, tried
from benchmarks.loops.runs import OnStandin


@pytest.mark.parametrize("seed", [4, 6, 8, 16, 30, 45, 81, 138])
def test_random_loop_has_plain_numbers_and_keeps_its_budget_or_says_so(gpu: ModuleType, seed: int) -> None:
    row = tried(drawn(seed), OnStandin)
    assert not row.faults, row
    assert row.planned
