"""Check the first moments of a search, lower limits, and how a search rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import graphs
import pytest

from autoac.planner import build
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import chain
from autoac.planner.solver import search
from autoac.planner.solver.constrained_moments import CELLS, FIRST_STRETCHES, first_moments
from autoac.planner.solver.highs import Outcome, Program, Stopped
from autoac.planner.solver.moments import DuringStep
from autoac.planner.solver.program import UNDECIDED
from autoac.planner.solver.recompute_windows import find_windows
from autoac.planner.solver.search import FAR, LIMITS, Search
from autoac.planner.solver.start.search_problem import Problem
from autoac.planner.solver.time_limit import Allowance, Stopwatch


def of_backward(n_ops: int) -> int:
    graph = chain(*[1] * n_ops)
    points = first_moments(find_windows(graph), [graph.everything])
    return sum(isinstance(point, DuringStep) for point in points)


def test_the_first_program_of_a_large_graph_has_fewer_moments() -> None:
    few, many = FIRST_STRETCHES
    large = CELLS // (few + 1)
    assert of_backward(100) in range(many // 2, many + 1)
    assert of_backward(large) in range(1, few + 2)


def test_a_good_enough_plan_is_proven_so_without_a_search_for_better_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans within the gap of the best one are of no use, so the full program has none of them."""
    problem = Problem(build(graphs.gpt2(2)))
    budget = (3 * problem.bounds.floor + problem.bounds.ceiling) // 4
    known = Search(problem, budget, gap=0.0, allowance=Allowance(60.0, Stopwatch(60.0), None))
    known.run()
    asked: list[float] = []

    class Recorded(Allowance):
        def solve(self, program: Program, scale: float, **options: Any) -> Outcome:
            if "gap" in options:
                asked.append(program.rows.upper[-1] * scale)
            return super().solve(program, scale, **options)

    monkeypatch.setattr(search, "TIME_NEIGHBORHOODS", ())
    monkeypatch.setattr(Search, "_try_blocks", lambda self: None)
    monkeypatch.setattr(Search, "_branch", lambda self, built, relaxed: replace(relaxed, values=None))
    found = Search(
        problem,
        budget,
        gap=0.02,
        allowance=Recorded(60.0, Stopwatch(60.0), None),
        start=[known.best.save_set or frozenset()],
    )
    assert found.run() is Stopped.OPTIMAL
    assert asked
    assert max(asked) <= known.best.cost * (1 - 0.019) * (1 + 1e-9)


def test_best_plan_is_filled_before_the_full_program_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(build(graphs.gpt2(4)))
    budget = (2 * problem.bounds.floor + problem.bounds.ceiling) // 3
    searched = Search(problem, budget, gap=0.0, allowance=Allowance(60.0, Stopwatch(60.0), None))
    built, relaxed = searched._relaxation()
    first = searched.best.cost
    monkeypatch.setattr(searched, "_consider", lambda *_: None)  # whatever the program finds
    searched._full_program(built, relaxed)
    assert searched.best.save_set is not None
    assert searched.best.cost < first
    assert peak_bytes(problem.graph, searched.best.save_set) <= budget


def recurrent_search() -> Search:
    problem = Problem(build(graphs.recurrent(32)))
    budget = (problem.bounds.floor + problem.bounds.ceiling) // 2
    return Search(problem, budget, gap=0.01, allowance=Allowance(20.0, Stopwatch(60.0), None))


def test_relaxations_for_lower_limits_give_a_plan_of_a_long_chain() -> None:
    searched = recurrent_search()
    built, relaxed = searched._relaxation()
    searched._consider(built, relaxed, in_part=True)
    assert searched.judge.missing  # no way to round it fits
    bound, before = searched.best.bound, searched.best.cost
    nothing = searched._lowered_limit(built, relaxed)
    assert nothing.values is None
    assert searched.best.bound == bound  # those for lower limits prove nothing
    assert searched.best.save_set is not None
    assert searched.budget is not None
    assert peak_bytes(searched.graph, searched.best.save_set) <= searched.budget
    assert searched.best.cost < 0.8 * before


def test_every_relaxation_for_a_lower_limit_is_rounded_and_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = recurrent_search()
    built, relaxed = searched._relaxation()
    solved: list[Outcome] = []
    simulated: list[int] = []
    solve = searched.allowance.solve

    def recorded(*args: Any, **kwargs: Any) -> Outcome:
        solved.append(solve(*args, **kwargs))
        return solved[-1]

    def a_byte_too_much(*_: object) -> int:
        assert searched.budget is not None
        simulated.append(searched.budget + 1)
        return simulated[-1]

    monkeypatch.setattr(searched.allowance, "solve", recorded)
    monkeypatch.setattr(search, "peak_bytes", a_byte_too_much)
    searched._lowered_limit(built, relaxed)
    assert len(solved) == LIMITS
    assert all(outcome.values is not None for outcome in solved)
    assert len(simulated) == 1 + LIMITS


def test_lower_limits_are_tried_only_far_from_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = recurrent_search()
    built, relaxed = searched._relaxation()
    monkeypatch.setattr(search, "build_program", None)
    searched.best.take(searched.best.bound / (1 - FAR) - 1e-6, searched.graph.everything)
    assert searched._lowered_limit(built, relaxed).values is None


def test_decisions_are_rounded_up_if_that_takes_less_memory() -> None:
    searched = recurrent_search()
    built, relaxed = searched._relaxation()
    decisions = built.decisions(relaxed.values)
    some, parts = built.rounded(decisions), built.rounded(decisions, UNDECIDED)
    assert peak_bytes(searched.graph, parts) < peak_bytes(searched.graph, some)
    searched.judge.consider_rounded(built, decisions, 0.0)
    missing = searched.judge.missing
    searched.judge.consider(parts, 0.0)
    assert searched.judge.missing == missing
    searched.judge.consider(some, 0.0)
    assert searched.judge.missing != missing
