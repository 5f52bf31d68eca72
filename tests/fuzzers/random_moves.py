"""Draw moves of a step at random points, so that a runtime can be compared with the planner."""

from __future__ import annotations

import random
from collections.abc import Iterable

from autoac.planner import Graph
from autoac.planner.memory.schedule import Backward, Recompute, schedule
from autoac.planner.problem.graph import Moment, OpId, SaveSet, StepId
from autoac.planner.problem.moves import Link, Move, movable, released, triggers, with_moves
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves

ANY = Link(1.0, 1.0, 0.0, 1 << 60)  # a link on which every size may move


def random_moves(graph: Graph, rng: random.Random, share: float) -> tuple[SaveSet, tuple[Move, ...]]:
    """Return what a step saves, and moves of other ops that backward needs, at points drawn at random.

    Args:
        share: of the ops that may move.
    """
    chosen = [op for op in movable(graph, ANY) if rng.random() < share]
    save_set = with_forced_saves(graph, frozenset(op.id for op in graph.ops if rng.random() < 0.5))
    save_set -= set(chosen)
    lazily = [Move(op, Moment(max(released(graph, op))), None) for op in chosen]
    moves = tuple(filter(None, (_at_random(graph, save_set, lazily, op, rng) for op in chosen)))
    moving = with_moves(graph, moves, ANY)
    save_set = with_forced_saves(moving, save_set)
    again = recomputed_by_backward(moving, save_set)
    kept = tuple(move for move in moves if again[move.op] and move.op not in save_set)
    save_set = with_forced_saves(with_moves(graph, kept, ANY), save_set - {move.op for move in kept})
    in_time = all((move.fetch or 0) <= (first_use(graph, save_set, kept, move.op) or 0) for move in kept)
    return save_set, kept if in_time else ()


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


def _at_random(
    graph: Graph, save_set: SaveSet, moves: Iterable[Move], op: OpId, rng: random.Random
) -> Move | None:
    first, earliest = first_use(graph, save_set, moves, op), max(*released(graph, op), op + 1)
    end = graph.forward_end(op)
    in_time = {step: of for step, of in triggers(graph).items() if first is not None and step <= first}
    steps = [step for step, of in in_time.items() if graph.forward_end(of) == end]
    return Move(op, Moment(rng.randint(earliest, end)), rng.choice(steps)) if steps else None
