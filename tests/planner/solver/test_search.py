"""Check the first moments of a search, its efforts one by one, and what it makes of their answers."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from typing import Any

import graphs
import oracles
import pytest
from graphs import chain

from autoac.planner import Graph, build
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.solver import search
from autoac.planner.solver.constrained_moments import CELLS, FIRST_STRETCHES, first_moments
from autoac.planner.solver.efforts import Effort, EffortResult, Round, full_program, lowered_limits, rounded
from autoac.planner.solver.highs import Outcome, Program, Stopped
from autoac.planner.solver.incumbent import Goal
from autoac.planner.solver.moments import DuringStep
from autoac.planner.solver.program import UNDECIDED
from autoac.planner.solver.recompute_windows import find_windows
from autoac.planner.solver.search import Search
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance, Stopwatch

ROUNDING = 1 + 1e-6
efforts_module = sys.modules["autoac.planner.solver.efforts"]


def of_backward(n_ops: int) -> int:
    graph = chain(*[1] * n_ops)
    points = first_moments(find_windows(graph), [graph.everything])
    return sum(isinstance(point, DuringStep) for point in points)


def test_the_first_program_of_a_large_graph_has_fewer_moments() -> None:
    few, many = FIRST_STRETCHES
    large = CELLS // (few + 1)
    assert of_backward(100) in range(many // 2, many + 1)
    assert of_backward(large) in range(1, few + 2)


def search_of(graph: Graph, budget: int, gap: float, **options: Any) -> Search:
    allowance = Allowance(60.0, Stopwatch(60.0), None)
    return Search(SearchProblem(graph), budget, goal=Goal(gap), allowance=allowance, **options)


def only(monkeypatch: pytest.MonkeyPatch, *chosen: Effort) -> None:
    monkeypatch.setattr(search, "efforts", lambda _: list(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.0, 0.1, 0.3])
def test_the_full_program_alone_finds_and_proves_the_optimum_of_brute_force(
    monkeypatch: pytest.MonkeyPatch, gap: float
) -> None:
    only(monkeypatch, full_program)
    for seed in range(80):
        rng = random.Random(seed)
        graph = build(graphs.random_profile(rng, 9))
        table = oracles.peaks_and_times(graph)
        ceiling = peak_bytes(graph, graph.everything)
        peaks = sorted({peak for peak, _ in table.values() if peak < ceiling})
        budget = rng.choice(peaks or [ceiling])
        least = oracles.least_time(table, budget)
        found = search_of(graph, budget or 1, gap)
        assert found.run() is Stopped.OPTIMAL
        assert found.best.bound <= least * ROUNDING, seed
        assert found.best.cost * (1 - gap) <= least * ROUNDING, seed


@pytest.mark.parametrize("share", [0.1, 0.6, 0.8])
def test_best_plan_ends_a_search_without_a_gap(share: float) -> None:
    """Take costs for equal that differ by rounding: rule out no plan that fits, and prove no more than it."""
    graph = build(graphs.gpt2(2))
    found = search_of(graph, graphs.between(graph, share), 0.0)
    assert found.run() is Stopped.OPTIMAL
    assert found.excluded == []
    assert not found.options.lazy_rows
    assert found.best.bound <= found.best.cost


def test_a_good_enough_plan_is_proven_so_without_a_search_for_better_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans within the gap of the best one are of no use, so the full program has none of them."""
    graph = build(graphs.gpt2(2))
    budget = graphs.between(graph, 0.25)
    known = search_of(graph, budget, 0.0)
    known.run()
    asked, scales = list[float](), list[float]()

    class Recorded(Allowance):
        def solve(self, program: Program, **options: Any) -> Outcome:
            if "gap" in options:
                asked.append(program.cutoff)
            return super().solve(program, **options)

    def scaled(now: Round) -> Iterator[EffortResult]:
        scales.append(now.built.cost_scale)
        return full_program(now)

    only(monkeypatch, scaled)
    allowance = Recorded(60.0, Stopwatch(60.0), None)
    start = [known.best.save_set or frozenset()]
    found = Search(SearchProblem(graph), budget, goal=Goal(0.02), allowance=allowance, start=start)
    assert found.run() is Stopped.OPTIMAL
    assert asked
    assert max(asked) * scales[0] <= known.best.cost * (1 - 0.019) * (1 + 1e-9)


def recurrent_search() -> Search:
    graph = build(graphs.recurrent(32))
    return search_of(graph, graphs.between(graph, 0.5), 0.01)


def recurrent_round() -> Round:
    return recurrent_search()._relaxation()


@pytest.mark.slow
def test_relaxations_for_lower_limits_give_a_plan_of_a_long_chain() -> None:
    searched = recurrent_search()
    now = searched._relaxation()
    assert all(searched._take(answer) or answer.save_set for answer in rounded(now))
    bound, before = searched.best.bound, searched.best.cost
    answers = list(lowered_limits(now))
    assert [answer.bound for answer in answers] == [-math.inf]  # it proves nothing
    assert not searched._take(answers[0])
    assert searched.best.bound == bound
    assert peak_bytes(searched.problem.graph, searched.best.save_set) <= searched.budget
    assert searched.best.cost < 0.8 * before


def test_decisions_are_rounded_up_if_that_takes_less_memory() -> None:
    now = recurrent_round()
    assert now.relaxed.values is not None
    decisions = now.built.decisions(now.relaxed.values)
    some, parts = now.built.rounded(decisions), now.built.rounded(decisions, UNDECIDED)
    assert peak_bytes(now.problem.graph, parts) < peak_bytes(now.problem.graph, some)
    *_, last = rounded(now)
    assert last.save_set == parts
