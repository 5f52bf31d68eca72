"""Planners that choose what to save for backward once, and recompute the rest on demand.

The functions of `benchmarks/plans` each give a *family* of save sets, one for each setting. A planner here
takes the fastest of its family that the simulator says is within the budget. So every baseline has its best
setting for each budget, and the lazy recompute of our runtime.
"""

from __future__ import annotations

import functools
import math

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from benchmarks.plans.baselines import BASELINES, Baseline
from benchmarks.plans.block_rules import Family, boundary
from benchmarks.public.planner_graph import events_of, graph_of
from benchmarks.public.step_graph import Event, NoSchedule, Planner, StepGraph


def from_family(family: Baseline) -> Planner:
    """Return the planner that takes the best setting of `family`."""

    @functools.lru_cache(maxsize=1)
    def judged(graph: StepGraph) -> list[tuple[float, int, SaveSet]]:
        problem = graph_of(graph)
        sets = dict.fromkeys(family(problem).values())
        return [(recompute_us(problem, s), peak_bytes(problem, s), s) for s in sets]

    def plan(graph: StepGraph, budget: int) -> list[Event]:
        found = judged(graph)
        if not found:
            raise NoSchedule("no such modules or ops")
        fitting = [entry for entry in found if entry[1] <= budget]
        if not fitting:
            raise NoSchedule("no setting fits")
        return events_of(graph, min(fitting, key=lambda entry: entry[:2])[2])

    return plan


def save_all(graph: Graph) -> Family:
    """Recompute nothing."""
    return {"": graph.everything}


def sqrt_n(graph: Graph) -> Family:
    """Cut forward into segments of about the same time, and save what crosses from one to another.

    T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, cuts a chain of n ops into sqrt(n)
    segments. Half and twice as many are tried too.
    """
    total = sum(op.runtime_us for op in graph.ops)
    family: Family = {}
    for factor in (0.5, 1.0, 2.0):
        count = max(1, round(factor * math.sqrt(len(graph.ops))))
        spent, segments = 0.0, []
        for op in graph.ops:
            spent += op.runtime_us
            segments.append(f"segment {min(count - 1, int(spent * count / total)) if total else 0}")
        crossing = boundary(graph, segments)
        family[f"{count} segments"] = without_cost_free_recomputes(graph, crossing)
    return family


SAVE_SET_PLANNERS: dict[str, Planner] = {
    "save all": from_family(save_all),
    "sqrt(n) segments": from_family(sqrt_n),
    **{name: from_family(family) for name, family in BASELINES.items()},
}
