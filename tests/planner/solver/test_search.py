"""The search for a save set: where it starts, and the neighbourhoods it looks into."""

from __future__ import annotations

import graphs
import numpy as np
import pytest

from autoac.planner import build
from autoac.planner.problem.graph import chain
from autoac.planner.solver import search
from autoac.planner.solver.constrained_moments import CELLS, FIRST_WINDOWS, first_points
from autoac.planner.solver.highs import Outcome
from autoac.planner.solver.program import Built, Work, build_program
from autoac.planner.solver.recompute_windows import facts
from autoac.planner.solver.search import TILT, Problem, Search, tilted
from autoac.planner.solver.time_limit import Allowance, Stopwatch


def of_backward(n_ops: int) -> int:
    graph = chain(*[1] * n_ops)
    points = first_points(facts(graph), [graph.everything])
    return sum(isinstance(point, Work) for point in points)


def test_the_first_program_of_a_large_graph_has_fewer_moments() -> None:
    few, many = FIRST_WINDOWS
    large = CELLS // (few + 1)
    assert of_backward(100) in range(many // 2, many + 1)
    assert of_backward(large) in range(1, few + 2)


def test_costs_that_rise_along_the_model_keep_every_row_and_change_no_cost_by_more_than_the_tilt() -> None:
    graph = build(graphs.gpt2(2))
    problem = Problem(graph)
    built = build_program(
        problem.columns, problem.bounds.ceiling, first_points(problem.facts, [graph.everything])
    )
    risen = tilted(built, len(graph.ops))
    before, after = built.program.costs, risen.costs
    assert risen.rows is built.program.rows
    assert np.all(np.abs(after - before) <= TILT * np.abs(before))
    assert (after != before).sum() > len(built.ops) / 2


def test_many_open_decisions_are_taken_in_turn_and_few_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(build(graphs.gpt2(4)))
    budget = (problem.bounds.floor + 4 * problem.bounds.ceiling) // 5
    in_turn = Search._in_turn
    told: list[Outcome] = []

    def noted(self: Search, built: Built, relaxed: Outcome) -> Outcome:
        told.append(in_turn(self, built, relaxed))
        return told[-1]

    monkeypatch.setattr(Search, "_in_turn", noted)
    plans = []
    for many in (10_000, 1):
        monkeypatch.setattr(search, "MANY_UNDECIDED", many)
        allowance = Allowance(60.0, Stopwatch(60.0), None)
        found = Search(problem, budget, gap=0.01, allowance=allowance)
        found.run()
        plans.append(found)
    assert [outcome.values is None for outcome in told] == [True, False]
    first, second = plans
    assert first.best is not None
    assert second.best is not None
    rounding = 1 + 1e-9
    assert second.bound_us <= first.best[0] * rounding  # the tilted costs are no bound
    assert first.bound_us <= second.best[0] * rounding
