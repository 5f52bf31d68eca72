"""Check Checkmate's optimum: the best of all schedules, and never above the best save set."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from graphs import random_profile
from oracles import least_time, peaks_and_times

from autoac.planner.plan import plan
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import chain
from benchmarks.plans.checkmate import optimum, stages

CHAINS = [
    chain(1, 8, 1, 8, 0, runtime_us=[1, 2, 3, 1, 2]),
    chain(1, 1, 1, 1, 1, runtime_us=[1, 2, 3, 1, 2]),
    chain(4, 1, 3, 2, 5, runtime_us=[1, 1, 4, 1, 2]),
]


def least_schedule(graph, budget):
    """Return the least recompute time, by Dijkstra's algorithm over the contents of memory.

    In each stage of backward any op may run and any value may be freed. Forward is as in
    `memory/schedule.py`, for chains: a value that does not stay is freed after the next op.
    """
    order = stages(graph)
    n = len(graph.ops)
    size = [graph.nbytes(v.id) for v in graph.versions]

    def forward_fits(stay):
        return all(sum(size[v] for v in range(i + 1) if v in stay or v >= i - 1) <= budget for i in range(n))

    subsets = [frozenset(v for v in range(n) if mask >> v & 1) for mask in range(1 << n)]
    heap = [(0.0, 0, tuple(sorted(s))) for s in subsets if forward_fits(s)]
    heapq.heapify(heap)
    done = set()
    while heap:
        spent, j, live = heapq.heappop(heap)
        if j == len(order):
            return spent
        if (j, live) in done:
            continue
        done.add((j, live))
        here = set(live)
        if sum(size[v] for v in here) > budget:
            continue
        if order[j].wants in here:
            heapq.heappush(heap, (spent, j + 1, live))
        for v in here:
            heapq.heappush(heap, (spent, j, tuple(sorted(here - {v}))))
        for op in graph.ops:
            if set(op.reads) <= here and op.id not in here:
                heapq.heappush(heap, (spent + op.runtime_us, j, tuple(sorted(here | {op.id}))))
    return None


@pytest.mark.parametrize("graph", CHAINS, ids=range(len(CHAINS)))
def test_the_optimum_of_a_chain_equals_an_exhaustive_search(graph):
    for budget in range(1, sum(graph.nbytes(v.id) for v in graph.versions) + 1):
        found = optimum(graph, budget)
        least = least_schedule(graph, budget)
        assert (found and found.recompute_us) == least
        assert found is None or found.proven


def test_recomputing_twice_reaches_a_budget_that_no_save_set_reaches():
    graph = chain(1, 1, 1, 1, 1, 1)
    found = optimum(graph, 2)
    assert found is not None
    assert found.twice
    assert least_time(peaks_and_times(graph), 2) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_is_never_above_the_best_save_set(seed):
    graph = build(random_profile(random.Random(seed), 6, overwritten=False))
    table = peaks_and_times(graph)
    for budget in sorted({peak for peak, _ in table.values()})[:3]:
        found = optimum(graph, budget)
        assert found is not None
        ours = least_time(table, budget)
        assert ours is not None
        assert found.recompute_us <= ours + 1e-6


@pytest.mark.parametrize("graph", CHAINS, ids=range(len(CHAINS)))
def test_our_plan_is_within_two_percent_where_nothing_runs_twice(graph):
    for budget in sorted({peak for peak, _ in peaks_and_times(graph).values()}):
        found = optimum(graph, budget)
        assert found is not None
        if not found.twice and math.isfinite(found.recompute_us):
            assert plan(graph, budget_bytes=budget).recompute_us <= 1.02 * found.recompute_us
