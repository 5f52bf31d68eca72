"""Test plans with moves: they fit if run by hand, and no brute force beats their bound."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import graphs
import pytest
import step_by_hand
from fuzzers.random_moves import first_use
from graphs import chain
from memory.test_moves import random_link, timed_step

from autoac.planner import (
    Constraints,
    Graph,
    InfeasibleBudget,
    Plan,
    Policy,
    Profile,
    as_planned,
    build,
    diff_rows,
    explain,
    find_minimum_peak,
    plan,
)
from autoac.planner.memory.clocks import timing
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.offload import plan_offload
from autoac.planner.plan import step_time_us
from autoac.planner.problem.graph import Moment, OpId, SaveSet, StepId
from autoac.planner.problem.moves import Link, Move, movable, with_moves
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves

ROUNDING_US = 1e-6
FAST, SLOW = Link(50e3, 50e3, 0.0, 1 << 60), Link(1e3, 1e3, 0.0, 1 << 60)


def check(found: Plan, graph: Graph, budget: int, link: Link) -> None:
    """Compare the plan with its step run by hand."""
    if not found.moves or found.graph.runs:  # no use groups by hand
        return
    save_set = with_forced_saves(found.graph, found.save_set)
    expected = step_by_hand.run(graph, save_set, found.moves, link)
    alone = replace(found.graph, waiting_microbatches=0)
    assert peak_bytes(found.graph, found.save_set) <= budget
    assert expected.peak == peak_bytes(alone, found.save_set)
    assert expected.end_us - step_time_us(graph) == pytest.approx(found.extra_us)
    assert expected.host_bytes == found.moved_bytes
    assert found.moved_bytes * (1 + graph.waiting_microbatches) <= link.host_bytes
    assert found.gained_us >= 0


def random_chain(rng: random.Random, length: int) -> Graph:
    """Return a chain of ops with steps of some length between the uses of their outputs."""
    times = [rng.choice((1, 4, 20)) for _ in range(length)]
    graph = chain(*(rng.randint(4, 9) for _ in range(length - 1)), 1, runtime_us=times)
    steps = tuple(replace(step, runtime_us=float(rng.choice((0, 1, 4)))) for step in graph.steps)
    return replace(graph, steps=steps)


def test_plans_fit_if_run_by_hand() -> None:
    moved = 0
    for seed in range(30):
        rng = random.Random(seed)
        graph = random_chain(rng, 9) if seed % 2 else timed_step(rng, 9)
        link = replace(random_link(rng), host_bytes=rng.choice((1 << 60, 20)))
        high = peak_bytes(graph, graph.everything)
        budget = max(1, rng.randint(high // 2, high))
        try:
            found = plan_offload(graph, budget_bytes=budget, link=link, gap=0.0)
        except InfeasibleBudget:
            continue
        check(found, graph, budget, link)
        moved += bool(found.moves)
    assert moved >= 5


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", [*range(20), 26, 35, 41, 56])  # the last four each decide a row
def test_no_moves_beat_the_bound(seed: int, waits: bool) -> None:
    rng = random.Random(seed)
    graph = random_chain(rng, 4) if seed % 2 or seed > 20 else timed_step(rng, 5)
    link = Link(rng.choice((0.5, 1.0, 3.0)), rng.choice((0.5, 1.0, 3.0)), 0.0, rng.choice((1 << 60, 9, 20)))
    graph = replace(graph, waiting_microbatches=rng.randint(1, 3) if waits else 0)
    high = peak_bytes(graph, graph.everything)
    compare_with_brute_force(graph, link, max(1, rng.randint(high // 2, high - 1)))


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
                            on_host = times.moved_bytes * (1 + graph.waiting_microbatches)
                            if on_host <= link.host_bytes and (best is None or extra < best):
                                best = extra
    return best


def all_moves(graph: Graph, save_set: SaveSet, ops: tuple[OpId, ...]) -> itertools.product[tuple[Move, ...]]:
    """Yield the moves of `ops` at all points: forward ends after all copies out."""
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
                for free in range(earliest, n + 1)
            ]
        )
    return itertools.product(*rows)


@pytest.mark.parametrize("bytes_per_us", [700.0, 4e3, 50e3])
def test_moves_find_room_at_the_smallest_peak(bytes_per_us: float) -> None:
    profile = graphs.gpt2(6)  # what the plan without moves saves leaves room for most moves, not for all
    smallest = find_minimum_peak(profile).found
    link = Link(bytes_per_us, bytes_per_us, 0.0, 1 << 60)
    found = plan_offload(profile, budget_bytes=smallest, link=link)
    check(found, build(profile), smallest, link)
    assert found.extra_us < 0.3 * (found.extra_us + found.gained_us) < math.inf


def test_nothing_moves_where_everything_fits_or_over_a_slow_link() -> None:
    profile = graphs.gpt2(layers=4)
    graph = build(profile)
    low, high = plan(profile, budget_bytes=1 << 60).floor, peak_bytes(graph, graph.everything)
    assert not plan_offload(profile, budget_bytes=high, link=FAST).moves
    budget = (low + high) // 2
    fast = plan_offload(profile, budget_bytes=budget, link=FAST)
    assert fast.moves
    assert fast.extra_us < 0.8 * (fast.extra_us + fast.gained_us) < math.inf
    assert not plan_offload(profile, budget_bytes=budget, link=SLOW.slower(1e-4)).moves


def moving_profile() -> Profile:
    """Return a profile of which many outputs may move."""
    return graphs.gpt2(3, batch=8, length=64, width=192, vocabulary=200)


@pytest.mark.parametrize("forwards", [1, 2])
def test_policy_with_moves_is_the_plan_again(forwards: int) -> None:
    profile = moving_profile()
    if forwards == 2:
        n = len(profile.keys())
        profile = profile.model_copy(update={"forward_ends": (n // 2, n)})
    graph = build(profile)
    budget = peak_bytes(graph, graph.everything) * (6 if forwards == 1 else 4) // 10
    planned = plan_offload(profile, budget_bytes=budget, link=FAST)
    policy = Policy.from_json(planned.policy().to_json())
    assert policy.moves
    assert policy.predicted.moved_bytes == planned.moved_bytes > 0
    again = as_planned(policy, profile)
    assert (again.peak, again.moves, again.save_set) == (planned.peak, planned.moves, planned.save_set)
    assert again.policy().moves == policy.moves
    assert again.moved_bytes == planned.moved_bytes
    if forwards == 2:
        assert graph.forward_ends[0] in {move.free for move in planned.moves}  # and not that of the second
    assert "move to the host and back" in explain(planned)
    assert "move to the host and back" in explain(policy)
    unmoved = plan(profile, budget_bytes=budget)
    rows = diff_rows(unmoved, planned)
    assert sum(len(row.modules) for row in rows if row.after == "moved") == len(planned.moves)


def test_what_the_user_pins_stays_on_the_device() -> None:
    profile = moving_profile()
    graph = build(profile)
    budget = peak_bytes(graph, graph.everything) * 8 // 10
    planned = plan_offload(profile, budget_bytes=budget, link=FAST)
    pinned = graph.ops[next(iter(planned.moved))].name
    other = plan_offload(profile, budget_bytes=budget, link=FAST, constraints=Constraints(pin_save=(pinned,)))
    assert pinned not in other.policy().moves


def test_plan_without_moves_says_why() -> None:
    profile = moving_profile()
    graph = build(profile)
    high = peak_bytes(graph, graph.everything)
    assert plan_offload(profile, budget_bytes=high, link=FAST).why_unmoved == "it all fits on the device"
    slow = Link(1e-6, 1e-6, 0.0, 1 << 60)
    unmoved = plan_offload(profile, budget_bytes=high * 8 // 10, link=slow)
    assert unmoved.why_unmoved.startswith("no moves were found that save")
    assert unmoved.why_unmoved in explain(unmoved)
