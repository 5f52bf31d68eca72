"""Say which ops the runtime must log for a step, and in which order."""

from __future__ import annotations

from autoac.planner import Graph, schedule
from autoac.planner.formats.op_key import OpKey
from autoac.planner.memory.schedule import Compute, Recompute
from autoac.planner.problem.graph import SaveSet


def expected_log(graph: Graph, save_set: SaveSet) -> list[tuple[str, str]]:
    """Return the events that the runtime must log for a step under `save_set`."""
    events: list[tuple[str, str]] = []
    for event in schedule(graph, save_set):
        if isinstance(event, Compute | Recompute):
            op = OpKey.parse(graph.ops[event.op].name).op
            events.append((type(event).__name__.lower(), op))
    return events
