"""Check branch and bound: plans and bounds against brute force, its limits, and programs that HiGHS keeps."""

from __future__ import annotations

import math
import random
from typing import Any

import graphs
import numpy as np
import oracles
import pytest

from autoac.planner import Graph, build
from autoac.planner.memory.simulate import fits, peak_bytes
from autoac.planner.solver import search
from autoac.planner.solver.branch.tree import Node, Tree
from autoac.planner.solver.constrained_moments import first_moments
from autoac.planner.solver.highs import Outcome, Progress, Relaxation, Stopped, solve
from autoac.planner.solver.program import BuiltProgram, build_program
from autoac.planner.solver.search import Search
from autoac.planner.solver.start.search_problem import Problem
from autoac.planner.solver.time_limit import Allowance, Stopwatch

ROUNDING = 1 + 1e-6


@pytest.fixture
def branched(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Leave branching as the only way to a proof; return the nodes that it branched on."""
    nodes: list[Node] = []
    original = Tree.branch

    def record(self: Tree, node: Node, best: float) -> None:
        nodes.append(node)
        original(self, node, best)

    def forbidden(*_: Any) -> None:
        raise AssertionError("the full program is not needed")

    monkeypatch.setattr(Tree, "branch", record)
    monkeypatch.setattr(search, "TIME_NEIGHBORHOODS", ())
    monkeypatch.setattr(search, "STALL_NODES", 10**9)
    monkeypatch.setattr(Search, "_try_blocks", lambda _: None)
    monkeypatch.setattr(Search, "_full_program", forbidden)
    return nodes


def problem_of(seed: int) -> tuple[Graph, int]:
    rng = random.Random(seed)
    graph = build(graphs.random_profile(rng, 9))
    peaks = sorted({peak for peak, _ in oracles.peaks_and_times(graph).values()})
    ceiling = peak_bytes(graph, graph.everything)
    return graph, rng.choice([peak for peak in peaks if peak < ceiling] or [ceiling]) or 1


def search_of(graph: Graph, budget: int, gap: float, allowance: Allowance | None = None) -> Search:
    allowance = allowance or Allowance(60.0, Stopwatch(60.0), None)
    return Search(Problem(graph), budget, gap=gap, allowance=allowance)


def budget_of(graph: Graph, share: float) -> int:
    bounds = Problem(graph).bounds
    return int(bounds.floor + share * (bounds.ceiling - bounds.floor))


def built_for(problem: Problem, share: float) -> BuiltProgram:
    moments = first_moments(problem.windows, [problem.graph.everything])
    return build_program(problem.arrays, budget_of(problem.graph, share), moments)


@pytest.mark.parametrize("gap", [0.0, 0.1, 0.3])
def test_branching_finds_and_proves_the_optimum_of_brute_force(branched: list[Node], gap: float) -> None:
    for seed in range(80):
        graph, budget = problem_of(seed)
        least = oracles.least_time(oracles.peaks_and_times(graph), budget)
        found = search_of(graph, budget, gap)
        assert found.run() is Stopped.OPTIMAL
        assert found.best.bound <= least * ROUNDING, seed
        assert found.best.cost * (1 - gap) <= least * ROUNDING, seed
        assert found.best.save_set is not None
        assert fits(found.graph, found.best.save_set, budget)
    assert len(branched) > 10


def test_a_tree_that_stalls_leaves_the_proof_to_the_full_program(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build(graphs.gpt2(2))
    budget = budget_of(graph, 0.5)
    best = search_of(graph, budget, 0.0)
    best.run()
    solved: list[str] = []
    original = Search._full_program

    def record(self: Search, *arguments: Any) -> Any:
        solved.append("full program")
        return original(self, *arguments)

    monkeypatch.setattr(Search, "_full_program", record)
    monkeypatch.setattr(search, "TIME_NEIGHBORHOODS", ())
    monkeypatch.setattr(Search, "_try_blocks", lambda _: None)
    monkeypatch.setattr(search, "STALL_NODES", 1)
    monkeypatch.setattr(search, "STALL_SHARE", 1.0)
    stalled = search_of(graph, budget, 0.0)
    assert stalled.run() is Stopped.OPTIMAL
    assert stalled.best.cost == pytest.approx(best.best.cost)
    assert solved


@pytest.mark.parametrize("seed", [1, 16, 24])
def test_full_program_has_the_rows_that_branching_added(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Solve no program whose candidates branching has found too large before."""
    has_all_rows: list[bool] = []
    original = Search._full_program

    def record(self: Search, built: BuiltProgram, relaxed: Outcome) -> Outcome:
        assert self._tree is not None
        has_all_rows.append(self._tree.built is built)
        return original(self, built, relaxed)

    monkeypatch.setattr(Search, "_full_program", record)
    monkeypatch.setattr(Search, "_try_blocks", lambda _: None)
    monkeypatch.setattr(search, "TIME_NEIGHBORHOODS", ())
    monkeypatch.setattr(search, "STALL_NODES", 4)
    monkeypatch.setattr(search, "STALL_SHARE", 1.0)
    graph = build(graphs.random_profile(random.Random(seed), 20))
    assert search_of(graph, budget_of(graph, 0.3), 0.0).run() is Stopped.OPTIMAL
    assert has_all_rows
    assert all(has_all_rows)


@pytest.mark.parametrize("share", [0.1, 0.6, 0.8])
def test_best_plan_ends_a_search_without_a_gap(share: float) -> None:
    """Take costs for equal that differ by rounding: rule out no plan that fits, and prove no more than it."""
    graph = build(graphs.gpt2(2))
    found = search_of(graph, budget_of(graph, share), 0.0)
    assert found.run() is Stopped.OPTIMAL
    assert found.excluded == []
    assert not found.options.lazy_rows
    assert found.best.bound <= found.best.cost


@pytest.mark.parametrize("work", [0.05, 0.2, 0.5])
def test_a_limit_in_the_tree_leaves_a_plan_and_a_bound_that_holds(branched: list[Node], work: float) -> None:
    graph = build(graphs.gpt2(4))
    budget = budget_of(graph, 0.5)
    best = search_of(graph, budget, 0.0)
    best.run()
    limited = search_of(graph, budget, 0.0, Allowance(work, Stopwatch(60.0), None))
    limited.run()
    assert limited.best.save_set is not None
    assert limited.best.bound <= best.best.cost * ROUNDING


def test_branching_stops_when_progress_says_so(branched: list[Node]) -> None:
    def progress(_: Progress) -> bool:
        return len(branched) > 2

    allowance = Allowance(60.0, Stopwatch(60.0), progress)
    stopped = search_of(build(graphs.gpt2(4)), budget_of(build(graphs.gpt2(4)), 0.5), 0.0, allowance)
    assert stopped.run() is Stopped.INTERRUPTED
    assert len(branched) == 3
    assert stopped.best.save_set is not None


def test_relaxation_solved_again_equals_a_new_one() -> None:
    problem = Problem(build(graphs.gpt2(2)))
    built = built_for(problem, 0.5)
    kept, rng, infeasible, cut_off = Relaxation(built.program), random.Random(0), 0, 0
    first, basis = kept.solve({})
    assert first.objective is not None
    for _ in range(30):
        columns = rng.sample([int(column) for column in built.s_columns], rng.randrange(1, 8))
        fixed = {column: float(rng.random() < 0.7) for column in columns}
        again, _ = kept.solve(fixed, basis)
        new = solve(built.program.fixed(np.array(columns), np.array(list(fixed.values()))), relaxed=True)
        assert again.stopped is new.stopped
        if new.objective is None:
            infeasible += 1
            continue
        assert again.objective == pytest.approx(new.objective, rel=1e-6)
        under, found = kept.solve(fixed, basis, cutoff=new.objective * 0.99)
        if found is None:
            assert under.stopped is Stopped.INFEASIBLE
            cut_off += 1
        else:
            assert under.objective == pytest.approx(new.objective, rel=1e-6)
    assert infeasible < 20
    assert cut_off > 2
    assert kept.solve({})[0].objective == pytest.approx(first.objective)


def test_column_is_fixed_again_after_it_was_free() -> None:
    problem = Problem(build(graphs.gpt2(2)))
    kept = Relaxation(built_for(problem, 0.5).program)
    free = kept.solve({})[0].objective
    for column in (int(column) for column in built_for(problem, 0.5).s_columns):
        for value in (0.0, 1.0):
            first = kept.solve({column: value})[0]
            assert kept.solve({})[0].objective == pytest.approx(free)
            again = kept.solve({column: value})[0]
            assert again.stopped is first.stopped
            assert again.objective == pytest.approx(first.objective)


def test_children_whose_solves_run_out_of_work_prove_nothing() -> None:
    problem = Problem(build(graphs.gpt2(2)))
    allowance = Allowance(60.0, Stopwatch(60.0), None)
    tree = Tree(built_for(problem, 0.5), allowance)
    node = tree.select(math.inf, math.inf)
    assert node is not None
    assert node.open
    before = tree.bound
    allowance.work_left = 1e-9
    tree.branch(node, math.inf)
    assert tree.stopped is Stopped.WORK_LIMIT
    assert tree.bound == before
    assert tree.select(math.inf, math.inf) is None


def test_node_is_solved_again_once_the_program_has_tighter_rows() -> None:
    problem = Problem(build(graphs.gpt2(2)))
    tree = Tree(built_for(problem, 0.5), Allowance(60.0, Stopwatch(60.0), None))
    for _ in range(3):
        node = tree.select(math.inf, math.inf)
        assert node is not None
        tree.branch(node, math.inf)
    before, tighter = tree.bound, built_for(problem, 0.4)
    tree.use(tighter)
    assert tree.bound == before  # what the nodes have proven holds
    for _ in range(4):
        node = tree.select(math.inf, math.inf)
        assert node is not None
        columns, values = np.array(list(node.fixed)), np.array(list(node.fixed.values()))
        new = solve(tighter.program.fixed(columns, values), relaxed=True)
        assert node.bound == pytest.approx(new.objective, rel=1e-6)
        assert node.bound > before * 1.01
        tree.branch(node, math.inf)
