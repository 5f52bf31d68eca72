"""The prototype's search for a smaller peak: what it returns is what the simulator says, and never worse."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import graphs
import pytest

from autoac.planner import build, simulate
from autoac.planner.graph import chain
from autoac.planner.levels import anytime_floor, cost


@pytest.fixture
def low_budgets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import low_budgets

    return low_budgets


def test_two_levels_need_less_than_one_on_a_stack_of_layers(low_budgets: ModuleType) -> None:
    graph = low_budgets.sharded(build(graphs.gpt2(6, vocabulary=64, length=32)))
    proven, once, twice = low_budgets.search(graph, 2.0)
    assert proven <= once.peak
    assert anytime_floor(graph) <= twice.peak < once.peak
    assert twice.recompute_us > once.recompute_us
    assert (once.most_runs, twice.most_runs > 1) == (1, True)


def test_climbing_with_one_level_ends_at_a_save_set(low_budgets: ModuleType) -> None:
    graph = chain(*[1] * 30)
    levels = low_budgets.climb(graph, tuple([0] + [1] * 29), deepest=1)
    saved = frozenset(op.id for op in graph.ops if levels[op.id] == 0)
    assert cost(graph, levels).peak == simulate(graph, saved).peak.live_bytes <= 30


def test_sharding_takes_static_bytes_and_lasting_gradients_away(low_budgets: ModuleType) -> None:
    tape = graphs.Tape(static=100, gradients=7)
    (v,) = tape.op("a", [], 4)
    tape.step("first", [tape.save(v)], other=2, peak=9)  # makes a gradient of 3, which stays
    tape.step("second", [], other=3, peak=5)
    graph = low_budgets.sharded(build(tape.profile()))
    assert (graph.static_bytes, graph.closing_bytes) == (0, 0)
    assert [(step.other, step.peak) for step in graph.steps] == [(0, 7), (0, 2)]
