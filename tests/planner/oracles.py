"""Slow and readable answers: every save set, tried by the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import Graph, SaveSet


def every_save_set(graph: Graph) -> Iterator[SaveSet]:
    """All subsets of the ops that may be dropped; what must be saved is in each."""
    free = [op.id for op in graph.ops if not op.must_save]
    for size in range(len(free) + 1):
        for chosen in itertools.combinations(free, size):
            yield frozenset(chosen) | graph.must_save


def peaks_and_times(graph: Graph) -> dict[SaveSet, tuple[int, float]]:
    """Return (peak, recompute time) of every save set."""
    return {s: (peak_bytes(graph, s), recompute_us(graph, s)) for s in every_save_set(graph)}


def least_time(table: dict[SaveSet, tuple[int, float]], budget: int) -> float | None:
    """Return the least recompute time of any save set that fits, or None if none fits."""
    return min((time for peak, time in table.values() if peak <= budget), default=None)


def smallest_peak(table: dict[SaveSet, tuple[int, float]]) -> int:
    """Return the smallest peak of any save set."""
    return min(peak for peak, _ in table.values())
