"""Compare random programs that move outputs to the host with plain ones, the planner and the allocator."""

from __future__ import annotations

import pytest

from benchmarks.fuzzers import moved_programs


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_run_as_predicted(seed: int) -> None:
    assert moved_programs.tried(seed).differs == ""
