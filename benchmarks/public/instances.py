"""List the graphs of the benchmark and the budgets for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.public.check import judge
from benchmarks.public.planners.published import Stages
from benchmarks.public.readers import checkmate_files, dtr_logs, own_profiles, random_graphs
from benchmarks.public.step_graph import FORMAT, StepGraph

SHARES = (0.75, 0.5, 0.35, 0.2)  # of the way from the bound of `least_bytes` to the save-all peak
LAYERED = ((1, 12), (2, 24), (3, 40), (4, 60))  # seeds and layers of random graphs
MODELS = ("vit_h14", "resnet152", "gpt2_xl", "llama3_8b", "t5_3b", "mamba_2_8b", "unet_sd15")


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph and its budgets, with the schedules that were published for them."""

    graph: StepGraph
    budgets: tuple[int, ...]
    solutions: dict[tuple[str, int], Stages] = field(default_factory=dict)


def instance_of(graph: StepGraph) -> Instance:
    """Return a graph with the published budgets, or else with budgets at `SHARES`."""
    if graph.published:
        return Instance(graph, tuple(sorted({p.budget for p in graph.published}, reverse=True)))
    least, most = least_bytes(graph), save_all_peak(graph)
    return Instance(graph, tuple(dict.fromkeys(int(least + share * (most - least)) for share in SHARES)))


def least_bytes(graph: StepGraph) -> int:
    """Return the bytes that the most demanding op needs by itself: no schedule has a smaller peak."""
    return max(
        graph.static_bytes
        + op.first_bytes
        + op.workspace_bytes
        + sum(graph.values[v].nbytes for v in op.reads)
        + sum(graph.values[w].nbytes for w in graph.writes[number] if graph.values[w].previous is None)
        for number, op in enumerate(graph.ops)
    )


def save_all_peak(graph: StepGraph) -> int:
    """Return the peak if nothing runs again, and each value is freed as soon as nothing reads it."""
    ends: dict[int, list[int]] = {}
    for v, value in enumerate(graph.values):
        if v not in graph.keep:
            last = max([value.op, value.held_until - 1, *graph.readers[v]])
            ends.setdefault(last, []).append(v)
    events: list[tuple[object, ...]] = []
    for number in range(len(graph.ops)):
        over = [p for w in graph.writes[number] if (p := graph.values[w].previous) in ends.get(number, ())]
        events.append(("compute", number, over))
        events += [("free", v) for v in ends.get(number, ()) if v not in over]
    return int(judge(graph.to_json(), events)["peak_bytes"])


def own() -> Iterator[tuple[str, Callable[[], list[Instance]]]]:
    """Yield the names of our own graphs, each with a function that makes it."""
    for seed, layers in LAYERED:
        yield f"layered {seed}", partial(_of_layers, seed, layers)
    for model in MODELS:
        if own_profiles.is_available(model):
            yield model, partial(_of_model, model)


def given(paths: Sequence[Path]) -> Iterator[tuple[str, Callable[[], list[Instance]]]]:
    """Yield the graphs in files and folders that the user names, each with a function that reads it.

    A file is a StepGraph or Checkmate's columns in JSON, a pickle of `utsaslab/monet-schedules`, or a log of
    DTR. Pickles of one graph at several budgets are one instance. Other files in a folder are left out.
    """
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        pickles: dict[str, list[Path]] = {}
        for file in found:
            if file.name.startswith("checkmate_solution_") and file.suffix == ".pkl":
                pickles.setdefault(file.name.rsplit("_", 1)[0], []).append(file)
            elif file.suffix == ".log":
                yield file.name, partial(_of_log, file)
            elif file.suffix == ".json" and (file == path or _is_graph(file)):
                yield file.name, partial(_of_json, file)
        for name, files in pickles.items():
            yield name, partial(_of_pickles, files)


def _is_graph(path: Path) -> bool:
    data = json.loads(path.read_text())
    return isinstance(data, dict) and (data.get("format") == FORMAT or data.keys() >= checkmate_files.COLUMNS)


def _of_layers(seed: int, layers: int) -> list[Instance]:
    return [instance_of(random_graphs.layered(seed, layers))]


def _of_model(name: str) -> list[Instance]:
    return [instance_of(own_profiles.read(name))]


def _of_log(path: Path) -> list[Instance]:
    return [instance_of(dtr_logs.read(path))]


def _of_json(path: Path) -> list[Instance]:
    data = json.loads(path.read_text())
    read = StepGraph.from_json if data.get("format") == FORMAT else checkmate_files.from_columns
    return [instance_of(read(data))]


def _of_pickles(paths: Sequence[Path]) -> list[Instance]:
    """Return the graph of pickles, one for each budget."""
    solutions = {}
    for path in paths:
        graph, budget, stages = checkmate_files.from_pickle(path)
        solutions[graph.name, budget] = stages
    budgets = {budget for _, budget in solutions} | {p.budget for p in graph.published}
    return [Instance(graph, tuple(sorted(budgets, reverse=True)), solutions)]
