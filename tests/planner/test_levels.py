"""The prototype that lets ops run again more than once: one level is the schedule, two need less."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import graphs
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoac.planner import build, schedule, simulate
from autoac.planner.graph import Graph, Moment, chain, closed
from autoac.planner.levels import anytime_floor, cost, replay
from autoac.planner.schedule import Compute, Free, Recompute, recompute_us

seeds = st.integers(0, 2**32 - 1)
laws = settings(max_examples=100, derandomize=True, deadline=None)


def small(seed: int, most_ops: int = 7) -> tuple[Graph, random.Random]:
    rng = random.Random(seed)
    return build(graphs.random_profile(rng, most_ops)), rng


@laws
@given(seeds)
def test_one_level_is_the_schedule_event_by_event(seed: int) -> None:
    graph, rng = small(seed)
    save_set = rng.choice(list(oracles.every_save_set(graph)))
    levels = [int(op.id not in save_set) for op in graph.ops]
    assert list(replay(graph, levels)) == list(schedule(graph, save_set))
    found = cost(graph, levels)
    assert found.peak == simulate(graph, save_set).peak.live_bytes


@laws
@given(seeds, st.integers(1, 4))
def test_memory_returns_to_zero_and_nothing_is_read_that_is_not_there(seed: int, deepest: int) -> None:
    graph, rng = small(seed, 9)
    levels = [rng.randint(0, deepest) for _ in graph.ops]
    live = 0
    for event in replay(graph, levels):
        match event:
            case Compute(_, nbytes) | Recompute(_, nbytes):
                live += nbytes
            case Free(_, nbytes):
                live -= nbytes
            case _:
                pass
        assert live >= 0
    assert live == 0


@laws
@given(seeds)
def test_what_an_op_reads_is_saved_or_cached_when_it_runs(seed: int) -> None:
    graph, rng = small(seed, 9)
    if any(len(handle.unpacked) > 1 for handle in graph.handles):
        return  # a value that is asked for again when its uses are over is not there for its readers
    if any(value.previous is not None for value in graph.values):
        return  # the events do not tell whose buffer an in-place op took over
    n = len(graph.ops)  # nor whether what goes is forward's own memory, so that is gone by then
    storages = tuple(replace(s, released=Moment(min(s.released, n))) for s in graph.storages)
    graph = replace(graph, storages=storages)
    levels = [rng.randint(0, 3) for _ in graph.ops]
    saved = closed(graph, frozenset(op.id for op in graph.ops if not levels[op.id]))
    there = {value.id for value in graph.values if value.op in saved}
    for event in replay(graph, levels):
        match event:
            case Recompute(op, _, _):
                assert op not in saved
                assert there.issuperset(graph.ops[op].reads)
                there |= set(graph.ops[op].writes)
            case Free(v, _) if graph.values[v].op not in saved:
                there.discard(v)
            case _:
                pass


def nested(n: int, outer: int, inner: int) -> list[int]:
    """A chain's levels: every `outer`-th op saved, every `inner`-th kept."""
    return [0 if i % outer == 0 else 1 if i % inner == 0 else 2 for i in range(n)]


def test_a_chain_within_a_chain_needs_a_cube_root() -> None:
    n = 125
    graph = chain(*[1] * n)
    once = min(cost(graph, nested(n, k, 1)).peak for k in range(2, n))
    twice = min(cost(graph, nested(n, k * i, i)).peak for i in range(2, 9) for k in range(2, 9))
    assert once <= 2 * math.sqrt(n) + 2
    assert twice <= 3 * n ** (1 / 3) + 3 < once
    assert cost(graph, nested(n, 25, 5)).most_runs == 2


def test_a_part_of_a_segment_runs_again_and_the_rest_in_passing() -> None:
    # 0 saved; 1 2 in passing, then again; 3 kept; 4 5 kept for the last part: the last op is asked for first.
    graph = chain(*[1] * 6)
    levels = [0, 2, 2, 1, 2, 2]
    runs = [e.op for e in replay(graph, levels) if isinstance(e, Recompute)]
    assert runs == [1, 2, 3, 4, 5, 1, 2]
    assert cost(graph, levels).recompute_us == 7
    assert recompute_us(graph, frozenset({0})) == 5


def test_on_tiny_graphs_twice_is_never_worse_and_sometimes_better() -> None:
    better = 0
    for seed in range(80, 120):
        graph, _ = small(seed, 6)
        every = list(itertools.product(range(3), repeat=len(graph.ops)))
        once = min(cost(graph, levels).peak for levels in every if max(levels) <= 1)
        twice = min(cost(graph, levels).peak for levels in every)
        assert twice <= once == oracles.smallest_peak(oracles.peaks_and_times(graph))
        better += twice < once
    assert better


@pytest.mark.parametrize("n", [6, 8])
def test_the_floor_of_a_tiny_chain_by_brute_force(n: int) -> None:
    graph = chain(*[1] * n)
    floors = [
        min(cost(graph, levels).peak for levels in itertools.product(range(k + 1), repeat=n)) for k in (1, 2)
    ]
    assert floors[1] <= floors[0]
    assert anytime_floor(graph) <= floors[1]
