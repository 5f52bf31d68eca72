"""Test plans with moves: they fit by a second simulator, and no brute force beats their bound."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import graphs
import moves_reference
import pytest
from memory.test_moves import first_use, random_link

from autoac.planner import Graph, InfeasibleBudget, build, plan
from autoac.planner.memory.clocks import timing
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.offload import OffloadPlan, plan_offload
from autoac.planner.plan import step_time_us
from autoac.planner.problem.graph import Moment, OpId, SaveSet, StepId, chain
from autoac.planner.problem.moves import Link, Move, movable, with_moves
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves

ROUNDING_US = 1e-6
FAST, SLOW = Link(50e3, 50e3, 0.0, 1 << 60), Link(1e3, 1e3, 0.0, 1 << 60)


def random_step(seed: int, most_ops: int) -> tuple[Graph, Link, random.Random]:
    rng = random.Random(seed)
    graph = build(graphs.random_profile(rng, most_ops))
    steps = tuple(replace(step, runtime_us=float(rng.randrange(6))) for step in graph.steps)
    return replace(graph, steps=steps), random_link(rng), rng


def check(found: OffloadPlan, graph: Graph, budget: int, link: Link) -> None:
    """Compare the plan with the second simulator."""
    best = found.best
    if best is None or best.graph.runs:  # the second simulator knows no use groups
        return
    save_set = with_forced_saves(best.graph, best.save_set)
    expected = moves_reference.run(graph, save_set, best.moves, link)
    assert expected.peak <= budget
    assert expected.peak == peak_bytes(best.graph, best.save_set)
    assert expected.end_us - step_time_us(graph) == pytest.approx(best.extra_us)
    assert expected.host_peak == best.timing.host_peak <= link.host_bytes
    if found.without is not None:
        assert best.extra_us <= found.without.recompute_us


@pytest.mark.parametrize("seed", range(40))
def test_plan_fits_by_the_second_simulator(seed: int) -> None:
    graph, link, rng = random_step(seed, 9)
    high = peak_bytes(graph, graph.everything)
    budget = rng.randint(high // 3, high)
    link = replace(link, host_bytes=rng.choice((1 << 60, 20)))
    try:
        found = plan_offload(graph, budget_bytes=max(budget, 1), link=link, gap=0.0)
    except InfeasibleBudget:
        return
    check(found, graph, budget, link)


@pytest.mark.parametrize("seed", range(20))
def test_no_moves_beat_the_bound(seed: int) -> None:
    graph, link, rng = random_step(seed, 5)
    high = peak_bytes(graph, graph.everything)
    compare_with_brute_force(graph, link, max(1, rng.randint(high // 2, high)))


def random_chain(rng: random.Random) -> Graph:
    """Return a chain of four ops, the first of them large, with steps of some length between their uses."""
    graph = chain(
        *(rng.randint(4, 9) for _ in range(3)), 1, runtime_us=[rng.choice((1, 4, 20)) for _ in range(4)]
    )
    steps = tuple(replace(step, runtime_us=float(rng.choice((0, 1, 4)))) for step in graph.steps)
    return replace(graph, steps=steps)


@pytest.mark.parametrize("seed", range(20))
def test_no_moves_in_a_chain_beat_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_chain(rng)
    link = Link(rng.choice((0.5, 1.0, 3.0)), rng.choice((0.5, 1.0, 3.0)), 0.0, rng.choice((1 << 60, 9)))
    high = peak_bytes(graph, graph.everything)
    compare_with_brute_force(graph, link, high - rng.randint(1, 9))


def compare_with_brute_force(graph: Graph, link: Link, budget: int) -> None:
    least = fastest(graph, link, budget)
    try:
        found = plan_offload(graph, budget_bytes=budget, link=link, gap=0.0)
    except InfeasibleBudget:
        return
    check(found, graph, budget, link)
    assert found.bound_us <= (least if least is not None else found.extra_us) + ROUNDING_US


def fastest(graph: Graph, link: Link, budget: int) -> float | None:
    """Return the least time of recomputes and stalls of any save set and at most two moves, at any points."""
    best: float | None = None
    candidates = list(movable(graph, link))
    for size in range(3):
        for ops in itertools.combinations(candidates, size):
            others = [op.id for op in graph.ops if op.id not in ops and not op.must_save]
            for k in range(len(others) + 1):
                for saved in itertools.combinations(others, k):
                    for moves in all_moves(graph, frozenset(saved) | graph.must_save - set(ops), ops):
                        moving = with_moves(graph, moves, link)
                        save_set = with_forced_saves(moving, frozenset(saved))
                        again = recomputed_by_backward(moving, save_set)
                        if not all(again[op] and op not in save_set for op in ops):
                            continue
                        if peak_bytes(moving, save_set) <= budget:
                            times = timing(moving, save_set, moves, link)
                            extra = times.end_us - step_time_us(graph)
                            if times.host_peak <= link.host_bytes and (best is None or extra < best):
                                best = extra
    return best


def all_moves(graph: Graph, save_set: SaveSet, ops: tuple[OpId, ...]) -> itertools.product[tuple[Move, ...]]:
    """Yield the moves of `ops` at all points."""
    n, rows = len(graph.ops), []
    lazily = [Move(op, Moment(op + 1), None) for op in ops]
    for op in ops:
        first = first_use(graph, save_set, lazily, op)
        released = max(graph.storages[graph.versions[w].storage].released for w in graph.ops[op].writes)
        earliest = max(released, op + 1)
        rows.append(
            [
                Move(op, Moment(free), StepId(fetch))
                for fetch in range(0 if first is None else first + 1)
                for free in range(earliest, n + fetch + 1)
            ]
        )
    return itertools.product(*rows)


def test_nothing_moves_where_everything_fits_or_over_a_slow_link() -> None:
    profile = graphs.gpt2(layers=4)
    graph = build(profile)
    low, high = plan(profile, budget_bytes=1 << 60).floor, peak_bytes(graph, graph.everything)
    assert plan_offload(profile, budget_bytes=high, link=FAST).best is None
    budget = (low + high) // 2
    fast = plan_offload(profile, budget_bytes=budget, link=FAST)
    assert fast.best is not None
    assert fast.without is not None
    assert fast.extra_us < 0.8 * fast.without.recompute_us
    assert plan_offload(profile, budget_bytes=budget, link=SLOW.slower(1e-4)).best is None
