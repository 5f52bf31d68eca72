"""Which moments get a row: where peaks are likely, and where a candidate turned out too large."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoac.planner.memory.schedule import Backward, Compute, Recompute
from autoac.planner.memory.simulate import Instant, Timeline, simulate
from autoac.planner.problem.graph import SaveSet
from autoac.planner.solver.program import Burst, Forward, Point, Work
from autoac.planner.solver.recompute_windows import NEVER, Facts, starts
from autoac.planner.solver.repeated_blocks import Likeness

# How many points are added at a time, in the largest graphs and in others. Every one makes states, with a
# column for nearly every op: so the fewer, the more ops there are.
FIRST_WINDOWS = (8, 40)  # stretches of backward with a point to start from: three or so in a block of a dozen
MOST_ALIKE = (4, 40)  # points of blocks built alike at a time
CELLS = 200_000  # points times ops, about
MORE = 6  # points of one save set at most, beside those of blocks built alike
ALMOST = 0.02  # a block built alike counts as too large from this share of the budget below it


def first_points(f: Facts, save_sets: Iterable[SaveSet]) -> set[Point]:
    """Where peaks are likely: the fullest moments of forward and of stretches of backward, by save set."""
    graph = f.graph
    points: set[Point] = set()
    width = max(1, math.ceil(len(graph.steps) / _affordable(f, FIRST_WINDOWS)))
    for save_set in save_sets:
        forward: tuple[int, int] | None = None
        by_step = [0] * len(graph.steps)
        for instant in simulate(graph, save_set).instants:
            match instant.event:
                case Compute(op, _):
                    forward = max(forward or (0, 0), (instant.live_bytes, op))
                case Backward(step):
                    by_step[step] = instant.live_bytes
                case _:
                    pass
        if forward is not None:
            points.add(Forward(forward[1]))
        for begin in range(0, len(by_step), width):
            window = range(begin, min(begin + width, len(by_step)))
            points.add(Work(max(window, key=lambda j: (by_step[j], -j))))
    return points


def too_large(
    f: Facts, budget: int, save_set: SaveSet, timeline: Timeline, likeness: Likeness | None = None
) -> list[Point]:
    """Where `save_set` is over the budget, worst first: the worst moments of steps, at local maxima.

    Args:
        f: facts of the graph.
        budget: bytes.
        save_set: what is saved.
        timeline: the simulator's, of that.
        likeness: which ops are alike. Given, moments like these in other blocks follow, where they are
            nearly as full.
    """
    graph = f.graph
    n = len(graph.ops)
    start = starts(f, save_set)
    worst: dict[int, Instant] = {}
    for instant in timeline.instants:
        if instant.event is not None and (
            instant.moment not in worst or instant.live_bytes > worst[instant.moment].live_bytes
        ):
            worst[instant.moment] = instant
    points: dict[Point, None] = {}
    for place, instant in sorted(worst.items(), key=lambda item: -item[1].live_bytes):
        if instant.live_bytes <= budget:
            break
        beside = (worst.get(place - 1), worst.get(place + 1))
        if any(other is not None and other.live_bytes > instant.live_bytes for other in beside):
            continue
        match instant.event:
            case Compute(op, _):
                points[Forward(op)] = None
            case Recompute(op, _, _) if start[op] < NEVER:
                points[Burst(start[op], op)] = None
            case _ if place >= n:
                points[Work(place - n)] = None
    worst_first = list(points)[:MORE]
    if likeness is None:
        return worst_first
    nearly = budget - ALMOST * (budget - graph.static_bytes)
    more: dict[Point, None] = {}
    for point in worst_first:
        for other in likeness.like(point):
            instant_there = worst.get(_place(f, other))
            if instant_there is not None and instant_there.live_bytes > nearly:
                more[other] = None
    fullest = sorted(more, key=lambda other: -worst[_place(f, other)].live_bytes)
    return list(dict.fromkeys([*worst_first, *fullest[: _affordable(f, MOST_ALIKE)]]))


def _affordable(f: Facts, limits: tuple[int, int]) -> int:
    few, many = limits
    return min(many, max(few, CELLS // max(1, len(f.graph.ops))))


def _place(f: Facts, point: Point) -> int:
    match point:
        case Forward(op):
            return op
        case Work(step):
            return len(f.graph.ops) + step
        case Burst(state, _):
            return len(f.graph.ops) + f.unpacks[state - 1][0]
