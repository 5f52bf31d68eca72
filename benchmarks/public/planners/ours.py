"""Run this project's planner, with its defaults."""

from __future__ import annotations

from autoac.planner import InfeasibleBudget, SolverOutOfTime
from autoac.planner.plan import plan
from benchmarks.public.planner_graph import events_of, graph_of
from benchmarks.public.step_graph import Event, NoSchedule, StepGraph


def ours(graph: StepGraph, budget: int) -> list[Event]:
    """Return the schedule of our plan."""
    try:
        found = plan(graph_of(graph), budget_bytes=budget)
    except InfeasibleBudget:
        raise NoSchedule("infeasible for our rules") from None
    except SolverOutOfTime:
        raise NoSchedule("out of time") from None
    return events_of(graph, found.save_set, found.graph)
