"""Read the graphs and schedules that MONeT's authors published for Checkmate's program.

Their repository is `utsaslab/monet-schedules`; it has no license, so its files are fetched by the user and
never stored here. A file `checkmate_solution_NAME_normal_GB.pkl` holds a graph and the schedule that Gurobi
found in up to 24 hours on 12 threads. The same graph can also be given as JSON with the columns of
`from_columns`.

Their program counts outputs in KiB and costs in 1/100 ms, both rounded; the budget is GB * 2**20 KiB without
the fixed KiB of the last node. So `static_bytes` here are these fixed bytes, and workspace is not counted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.public.planners.published import Stages
from benchmarks.public.readers import safe_pickle
from benchmarks.public.step_graph import Published, StepGraph, StepOp, StepValue

KIB, GIB = 2**10, 2**30
COLUMNS = {"name", "edges", "mem_kib", "fixed_kib", "cost_centi_ms", "op", "loss"}
_NAME = re.compile(r"checkmate_solution_(?P<name>\w+?)_normal_(?P<gb>[\d.]+)\.pkl")

# Costs of the published schedules in 1/100 ms, by graph and GB; True where Gurobi proved them optimal.
_PUBLISHED = {
    "resnet50_184": {
        10: (108_048, True),
        9: (109_042, True),
        8: (110_355, False),
        7: (112_154, False),
        6: (113_578, False),
        5: (122_812, False),
    },
    "un_11": {
        10: (192_809, False),
        9: (193_700, False),
        8: (194_811, False),
        7: (196_567, False),
        6: (199_613, True),
        5: (209_265, True),
    },
}


def from_columns(data: dict[str, Any]) -> StepGraph:
    """Return the graph of a dict with `COLUMNS`.

    `loss` is the last node of forward, and `name` the name of the graph.
    """
    reads: list[list[int]] = [[] for _ in data["op"]]
    for source, target in data["edges"]:
        reads[target].append(source)
    seen: dict[str, int] = {}
    ops = []
    for name, cost, values in zip(data["op"], data["cost_centi_ms"], reads, strict=True):
        overload = f"aten.{name.partition('::')[2].strip('_')}.default"
        seen[overload] = seen.get(overload, -1) + 1
        ops.append(StepOp(f"/{overload}#{seen[overload]}", 10 * cost, tuple(sorted(values))))
    published = _PUBLISHED.get(data["name"], {})
    return StepGraph(
        name=data["name"],
        source="utsaslab/monet-schedules",
        ops=tuple(ops),
        values=tuple(StepValue(op, KIB * kib) for op, kib in enumerate(data["mem_kib"])),
        forward_ops=data["loss"] + 1,
        static_bytes=KIB * data["fixed_kib"][-1],
        rule="checkmate",
        published=tuple(Published(gb * GIB, 10 * us, best) for gb, (us, best) in published.items()),
    ).checked()


def from_pickle(path: Path) -> tuple[StepGraph, int, Stages]:
    """Return a graph, the budget of its published schedule in bytes, and the schedule.

    Raises:
        ValueError: the file's name is not of the form above.
        UnsafePickle: the file holds more than plain data.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"the name must be checkmate_solution_NAME_normal_GB.pkl, got {path.name}")
    info, solution = safe_pickle.read(path)
    nodes = [info["nodes"][i] for i in range(len(info["nodes"]))]
    graph = from_columns(
        {
            "name": match["name"],
            "edges": [(int(source), int(target)) for source, target, _ in info["edge_list"]],
            "mem_kib": [round(float(node["mem"]) / KIB) for node in nodes],
            "fixed_kib": [round(float(node["fixed_mem"]) / KIB) for node in nodes],
            "cost_centi_ms": [round(float(node["workspace_compute"][0]) * 100) for node in nodes],
            "op": [node["op"] for node in nodes],
            "loss": int(info["loss"]),
        }
    )
    stages = [
        ({int(v) for v in run.nonzero()[0]}, {int(v) for v in kept.nonzero()[0]})
        for run, kept in zip(solution["r"], solution["s"], strict=True)
    ]
    return graph, round(float(match["gb"]) * GIB), stages
