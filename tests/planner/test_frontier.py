"""Check the laws of a frontier."""

from __future__ import annotations

from dataclasses import replace

import graphs
import oracles
import pytest
from hypothesis import given, settings

from autoac.planner import (
    Constraints,
    InvalidBudget,
    InvalidConstraints,
    bounds,
    build,
    find_frontier,
    find_minimum_peak,
)
from autoac.planner.frontier import _monotone
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import plan as planned
from autoac.planner.solver.highs import Progress, Stopped

few = settings(max_examples=25, derandomize=True, deadline=None)


@few
@given(graphs.seeds)
def test_every_plan_of_a_frontier_is_the_fastest_that_fits_its_peak(seed: int) -> None:
    graph = graphs.random_graph(seed, 6)
    table = oracles.peaks_and_times(graph)
    made = find_frontier(graph, points=5, gap=0.0)
    for plan in made.plans:
        assert plan.recompute_us == pytest.approx(oracles.least_time(table, plan.budget))
    for plan in made.plans:
        assert plan.bound_us <= oracles.least_time(table, plan.peak) + 1e-6
        assert plan.peak == peak_bytes(graph, plan.save_set) <= max(plan.budget, made.floor.found)


@few
@given(graphs.seeds)
def test_budget_of_a_stopped_point_selects_that_point(seed: int) -> None:
    graph = graphs.random_graph(seed, 6)
    table = oracles.peaks_and_times(graph)
    made = find_frontier(graph, points=5, gap=0.0).plans
    larger = [plan.budget for plan in made] + [plan.budget * 2 for plan in made]
    stopped = [replace(plan, budget=larger[i + seed % len(made)]) for i, plan in enumerate(made)]
    stopped = [replace(plan, bound_us=oracles.least_time(table, plan.budget)) for plan in stopped]
    found = _monotone(stopped)
    for plan in found:
        assert [other for other in found if other.peak <= plan.budget][-1] is plan
        assert plan.bound_us <= oracles.least_time(table, plan.budget) + 1e-6


def test_plan_far_below_its_budget_gets_its_peak_as_budget_and_the_bound_of_its_neighbor() -> None:
    graph = build(graphs.gpt2(2))
    low, high = find_minimum_peak(graph).found, bounds(graph).ceiling
    small, middle, large = (planned(graph, budget_bytes=low + (high - low) * n // 10) for n in (0, 3, 6))
    stopped = replace(small, budget=large.budget + 1, bound_us=0.0, stopped=Stopped.TIME_LIMIT)
    first, *rest = _monotone([large, stopped, middle])
    assert (first.budget, first.bound_us, first.stopped) == (small.peak, middle.bound_us, Stopped.TIME_LIMIT)
    assert rest == [middle, large]
    assert _monotone([stopped, small])[0] == small  # of the same plan, the search that got further


@pytest.mark.slow
def test_frontier_of_a_transformer_is_monotone_from_floor_to_ceiling() -> None:
    graph = build(graphs.gpt2(3))
    seen: list[Progress] = []
    made = find_frontier(graph, points=6, progress=seen.append)
    assert {(now.point, now.points) for now in seen} - {(0, 0)} <= {(n, 6) for n in range(2, 7)}
    assert seen[-1].point == 6
    peaks = [plan.peak for plan in made.plans]
    times = [plan.recompute_us for plan in made.plans]
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)
    assert peaks[0] == made.floor.found
    assert peaks[-1] <= bounds(graph).ceiling
    assert times[-1] == 0
    assert all(plan.gap <= 0.01 for plan in made.plans)


def test_a_frontier_of_one_point_is_refused() -> None:
    with pytest.raises(InvalidBudget, match="points must be at least 2, got 1"):
        find_frontier(build(graphs.gpt2(2)), points=1)


@pytest.mark.slow
def test_frontier_obeys_constraints_and_writes_them_into_each_policy() -> None:
    profile = graphs.gpt2(2)
    rules = Constraints(extra_static_bytes=512)
    plain, under = find_frontier(profile, points=3), find_frontier(profile, points=3, constraints=rules)
    assert [p.peak - q.peak for p, q in zip(under.plans, plain.plans, strict=True)] == [512] * 3
    assert all(plan.policy().constraints == rules for plan in under.plans)
    assert find_minimum_peak(profile, constraints=rules).found == find_minimum_peak(profile).found + 512


def test_forward_budget_without_a_budget_of_the_step_is_refused() -> None:
    rules = Constraints(forward_budget_bytes=100)
    for ask in (find_frontier, find_minimum_peak):
        with pytest.raises(InvalidConstraints, match="forward_budget_bytes must be None here, got 100"):
            ask(build(graphs.gpt2(2)), constraints=rules)
