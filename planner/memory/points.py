"""Choose the points of moves: as early a free and as late a fetch as the link allows, with some slack.

Out of the device, copies go in the order in which forward makes their storages; into it, in the order in
which backward uses them. With slack, the plan still holds if a copy takes longer than was measured.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from autoac.planner.memory.clocks import compute_times
from autoac.planner.memory.schedule import Backward, Compute, Recompute, schedule
from autoac.planner.problem.graph import Graph, Moment, OpId, SaveSet, StepId
from autoac.planner.problem.moves import Link, Move, code_ends, released, triggers, with_moves

SLACK = 0.1  # of the time of a copy: from its end to where the memory is freed or used


def choose_points(
    graph: Graph, save_set: SaveSet, ops: Collection[OpId], link: Link, slack: float = SLACK
) -> tuple[Move, ...]:
    """Return moves for those of `ops` that backward needs, in forward order.

    An op is left out if its copy to the host would not be over where the code that runs it ends, or if no
    fetch may begin between its free and its first use.

    Args:
        graph: without moves.
        save_set: what else is saved, without `ops`.
        ops: of `movable`.
        link: of device and host.
        slack: see SLACK.
    """
    n, ends = len(graph.ops), code_ends(graph)
    held_until = {op: max(released(graph, op)) for op in ops}
    lazily = with_moves(graph, [Move(op, Moment(held_until[op]), None) for op in ops], link)
    begins = [0.0] * (graph.end + 1)  # by moment
    steps_seen = [False] * len(graph.steps)
    made: dict[OpId, float] = {}
    first_use: dict[OpId, tuple[StepId, float]] = {}
    now = 0.0
    for event, now in compute_times(lazily, save_set, set(ops)):
        match event:
            case Compute(op):
                begins[op] = now
                made[op] = now + graph.ops[op].runtime_us
            case Recompute(op, _, step):
                if not steps_seen[step]:
                    begins[n + step], steps_seen[step] = now, True
                if op in held_until:
                    first_use.setdefault(op, (step, now))
            case Backward(step):
                if not steps_seen[step]:
                    begins[n + step], steps_seen[step] = now, True
    begins[graph.end] = now

    free: dict[OpId, Moment] = {}
    link_free = 0.0
    for op in sorted(first_use):
        copied = max(link_free, made[op])
        copied += (1 + slack) * sum(link.out_us(graph.nbytes(w)) for w in graph.ops[op].writes)
        if copied > begins[ends[op]]:
            continue  # compute would wait for it
        link_free = copied
        free[op] = Moment(min(max(bisect_left(begins, link_free), held_until[op], op + 1), ends[op]))
    steps_of, moves = fetch_steps(graph, first_use), []
    link_free = begins[graph.end]
    for op, (step, used) in sorted(first_use.items(), key=lambda item: (-item[1][1], -item[0])):
        nbytes = sum(graph.nbytes(w) for w in graph.ops[op].writes)
        begin = min(link_free, used) - link.in_us(nbytes) * (1 + slack)
        unpacking = [other for other in steps_of[op] if other <= step]
        k = bisect_right(unpacking, begin, key=lambda other: begins[n + other]) - 1
        fetch = unpacking[max(k, 0)] if unpacking else None
        if fetch is not None and free.get(op, graph.end) <= n + fetch:
            link_free = begin
            moves.append(Move(op, free[op], fetch))
    return tuple(sorted(moves, key=lambda move: move.op))


def fetch_steps(graph: Graph, ops: Iterable[OpId]) -> dict[OpId, list[StepId]]:
    """Return for each of `ops` the steps at which its fetch may begin: in the same code, in order."""
    ends = code_ends(graph)
    by_code: dict[tuple[Moment, bool], list[StepId]] = {}
    for step, of in triggers(graph).items():
        by_code.setdefault((ends[of], graph.ops[of].compiled), []).append(step)
    return {op: by_code.get((ends[op], graph.ops[op].compiled), []) for op in ops}


def in_time(graph: Graph, save_set: SaveSet, moves: Sequence[Move], link: Link) -> tuple[Move, ...] | None:
    """Return `moves` with fetches no later than `save_set` needs them.

    None if a fetch may not begin so early, or if the outputs are needed again after their last use.
    """
    runs: dict[OpId, list[StepId]] = {}
    for event in schedule(with_moves(graph, moves, link), save_set):
        if isinstance(event, Recompute):
            runs.setdefault(event.op, []).append(event.step)
    steps_of, result = fetch_steps(graph, (move.op for move in moves)), []
    for move in moves:
        steps = [s for s in steps_of[move.op] if s <= runs[move.op][0] and move.free <= len(graph.ops) + s]
        if len(runs[move.op]) > 1 or not steps:
            return None
        result.append(replace(move, fetch=steps[-1]))
    return tuple(result)
