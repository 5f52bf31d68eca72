"""The search for a save set: where it starts, and the neighbourhoods it looks into."""

from __future__ import annotations

import graphs
import numpy as np
import pytest

from autoac.planner import build, search
from autoac.planner.facts import facts
from autoac.planner.graph import chain
from autoac.planner.highs import Outcome
from autoac.planner.ilp import Built, Options, Work
from autoac.planner.points import CELLS, FIRST_WINDOWS, first_points
from autoac.planner.search import UNDECIDED, Problem, Search


def of_backward(n_ops: int) -> int:
    graph = chain(*[1] * n_ops)
    points = first_points(facts(graph), [graph.everything])
    return sum(isinstance(point, Work) for point in points)


def test_the_first_program_of_a_large_graph_has_fewer_moments() -> None:
    few, many = FIRST_WINDOWS
    large = CELLS // (few + 1)
    assert of_backward(100) in range(many // 2, many + 1)
    assert of_backward(large) in range(1, few + 2)


def test_the_rest_is_decided_around_what_the_relaxation_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build(graphs.gpt2(4))
    problem = Problem.of(graph)
    budget = (problem.bounds.floor + 4 * problem.bounds.ceiling) // 5
    looked: list[tuple[Built, Outcome, Outcome]] = []
    rest = Search._rest

    def noted(self: Search, built: Built, relaxed: Outcome) -> Outcome:
        looked.append((built, relaxed, rest(self, built, relaxed)))
        return looked[-1][2]

    monkeypatch.setattr(Search, "_rest", noted)
    monkeypatch.setattr(search, "MANY_UNDECIDED", 1)
    found = Search(problem, budget, gap=0.01, time_limit_s=60, options=Options())
    found.run()
    (built, relaxed, candidate), *_ = looked
    assert relaxed.values is not None
    assert candidate.values is not None
    before, after = relaxed.values[built.saves], candidate.values[built.saves]
    decided = np.abs(before - np.round(before)) <= UNDECIDED
    assert 0 < (~decided).sum() < decided.sum()
    assert np.array_equal(np.round(before[decided]), after[decided])
    assert set(np.round(after, 6)) <= {0.0, 1.0}


def test_few_open_decisions_are_left_to_the_neighbourhoods(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.of(build(graphs.gpt2(4)))
    budget = (problem.bounds.floor + 4 * problem.bounds.ceiling) // 5
    told: list[Outcome] = []
    rest = Search._rest
    monkeypatch.setattr(Search, "_rest", lambda *a: told.append(rest(*a)) or told[-1])
    Search(problem, budget, gap=0.01, time_limit_s=60, options=Options()).run()
    assert [outcome.values for outcome in told] == [None]
