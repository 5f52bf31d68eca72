"""Check that the small steps fit Checkmate and leave something to decide."""

from __future__ import annotations

import pytest

from autoac.planner import bounds, build
from benchmarks.models.large import FEW_LAYERS
from benchmarks.plans.checkmate import MOST_OPS
from benchmarks.plans.profiles import make


@pytest.mark.parametrize("name", FEW_LAYERS)
def test_a_small_step_is_small_enough_for_checkmate(name):
    graph = build(make(name, "h100"))
    assert len(graph.ops) <= MOST_OPS
    known = bounds(graph)
    assert known.floor < known.ceiling
