"""Turn stages of Checkmate's program into events, and replay schedules that authors published."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.public.step_graph import Event, NoSchedule, Planner, StepGraph

Stages = list[tuple[set[int], set[int]]]
"""For each stage, the ops that run in it (R) and the values that are live when it begins (S)."""


def events_of_stages(graph: StepGraph, stages: Stages) -> list[Event]:
    """Return the events of a schedule in stages.

    A value is freed after the op of a stage that reads it last, unless it stays for the next stage.
    """
    events: list[Event] = []
    live: set[int] = set()
    for t, (runs, kept) in enumerate(stages):
        events += [("free", v) for v in sorted(live - kept)]
        live &= kept
        then = stages[t + 1][1] if t + 1 < len(stages) else set(graph.keep)
        for op in sorted(runs):
            ends = [
                v
                for v in (*graph.ops[op].reads, *graph.writes[op])
                if v not in then and not any(r > op and r in runs for r in graph.readers[v])
            ]
            previous = {graph.values[w].previous for w in graph.writes[op]}
            over = tuple(v for v in ends if v in previous)
            events.append(("compute", op, over) if over else ("compute", op))
            events += [("free", v) for v in ends if v not in over]
            live.update(graph.writes[op])
            live.difference_update(ends)
    return events


def replay(solutions: Mapping[tuple[str, int], Stages]) -> Planner:
    """Return a planner that looks schedules up by the graph's name and the budget."""

    def plan(graph: StepGraph, budget: int) -> list[Event]:
        stages = solutions.get((graph.name, budget))
        if stages is None:
            raise NoSchedule("not published, or its file was not given")
        return events_of_stages(graph, stages)

    return plan
