"""Choose the moments that get a row: where peaks are likely, and where a candidate is too large."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoac.planner.memory.schedule import Backward, Compute, Recompute
from autoac.planner.memory.simulate import Instant, Timeline, instants
from autoac.planner.problem.graph import Moment, SaveSet
from autoac.planner.solver.moments import (
    ConstrainedMoment,
    DuringBurst,
    DuringForward,
    DuringStep,
)
from autoac.planner.solver.recompute_windows import NEVER, Windows, first_runs

# How many moments are added at a time. A moment adds states, and a state adds a column for nearly every op.
# So fewer moments are added in larger graphs: a pair is for the largest graphs and for small ones.
FIRST_STRETCHES = (8, 40)  # stretches of backward with a moment each: three or so in a block of a dozen
CELLS = 200_000  # moments times ops, about
MOST_OF_ONE = 6  # moments of one save set


def first_moments(
    windows: Windows, save_sets: Iterable[SaveSet], stretches: int | None = None
) -> set[ConstrainedMoment]:
    """Return where peaks are likely: by save set, the fullest moment of forward and of parts of backward.

    Args:
        windows: of a graph.
        save_sets: of the same graph.
        stretches: how many parts backward has. By default as many as the program can afford.
    """
    graph = windows.graph
    moments: set[ConstrainedMoment] = set()
    few, many = FIRST_STRETCHES
    parts = min(many, max(few, CELLS // max(1, len(graph.ops)))) if stretches is None else stretches
    width = max(1, math.ceil(len(graph.steps) / parts))
    for save_set in save_sets:
        forward: tuple[int, int] | None = None
        by_step = [0] * len(graph.steps)
        for event, live_bytes, _ in instants(graph, save_set):
            match event:
                case Compute():
                    forward = max(forward or (0, 0), (live_bytes, event.op))
                case Backward():
                    by_step[event.step] = live_bytes
                case _:
                    pass
        if forward is not None:
            moments.add(DuringForward(forward[1]))
        for begin in range(0, len(by_step), width):
            stretch = range(begin, min(begin + width, len(by_step)))
            moments.add(DuringStep(max(stretch, key=lambda j: (by_step[j], -j))))
    return moments


def moments_over_budget(
    windows: Windows, budget: int, save_set: SaveSet, timeline: Timeline
) -> list[ConstrainedMoment]:
    """Return the moments at which `save_set` exceeds the budget, worst first, but only a few of them.

    An op of forward or a step of backward has at most one, its fullest, and none if the op or step before or
    after it is fuller.

    Args:
        windows: those of the graph.
        budget: bytes.
        save_set: the ops that are saved.
        timeline: the simulator's, under `save_set`.
    """
    graph, n = windows.graph, len(windows.graph.ops)
    start = first_runs(windows, save_set)
    worst: dict[Moment, Instant] = {}
    for instant in timeline.instants:
        at = instant.moment
        if at < graph.end and (at not in worst or instant.live_bytes > worst[at].live_bytes):
            worst[at] = instant
    moments: dict[ConstrainedMoment, None] = {}
    for at, instant in sorted(worst.items(), key=lambda item: -item[1].live_bytes):
        if instant.live_bytes <= budget:
            break
        neighbors = (worst.get(Moment(at - 1)), worst.get(Moment(at + 1)))
        if any(other is not None and other.live_bytes > instant.live_bytes for other in neighbors):
            continue
        match instant.event:
            case Compute(op, _):
                moments[DuringForward(op)] = None
            case Recompute(op, _, _) if start[op] < NEVER:
                moments[DuringBurst(start[op], op)] = None
            case _ if at >= n:
                moments[DuringStep(at - n)] = None
    return list(moments)[:MOST_OF_ONE]
