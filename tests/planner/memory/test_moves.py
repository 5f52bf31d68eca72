"""Test moves: bytes and times against a second simulator, and the points that are chosen."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import graphs
import moves_reference
import pytest

from autoac.planner import Graph, build
from autoac.planner.memory.clocks import timing
from autoac.planner.memory.schedule import Backward, Recompute, schedule
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import Moment, OpId, SaveSet, StepId
from autoac.planner.problem.moves import Link, Move, movable, with_moves
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves


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
    chosen = [op for op in movable(graph, link) if rng.random() < 0.7]
    save_set = frozenset(op.id for op in graph.ops if rng.random() < 0.5) - set(chosen)
    all_of_them = [Move(op, Moment(op + 1), None) for op in chosen]
    drawn = (_at_random(graph, first_use(graph, save_set, all_of_them, op), op, rng) for op in chosen)
    moves = tuple(move for move in drawn if move is not None)
    moving = with_moves(graph, moves, link)
    save_set = with_forced_saves(moving, save_set)
    again = recomputed_by_backward(moving, save_set)
    moves = tuple(move for move in moves if again[move.op] and move.op not in save_set)
    save_set -= {move.op for move in moves}
    in_time = all(move.fetch <= (first_use(graph, save_set, moves, move.op) or 0) for move in moves)
    return graph, save_set, moves if in_time else (), link


def first_use(graph: Graph, save_set: SaveSet, moves: Iterable[Move], op: OpId) -> StepId | None:
    """Return the first step that reads an output of `op`, if all moved ops are available."""
    writes = set(graph.ops[op].writes)
    for event in schedule(graph, save_set | {move.op for move in moves}):
        match event:
            case Recompute(reader, _, step) if writes & set(graph.ops[reader].reads):
                return step
            case Backward(step) if writes & {
                graph.saved_tensors[h].version for h in graph.steps[step].unpacks
            }:
                return step
    return None


def _at_random(graph: Graph, first: StepId | None, op: OpId, rng: random.Random) -> Move | None:
    """Return a move of `op` that is used in step `first`; None if Python holds the outputs for too long."""
    n, writes = len(graph.ops), graph.ops[op].writes
    released = max(graph.storages[graph.versions[w].storage].released for w in writes)
    earliest = max(released, op + 1)
    if first is None or earliest > n + first:
        return None
    fetch = rng.randint(max(0, earliest - n), first)
    return Move(op, Moment(rng.randint(earliest, n + fetch)), StepId(fetch))


@pytest.mark.parametrize("part", range(10))
def test_bytes_and_times_are_those_of_the_second_simulator(part: int) -> None:
    moved = 0
    for seed in range(100 * part, 100 * part + 100):
        graph, save_set, moves, link = random_step(seed)
        moving = with_moves(graph, moves, link)
        expected = moves_reference.run(graph, save_set, moves, link)
        found = timing(moving, save_set, moves, link)
        assert peak_bytes(moving, save_set) == expected.peak, seed
        assert found.end_us == pytest.approx(expected.end_us), seed
        assert found.moved_bytes == expected.host_peak, seed
        moved += bool(moves)
    assert moved > 50
