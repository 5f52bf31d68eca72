"""Check the dynamic program over blocks: its bounds against brute force, and the save sets that it finds."""

from __future__ import annotations

import random

import block_bounds
import graphs
import oracles
import pytest
from graphs import chain

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.minimum_peak import find_minimum_peak
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph
from autoac.planner.solver.chain import blocks
from autoac.planner.solver.chain.blockwise import Blockwise
from autoac.planner.solver.highs import Stopped
from autoac.planner.solver.start.search_problem import SearchProblem


def blockwise(graph: Graph, *, timed: bool = True) -> Blockwise:
    problem = SearchProblem(graph)
    return Blockwise(problem.arrays, problem.ceiling, timed=timed)


@pytest.mark.parametrize("seed", range(40))
def test_no_save_set_beats_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    step = block_bounds.random_graph(rng)
    with block_bounds.random_sizes(rng):
        assert not block_bounds.wrong_bounds(step)


@pytest.mark.parametrize(("seed", "n_ops"), [(1565, 7), (2664, 8)])
def test_an_op_that_may_run_earlier_than_a_block_knows_counts_nothing_within_bursts(
    seed: int, n_ops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SMALL", 0.35)
    graph = graphs.random_graph(seed, n_ops)
    table = oracles.peaks_and_times(graph)
    for peak, _ in table.values():
        found = blockwise(graph).within(peak)
        assert found.cost_us <= oracles.least_time(table, peak) + 1e-6


def test_smallest_peak_of_a_chain_is_proven() -> None:
    """The relaxation proves 21 bytes, since it recomputes a part of each segment ahead of time."""
    graph = chain(*[1] * 30)
    smallest = find_minimum_peak(graph)
    assert smallest.proven == smallest.found == peak_bytes(graph, smallest.save_set)
    assert smallest.stopped is Stopped.OPTIMAL


@pytest.mark.slow
def test_plans_of_blocks_fit_and_cost_no_less_than_the_bound() -> None:
    graph = build(graphs.gpt2(4))
    of_blocks = blockwise(graph)
    ceiling = peak_bytes(graph, graph.everything)
    smallest = min(peak_bytes(graph, save_set) for save_set in SearchProblem(graph).segments.smallest())
    everything_us = sum(op.recompute_us for op in graph.ops)
    for budget in range(smallest + (ceiling - smallest) // 10, ceiling, (ceiling - smallest) // 4):
        least = of_blocks.within(budget)
        found = list(of_blocks.plans(budget, everything_us, block_bounds.without_limit))
        assert max(bound for bound, _ in found) <= least.cost_us
        plans = [s for _, s in found if s is not None and peak_bytes(graph, s) <= budget]
        best = min(recompute_us(graph, save_set) for save_set in plans)
        assert least.cost_us <= best <= 1.02 * least.cost_us


def test_program_over_blocks_ends_when_it_may_not_go_on() -> None:
    graph = build(graphs.gpt2(4))
    spent: list[float] = []

    def twice(work: float) -> bool:
        spent.append(work)
        return len(spent) <= 2

    assert not list(blockwise(graph).plans(peak_bytes(graph, graph.everything), 1e6, twice))
    assert not list(blockwise(graph).smallest_peak(0, peak_bytes(graph, graph.everything), twice))
    assert len(spent) == 4
    assert all(work > 0 for work in spent)
