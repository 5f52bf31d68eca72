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
from autoac.planner.solver.chain import blocks, blockwise, menus, one_op_at_a_time
from autoac.planner.solver.chain.blocks import (
    ALWAYS,
    Block,
    BlockMoment,
    BlockOp,
    BlockRun,
    BlockVersion,
    ForwardMoment,
)
from autoac.planner.solver.chain.blockwise import Blockwise
from autoac.planner.solver.chain.menus import Menu, listed, menu_of
from autoac.planner.solver.chain.one_op_at_a_time import menu_in_turn
from autoac.planner.solver.recompute_windows import NEVER
from autoac.planner.solver.start.search_problem import SearchProblem

ALL_MOMENTS = -np.inf, -np.inf
# Random blocks; for each part of the interface, two or more need it.
SEEDS = (84, 109, 141, 207, 210, 326, *range(90, 100))


def numbers(menu: Menu) -> np.ndarray:
    columns = [
        menu.cost_us, menu.held, menu.recomputed, menu.entry_held, menu.need, menu.need_while_demanded,
        menu.need_with_entry, menu.need_in_forward, menu.need_in_forward_with_entry,
        menu.demands_entry, menu.passes_on, ~menu.saves_exit,
    ]  # fmt: skip
    return np.stack(columns, axis=1).astype(float)


def random_block(rng: random.Random, n: int) -> Block:
    """Return a block with few moments, of which many save sets hold equally much."""
    states = range(4)
    readers = [
        tuple(r for r in range(i + 1, n) if rng.random() < (0.6 if r == i + 1 else 0.2)) for i in range(n)
    ]
    ops: list[BlockOp] = []
    for i in range(n):
        first = rng.choice((*states, NEVER))
        is_unpacked = first < NEVER
        version = BlockVersion(
            nbytes=rng.choice((1, 1, 2, 5)),
            extra_from=rng.choice((ALWAYS, 0, 1)),
            held_from=i,
            dropped=rng.randint(first, 4) if is_unpacked else ALWAYS,
            last_use=first if is_unpacked else ALWAYS,
            is_decided=True,
            readers=readers[i],
            run=i,
            reads=tuple((r, r) for r in (i, *readers[i])),
        )
        us = float(rng.choice((0, 0, 1)))
        reads_entry, is_read_later = i == 0 or rng.random() < 0.1, i < n - 1 and rng.random() < 0.1
        ops.append(BlockOp(us, first, False, readers[i], reads_entry, is_read_later, (version,)))
    of_entry = tuple(i for i in range(n) if ops[i].reads_entry)
    return Block(
        ops=tuple(ops),
        runs=tuple(BlockRun(i, 0) for i in range(n)),
        steps=tuple(BlockMoment(s, s, 0) for s in states if rng.random() < 0.5),
        bursts=tuple(BlockMoment(s, s, 0) for s in states if rng.random() < 0.2),
        forward=tuple(ForwardMoment(i, 0, 0) for i in range(n) if rng.random() < 0.2),
        later=-1,
        demanded_by=rng.choice((0, 2, 4)),
        entry=BlockVersion(4, ALWAYS, 0, ALWAYS, ALWAYS, True, of_entry, -1, ()),
        is_last=False,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_demanded", [False, True])
def test_no_save_set_is_left_out_that_earlier_ops_can_make_better(
    seed: int, is_demanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = random_block(random.Random(seed), 7)
    every = listed(block, is_demanded=is_demanded)
    monkeypatch.setattr(menus, "MOST_DECISIONS", 1)
    monkeypatch.setattr(one_op_at_a_time, "at_moments", lambda block, *_: block)
    few = menu_in_turn(block, is_demanded=is_demanded, rooms=ALL_MOMENTS, spend=lambda work: None)
    assert all((numbers(few) <= row + 1e-9).all(axis=1).any() for row in numbers(menu_of(every)))


def test_plans_of_ops_decided_in_turn_fit_and_are_nearly_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ops of each block decided, the rest would take no bytes and no time."""
    graph = build(graphs.gpt2(6))
    problem = SearchProblem(graph)
    everything_us = sum(op.recompute_us for op in graph.ops)
    smallest = min(peak_bytes(graph, save_set) for save_set in problem.segments.smallest())
    budget = smallest + (problem.ceiling - smallest) // 8
    least = Blockwise(problem.arrays, problem.ceiling, timed=True).within(budget)
    assert least is not None
    monkeypatch.setattr(menus, "MOST_DECISIONS", 2)
    few = Blockwise(problem.arrays, problem.ceiling, timed=True)
    of_few = few.within(budget)
    assert of_few.cost_us < 0.9 * least.cost_us
    found = list(few.plans(budget, everything_us, block_bounds.without_limit))
    bound = max(bound for bound, _ in found)
    assert 0.98 * least.cost_us <= bound <= least.cost_us + 1e-6
    fitting = [s for _, s in found if s is not None and peak_bytes(graph, s) <= budget]
    assert min(recompute_us(graph, save_set) for save_set in fitting) <= 1.03 * bound


@pytest.mark.parametrize("seed", [60, 457, 546])
def test_prices_leave_room_for_what_the_block_before_recomputes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In these graphs, the rest of a room would not hold it while the entry is demanded."""
    monkeypatch.setattr(blockwise, "MANY", 0.0)
    monkeypatch.setattr(menus, "MOST_DECISIONS", 1)
    monkeypatch.setattr(blocks, "SMALL", 0.2)
    assert not block_bounds.wrong_bounds(block_bounds.random_graph(random.Random(seed)))
