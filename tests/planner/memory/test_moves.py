"""Test moves: bytes and times against those of a step run by hand, and the points that are chosen."""

from __future__ import annotations

import random
from dataclasses import replace

import graphs
import pytest
import step_by_hand
from fuzzers.random_moves import random_moves

from autoac.planner import Graph, build
from autoac.planner.memory.clocks import timing
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import SaveSet
from autoac.planner.problem.moves import Link, Move, with_moves


def random_link(rng: random.Random) -> Link:
    return Link(
        rng.choice((0.3, 1.0, 4.0)), rng.choice((0.3, 1.0, 4.0)), rng.choice((0.0, 0.0, 0.1)), 1 << 60
    )


def timed_step(rng: random.Random, most_ops: int) -> Graph:
    """Return a small step whose backward takes time, and of which autograd saves as forward goes."""
    graph = build(graphs.random_profile(rng, most_ops))
    steps = tuple(replace(step, runtime_us=float(rng.randrange(6))) for step in graph.steps)
    saved = tuple(replace(h, packed=graph.versions[h.version].op + 1) for h in graph.saved_tensors)
    return replace(graph, steps=steps, saved_tensors=saved)


def random_step(seed: int) -> tuple[Graph, SaveSet, tuple[Move, ...], Link]:
    """Return a step, what it saves, and moves at points drawn at random."""
    rng = random.Random(seed)
    graph, link = timed_step(rng, 9), random_link(rng)
    return graph, *random_moves(graph, rng, 0.7), link


@pytest.mark.parametrize("part", range(10))
def test_bytes_and_times_are_those_of_a_step_run_by_hand(part: int) -> None:
    moved = 0
    for seed in range(100 * part, 100 * part + 100):
        graph, save_set, moves, link = random_step(seed)
        moving = with_moves(graph, moves, link)
        expected = step_by_hand.run(graph, save_set, moves, link)
        found = timing(moving, save_set, moves, link)
        assert peak_bytes(moving, save_set) == expected.peak, seed
        assert found.end_us == pytest.approx(expected.end_us), seed
        assert found.moved_bytes == expected.host_bytes, seed
        assert sum(copy.stall_us for copy in found.copies) == pytest.approx(found.stall_us), seed
        ends = [end for copy in found.copies for end in (copy.out_us[1], copy.in_us[1])]
        for copy in found.copies:
            assert copy.out_us[1] - copy.out_us[0] == pytest.approx(link.out_us(copy.nbytes))
            assert copy.in_us[1] - copy.in_us[0] == pytest.approx(link.in_us(copy.nbytes))
        assert ends == pytest.approx([end for _, both in sorted(expected.copied.items()) for end in both])
        moved += bool(moves) and max(len(step.unpacks) for step in graph.steps) > 1
    assert moved > 30
