"""Check menus of blocks whose ops are decided one at a time, and their plans, against all save sets."""

from __future__ import annotations

import random

import block_bounds
import graphs
import numpy as np
import pytest

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph
from autoac.planner.solver.chain import blockwise, menus
from autoac.planner.solver.chain.blocks import Block, chain_of_blocks
from autoac.planner.solver.chain.blockwise import Blockwise
from autoac.planner.solver.chain.menus import Menu, listed, menu_of
from autoac.planner.solver.chain.one_op_at_a_time import menu_in_turn
from autoac.planner.solver.start.search_problem import Problem

ALL_MOMENTS = -np.inf, -np.inf


def blocks_of(graph: Graph) -> list[Block]:
    problem = Problem(graph, block_bounds.ONCE)
    return [placed.block for placed in chain_of_blocks(problem.arrays, problem.ceiling, timed=True)]


def numbers(menu: Menu) -> np.ndarray:
    columns = [
        menu.cost_us, menu.held, menu.recomputed, menu.entry_held, menu.need, menu.need_while_demanded,
        menu.need_with_entry, menu.need_in_forward, menu.need_in_forward_with_entry,
        menu.demands_entry, menu.passes_on, ~menu.saves_exit,
    ]  # fmt: skip
    return np.stack(columns, axis=1).astype(float)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_demanded", [False, True])
def test_every_save_set_is_worse_than_one_that_is_decided_in_turn(
    seed: int, is_demanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks_of(build(graphs.random_profile(random.Random(seed), 8))):
        every = menu_of(listed(block, is_demanded=is_demanded))
        with monkeypatch.context() as patch:
            patch.setattr(menus, "MOST_DECISIONS", 1)
            rooms = ALL_MOMENTS
            few = menu_in_turn(block, is_demanded=is_demanded, rooms=rooms, spend=lambda work: None)
        of_every, of_few = numbers(every), numbers(few)
        assert all((of_few <= row + 1e-9).all(axis=1).any() for row in of_every)
        exact = {tuple(s): row for s, row in zip(every.saved.tolist(), of_every, strict=True)}
        for saved, row in zip(few.saved.tolist(), of_few, strict=True):
            assert row[:4] == pytest.approx(exact[tuple(saved)][:4])


def test_plans_of_ops_decided_in_turn_fit_and_are_nearly_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ops of each block decided, the rest would take no bytes and no time."""
    graph = build(graphs.gpt2(6))
    problem = Problem(graph)
    everything_us = sum(op.recompute_us for op in graph.ops)
    smallest = min(peak_bytes(graph, save_set) for save_set in problem.segments.smallest())
    budget = smallest + (problem.ceiling - smallest) // 8
    least = Blockwise(problem.arrays, problem.ceiling, timed=True).within(budget)
    assert least is not None
    monkeypatch.setattr(menus, "MOST_DECISIONS", 2)
    few = Blockwise(problem.arrays, problem.ceiling, timed=True)
    of_few = few.within(budget)
    assert of_few is not None
    assert of_few.cost_us < 0.9 * least.cost_us
    found = list(few.plans(budget, everything_us, block_bounds.without_limit))
    bound = max(bound for bound, _ in found)
    assert 0.98 * least.cost_us <= bound <= least.cost_us + 1e-6
    fitting = [s for _, s in found if s is not None and peak_bytes(graph, s) <= budget]
    assert min(recompute_us(graph, save_set) for save_set in fitting) <= 1.03 * bound


def test_work_of_menus_in_turn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(menus, "MOST_DECISIONS", 2)
    graph = build(graphs.gpt2(4))
    problem = Problem(graph)
    spent: list[float] = []

    def once(work: float) -> bool:
        spent.append(work)
        return False

    few = Blockwise(problem.arrays, problem.ceiling, timed=True)
    assert not list(few.plans(problem.ceiling, 1e6, once))
    assert len(spent) == 1
    assert spent[0] > 0


def test_proof_ends_with_too_many_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then labels that hold nearly as much are one, and the prices still give a bound."""
    monkeypatch.setattr(menus, "MOST_DECISIONS", 2)
    graph = build(graphs.gpt2(4))
    problem = Problem(graph)
    few = Blockwise(problem.arrays, problem.ceiling, timed=True)
    budget = problem.bounds.floor + (problem.ceiling - problem.bounds.floor) // 3
    proven = list(few.plans(budget, 1e6, block_bounds.without_limit))
    monkeypatch.setattr(blockwise, "MOST_LABELS", 1)
    monkeypatch.setattr(blockwise, "MANY_LABELS", 1)
    thinned = list(few.plans(budget, 1e6, block_bounds.without_limit))
    assert any(save_set is not None for _, save_set in thinned)
    assert 0 < max(bound for bound, _ in thinned) <= max(bound for bound, _ in proven)
