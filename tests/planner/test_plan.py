"""Compare plan() and find_minimum_peak() with brute force, and check their laws."""

from __future__ import annotations

import itertools
import pickle
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import graphs
import numpy as np
import oracles
import pytest
from graphs import chain
from hypothesis import given, settings

from autoac.planner import (
    Constraints,
    Graph,
    InfeasibleBudget,
    InvalidBudget,
    InvalidLimit,
    PlannerError,
    Profile,
    Progress,
    SolverOutOfTime,
    Stopped,
    bounds,
    build,
    find_frontier,
    find_minimum_peak,
    plan,
    plan_with_host,
)
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import fits, peak_bytes, peak_of, simulate
from autoac.planner.plan import plan_of
from autoac.planner.problem.graph import OpId
from autoac.planner.problem.save_sets import recomputed_by_backward
from autoac.planner.solver import search as search_module
from autoac.planner.solver.efforts import Round
from autoac.planner.solver.start.fill import filled
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.variables import Options

laws = settings(max_examples=60, derandomize=True, deadline=None)
few = settings(max_examples=25, derandomize=True, deadline=None)


def problem(seed: int, most_ops: int = 7) -> tuple[Graph, int, random.Random]:
    """Return a random graph and one of its peaks as a budget, below the ceiling if there is one."""
    rng = random.Random(seed)
    graph = build(graphs.random_profile(rng, most_ops))
    peaks = sorted({peak for peak, _ in oracles.peaks_and_times(graph).values()})
    ceiling = peak_bytes(graph, graph.everything)
    return graph, rng.choice([p for p in peaks if p < ceiling] or [ceiling]) or 1, rng


@settings(max_examples=120, derandomize=True, deadline=None)
@given(graphs.seeds)
def test_plan_is_the_fastest_save_set_that_fits(seed: int) -> None:
    graph, budget, _ = problem(seed, most_ops=8)
    table = oracles.peaks_and_times(graph)
    made = plan(graph, budget_bytes=budget, gap=0.0)
    assert made.recompute_us == pytest.approx(oracles.least_time(table, budget))
    assert made.bound_us == pytest.approx(made.recompute_us)
    assert made.peak == peak_bytes(graph, made.save_set) <= budget


@pytest.mark.parametrize(
    ("seed", "budget", "least_us"),
    [
        pytest.param(51355, 29, 26.0, id="saving the leader would force another op to be saved"),
        pytest.param(76999, 25, 60.0, id="the same, and the leader writes over its input"),
        pytest.param(14945, 31, 5.0, id="the memory of the follower is held for a later op"),
        pytest.param(
            10464, 48, 0.0, id="a copy of what an op reads is held although the op never runs again"
        ),
    ],
)
def test_no_plan_is_lost_to_merging_or_to_the_canonical_form(seed: int, budget: int, least_us: float) -> None:
    rng = random.Random(seed)
    graph = graphs.resized(build(graphs.random_profile(rng, rng.choice((6, 7, 8)))), rng)
    assert oracles.least_time(oracles.peaks_and_times(graph), budget) == least_us
    made = plan(graph, budget_bytes=budget, gap=0.0)
    assert made.recompute_us == least_us
    assert made.bound_us <= least_us


def test_save_set_that_fits_outweighs_a_proof_that_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = build(graphs.greedy_trap())
    smallest = find_minimum_peak(graph, gap=0.0)
    monkeypatch.setattr(sys.modules[plan_of.__module__], "Search", _SearchWithAWrongProof)
    made = plan(graph, budget_bytes=smallest.found, start=[smallest.save_set])
    assert made.peak <= smallest.found
    assert (made.stopped, made.bound_us) == (Stopped.FAILED, 0.0)


class _SearchWithAWrongProof(search_module.Search):
    def _relaxation(self) -> Round:
        now = super()._relaxation()
        return replace(now, relaxed=replace(now.relaxed, values=None, stopped=Stopped.INFEASIBLE))


@pytest.mark.parametrize("share", [0.7, 0.3])
def test_plan_is_good_enough_within_the_gap_or_a_share_of_the_step(share: float) -> None:
    graph = build(graphs.gpt2(3))
    budget = graphs.between(graph, share)
    least = plan(graph, budget_bytes=budget, gap=0.0)
    made = plan(graph, budget_bytes=budget)
    assert made.stopped is Stopped.OPTIMAL
    assert made.recompute_us - made.bound_us <= max(0.01 * made.recompute_us, 0.001 * made.step_us)
    assert made.recompute_us - least.recompute_us <= max(0.01 * made.recompute_us, 0.001 * made.step_us)
    assert plan(graph, budget_bytes=budget, step_gap=0.0).gap <= 0.01
    assert made.rounds <= least.rounds


@few
@given(graphs.seeds)
def test_time_of_a_recompute_may_differ_from_the_run_time(seed: int) -> None:
    graph, budget, _ = problem(seed)
    graph = replace(graph, ops=tuple(replace(op, rerun_us=op.runtime_us + 5) for op in graph.ops))
    made = plan(graph, budget_bytes=budget, gap=0.0)
    runs = [
        op for op, again in zip(graph.ops, recomputed_by_backward(graph, made.save_set), strict=True) if again
    ]
    assert made.recompute_us >= sum(op.runtime_us for op in runs) + 5 * len(runs)
    assert made.recompute_us == pytest.approx(oracles.least_time(oracles.peaks_and_times(graph), budget))


SWITCHES = {
    "no merging": {"merge_followers": False},
    "lazy cuts": {"lazy_rows": True},
    "unwanted saves": {"canonical_rows": False},
    "coarse near the need": {"dense_share": 0.0},
    "fine far from it": {"sparse_stride": 1},
    "no prices": {"fix_by_price": False},
}
ALL_SWITCHED = {name: value for one in SWITCHES.values() for name, value in one.items()} | {
    "dense_share": 1.0
}


@pytest.mark.parametrize("options", [*SWITCHES.values(), ALL_SWITCHED], ids=[*SWITCHES, "all switched"])
def test_plans_are_equally_fast_with_each_switch(options: dict[str, Any]) -> None:
    for graph, budget, least_us in solved():
        switched = plan(graph, budget_bytes=budget, gap=0.0, options=Options(**options))
        assert switched.recompute_us == pytest.approx(least_us)


@cache
def solved() -> list[tuple[Graph, int, float]]:
    """Return problems and the recompute time of their plans."""
    problems = [problem(seed)[:2] for seed in range(40)]
    return [
        (graph, budget, plan(graph, budget_bytes=budget, gap=0.0).recompute_us) for graph, budget in problems
    ]


@pytest.mark.slow
@laws
@given(graphs.seeds)
def test_one_byte_below_the_smallest_peak_is_infeasible_with_true_bounds(seed: int) -> None:
    graph, _, _ = problem(seed, most_ops=6)
    smallest = oracles.smallest_peak(oracles.peaks_and_times(graph))
    if smallest > 1:
        with pytest.raises(InfeasibleBudget) as caught:
            plan(graph, budget_bytes=smallest - 1)
        error = caught.value
        assert error.proven_floor <= smallest
        assert error.smallest_found >= smallest
        assert sum(h.nbytes for h in error.live) == error.smallest_found
        assert peak_bytes(graph, error.save_set) == error.smallest_found
    assert plan(graph, budget_bytes=max(smallest, 1)).peak <= max(smallest, 1)


@few
@given(graphs.seeds)
def test_find_minimum_peak_finds_the_smallest(seed: int) -> None:
    graph, _, _ = problem(seed, most_ops=6)
    found = find_minimum_peak(graph, gap=0.0)
    smallest = oracles.smallest_peak(oracles.peaks_and_times(graph))
    assert bounds(graph).floor <= found.proven <= smallest == found.found
    assert peak_bytes(graph, found.save_set) == smallest


def test_a_budget_at_the_ceiling_costs_nothing_and_solves_nothing() -> None:
    graph = build(graphs.gpt2(2))
    made = plan(graph, budget_bytes=bounds(graph).ceiling)
    assert (made.recompute_us, made.rounds, made.gap, made.solver_s) == (0, 0, 0, 0)
    assert made.recompute_set == frozenset()
    assert plan(graph, budget_gb=1000).save_set == graph.everything


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "exactly one"),
        ({"budget_gb": 1.0, "budget_bytes": 1}, "exactly one"),
        ({"budget_gb": 0.0}, "budget_gb must be a positive number of GiB, got 0.0"),
        ({"budget_gb": -1.0}, "positive"),
        ({"budget_gb": float("nan")}, "positive"),
        ({"budget_gb": 10**400}, "positive"),
        ({"budget_gb": -(10**400)}, "positive"),
        ({"budget_gb": float("inf")}, "positive"),
        ({"budget_bytes": 0}, "budget_bytes must be a positive whole number, got 0"),
        ({"budget_bytes": True}, "positive"),
        ({"budget_bytes": "10"}, "positive"),
        ({"budget_bytes": 10, "constraints": Constraints(headroom_bytes=10)}, "leaves nothing"),
    ],
)
def test_an_invalid_budget_is_an_error(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidBudget, match=words):
        plan(chain(1, 8), **arguments)  # type: ignore[arg-type]


def test_step_gap_must_be_a_share() -> None:
    with pytest.raises(InvalidLimit, match="step_gap"):
        plan(chain(1, 8), budget_bytes=10, step_gap=1.5)


@pytest.mark.parametrize("search", [plan, find_minimum_peak, find_frontier])
@pytest.mark.parametrize(
    "limits",
    [
        {"gap": float("nan")},
        {"gap": -0.1},
        {"gap": 2.0},
        {"time_limit_s": float("nan")},
        {"work_limit": -1.0},
    ],
)
def test_a_limit_that_no_search_can_keep_to_is_an_error(
    search: Callable[..., object], limits: dict[str, float]
) -> None:
    budget = {"budget_bytes": 10} if search is plan else {}
    with pytest.raises(InvalidLimit, match=next(iter(limits))):
        search(chain(1, 8, 1, 8, 0), **budget, **limits)


def test_planning_twice_gives_the_same_policy() -> None:
    profile = graphs.gpt2(2)
    budget = graphs.between(profile, 0.4)
    first = plan(profile, budget_bytes=budget).policy().to_json()
    again = plan(Profile.from_json(profile.to_json()), budget_bytes=budget).policy().to_json()
    assert first == again


def test_a_policy_needs_a_profile() -> None:
    with pytest.raises(PlannerError, match="needs the Profile"):
        plan(chain(1, 8, 1, 8, 0), budget_bytes=10).policy()


@pytest.mark.parametrize(
    ("limits", "stopped"),
    [({"time_limit_s": 1e-3}, Stopped.TIME_LIMIT), ({"work_limit": 1e-3}, Stopped.WORK_LIMIT)],
)
def test_plan_at_a_limit_is_a_simple_one_with_the_reason(limits: dict[str, float], stopped: Stopped) -> None:
    graph = build(graphs.gpt2(4, batch=8, length=512, vocabulary=5000))
    budget = graphs.between(graph, 0.4)
    made = plan(graph, budget_bytes=budget, gap=0.0, **limits)  # type: ignore[arg-type]
    assert made.stopped is stopped
    assert made.peak <= budget
    assert made.gap > 0


def test_out_of_time_error_has_the_smallest_peak_found() -> None:
    graph = build(graphs.gpt2(4, batch=8, length=512, vocabulary=5000))
    smallest = find_minimum_peak(graph, time_limit_s=1e-3)
    with pytest.raises(SolverOutOfTime, match=r"\(0\.001 s\).* budget_gb=") as caught:
        plan(graph, budget_bytes=(smallest.proven + smallest.found) // 2, time_limit_s=1e-3)
    found, proven = caught.value.smallest_found, caught.value.proven_floor
    assert proven <= caught.value.budget < found
    assert plan(graph, budget_bytes=found, time_limit_s=1e-3).peak == found


@pytest.mark.slow
def test_a_limit_on_work_gives_the_same_plan_on_a_slow_machine() -> None:
    graph = build(graphs.gpt2(4, batch=8, length=512, vocabulary=5000))
    budget = graphs.between(graph, 0.2)

    def slow(_: Progress) -> None:
        time.sleep(0.01)  # which HiGHS's clock counts

    for work in (0.05, 0.15):
        quick = plan(graph, budget_bytes=budget, gap=0.0, work_limit=work)
        assert quick.stopped is Stopped.WORK_LIMIT
        assert plan(graph, budget_bytes=budget, gap=0.0, work_limit=work, progress=slow) == quick
    assert plan(graph, budget_bytes=budget, gap=0.0).recompute_us < quick.recompute_us


def test_the_time_limit_counts_on_the_callers_clock() -> None:
    graph = build(graphs.gpt2(4, batch=8, length=512, vocabulary=5000))
    reads: list[float] = []

    def clock() -> float:
        reads.append(float(len(reads)))
        return reads[-1]

    made = plan(graph, budget_bytes=graphs.between(graph, 0.2), gap=0.0, time_limit_s=8.0, clock=clock)
    assert made.stopped is Stopped.TIME_LIMIT
    assert len(reads) < 20  # a second each


@pytest.mark.parametrize("search", [plan, find_minimum_peak, find_frontier, plan_with_host])
def test_no_clock_is_too_slow_without_a_time_limit(search: Callable[..., object]) -> None:
    graph = build(graphs.gpt2(2))
    budget = {"budget_bytes": graphs.between(graph, 0.3)} if search in (plan, plan_with_host) else {}
    busy = itertools.count(0, 10**6).__next__  # eleven days between two looks
    assert search(graph, clock=busy, **budget) == search(graph, **budget)


def test_budget_of_a_known_save_set_is_always_planned() -> None:
    sizes = [1, 2**50, 3, 2**30, 5, 2**51, 7, 11] * 2  # too far apart for the solver's tolerances
    graph = chain(*sizes, runtime_us=range(1, 17))
    smallest = find_minimum_peak(graph, work_limit=1.0, gap=0.0)
    assert peak_bytes(graph, smallest.save_set) == smallest.found > smallest.proven
    made = plan(graph, budget_bytes=smallest.found, work_limit=0.1, gap=0.0)
    assert made.peak <= smallest.found


def test_known_save_set_is_used_as_a_start() -> None:
    graph = build(graphs.gpt2(2))
    smallest = find_minimum_peak(graph, work_limit=1.0, gap=0.0)
    with pytest.raises(SolverOutOfTime):
        plan(graph, budget_bytes=smallest.found, time_limit_s=0.0)
    made = plan(graph, budget_bytes=smallest.found, time_limit_s=0.0, start=(smallest.save_set,))
    assert made.peak <= smallest.found
    made = plan(graph, budget_bytes=smallest.found, gap=1.0, start=(smallest.save_set,))
    assert (made.peak <= smallest.found, made.rounds) == (True, 0)  # good enough from the start


@laws
@given(graphs.seeds)
def test_filled_save_set_fits_and_recomputes_no_more(seed: int) -> None:
    graph, budget, _ = problem(seed)
    for save_set in (frozenset[OpId](), graph.everything, SearchProblem(graph).segments.within(budget)):
        if save_set is not None and fits(graph, save_set, budget):
            more = filled(graph, save_set, budget)
            assert fits(graph, more, budget)
            assert recompute_us(graph, more) <= recompute_us(graph, save_set)


@laws
@given(graphs.seeds)
def test_fits_is_the_peak_compared_with_the_budget(seed: int) -> None:
    graph, budget, rng = problem(seed)
    save_set = frozenset(op.id for op in graph.ops if rng.random() < 0.5)
    assert fits(graph, save_set, budget) == (peak_bytes(graph, save_set) <= budget)
    assert peak_of(graph, save_set) == simulate(graph, save_set).peak


def test_run_times_far_below_a_microsecond_are_planned_like_others() -> None:
    times = [float(i + 1) for i in range(16)]
    long, short = (
        chain(*[4, 8, 1, 9, 3, 7, 2, 6] * 2, runtime_us=[t * unit for t in times]) for unit in (1.0, 1e-12)
    )
    for budget in (21, 22, 24):
        expected = plan(long, budget_bytes=budget, gap=0.0).recompute_us * 1e-12
        assert plan(short, budget_bytes=budget, gap=0.0).recompute_us == pytest.approx(expected, rel=1e-6)


def test_progress_is_in_microseconds_and_can_stop_the_solver() -> None:
    graph = build(graphs.gpt2(4, batch=8, length=512, vocabulary=5000))
    reports: list[Progress] = []

    def stop(now: Progress) -> bool:
        reports.append(now)
        return True

    made = plan(graph, budget_bytes=graphs.between(graph, 0.4), gap=0.0, progress=stop)
    assert made.stopped is Stopped.INTERRUPTED
    assert reports[0].dual <= made.recompute_us
    assert np.isfinite(reports[0].seconds)


def test_twelve_layers_are_planned_with_ten_units_of_work() -> None:
    graph = build(graphs.gpt2(12))
    for share in (0.75, 0.25):
        made = plan(graph, budget_bytes=graphs.between(graph, share), work_limit=10.0)
        assert made.stopped is Stopped.OPTIMAL
        assert made.recompute_us - made.bound_us <= max(0.01 * made.recompute_us, 0.001 * made.step_us)


def test_a_plan_crosses_a_process_boundary() -> None:
    made = plan(chain(1, 8, 1, 8, 0), budget_bytes=10)
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301 (our own bytes)


def test_unneeded_saves_are_dropped_if_they_cost_memory() -> None:
    # Here saving everything peaks above save sets that recompute nothing either: what nobody asks for is
    # held as well, for the sake of a saved tensor that is dropped without having been unpacked.
    graph = graphs.random_graph(5492658, 6)
    graph = replace(graph, closing_bytes=0)
    table = oracles.peaks_and_times(graph)
    smallest = oracles.smallest_peak(table)
    assert smallest < peak_bytes(graph, graph.everything)
    assert oracles.least_time(table, smallest) == 0
    made = plan(graph, budget_bytes=smallest, gap=0.0)
    assert (made.recompute_us, made.peak) == (0, smallest)


@laws
@given(graphs.seeds)
def test_policy_saves_every_op_that_must_be_saved(seed: int) -> None:
    """The runtime knows only some of the reasons by itself, and a program decides the other ops only."""
    found = graphs.random_profile(random.Random(seed), 6)
    graph = build(found)
    made = plan_of(SearchProblem(graph), found, 1 << 40, frozenset())
    decisions = list(made.policy().decisions.values())
    assert {decisions[op] for op in graph.must_save} <= {"save"}
