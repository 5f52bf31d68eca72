"""Judge a schedule: replay its events on a graph, and return its peak and its time or the first violation.

    python check.py GRAPH.json EVENTS.json BUDGET_BYTES

This file needs Python's standard library alone, shares no code with any planner, and can be copied. The
README next to it describes both formats. An event is ["compute", op], ["compute", op, [values written over]]
or ["free", value].

Rules of a step
  1. Each op runs at least once; first runs are in the order of the ops. Only `repeatable` ops run again.
  2. An op reads values that are live. Its outputs are live from then on.
  3. A value is freed once it is live, and not before first runs have reached `held_until`.
  4. An in-place op writes into a copy, or over the previous value, which is then no longer live.
  5. While an op runs, these bytes are live: static ones, live values, all outputs of the op (an output that
     was live already is there twice), its workspace, and `first_bytes` if this is its first run. Until the
     first run of op k, `before_bytes[k]` are live when another op runs again.
  6. At the end, the values in `keep` are live.

Rules of Checkmate (graphs whose "rule" is "checkmate": one output for each op, nothing else)
  The memory recurrence of the paper, equations 1 to 4. Stage t ends with the first run of op t. R[t] are the
  ops that run in the stage, S[t] the values that are live when it begins. Ops of a stage run in the order of
  the graph. A value is freed right after an op that reads it, if no later op of the stage reads it and it is
  not in S[t + 1]; a value that no op of the stage reads stays until the stage ends.
"""

import json
import sys
from typing import Any


class Violation(Exception):
    """A schedule breaks a rule; the message names the event."""


def judge(graph: Any, events: Any, budget: int | None = None) -> dict[str, float]:
    """Return {"peak_bytes", "us", "again_us"}: the most bytes live, the time of all runs, that of recomputes.

    Raises:
        Violation: an event breaks a rule, or the peak is above `budget`.
    """
    replay = _checkmate if graph["rule"] == "checkmate" else _step
    runs = [0] * len(graph["ops"]["us"])
    peak = replay(graph, events, runs)
    for op, count in enumerate(runs):
        if not count:
            raise Violation(f"op {op} never runs")
        if count > 1 and not graph["ops"]["repeatable"][op]:
            raise Violation(f"op {op} runs {count} times and is not repeatable")
    if budget is not None and peak > budget:
        raise Violation(f"the peak of {peak} bytes is above the budget of {budget} bytes")
    us = graph["ops"]["us"]
    total = sum(t * count for t, count in zip(us, runs, strict=True))
    return {"peak_bytes": peak, "us": total, "again_us": total - sum(us)}


def _step(graph: Any, events: Any, runs: list[int]) -> int:
    """Return the peak under the rules of a step, and count in `runs` how often each op runs."""
    ops, values = graph["ops"], graph["values"]
    writes = _writes(graph)
    live: set[int] = set()
    held: int = graph["static_bytes"]
    peak = held
    reached = 0  # first runs so far
    for number, (kind, item, *over) in enumerate(events):
        where = f"event {number} ({kind} {item})"
        if kind == "free":
            if item not in live:
                raise Violation(f"{where}: the value is not live")
            if reached < values["held_until"][item]:
                raise Violation(f"{where}: the value is held until op {values['held_until'][item]}")
            live.remove(item)
            held -= values["nbytes"][item]
            continue
        if kind != "compute" or not 0 <= item < len(runs):
            raise Violation(f"{where}: not an event of this graph")
        for value in ops["reads"][item]:
            if value not in live:
                raise Violation(f"{where}: reads value {value}, which is not live")
        for value in over[0] if over else []:
            if value not in live or value not in [values["previous"][w] for w in writes[item]]:
                raise Violation(f"{where}: cannot write over value {value}")
            live.remove(value)
            held -= values["nbytes"][value]
        first = not runs[item]
        if first and item != reached:
            raise Violation(f"{where}: the next first run is that of op {reached}")
        runs[item] += 1
        reached += first
        extra = sum(values["nbytes"][w] for w in writes[item]) + ops["workspace_bytes"][item]
        if first:
            extra += ops["first_bytes"][item]
        elif reached < len(runs):
            extra += ops["before_bytes"][reached]
        peak = max(peak, held + extra)
        held += sum(values["nbytes"][w] for w in writes[item] if w not in live)
        live.update(writes[item])
    for value in graph["keep"]:
        if value not in live:
            raise Violation(f"value {value} is not live at the end")
    return peak


def _checkmate(graph: Any, events: Any, runs: list[int]) -> int:
    """Return the peak under Checkmate's recurrence, and count in `runs` how often each op runs."""
    ops, nbytes = graph["ops"], graph["values"]["nbytes"]
    ran: list[set[int]] = [set()]  # R, by stage
    kept: list[set[int]] = [set()]  # S, by stage
    live: set[int] = set()
    stage = 0
    for number, (kind, item, *_) in enumerate(events):
        where = f"event {number} ({kind} {item})"
        if kind == "free":
            if item not in live:
                raise Violation(f"{where}: the value is not live")
            live.remove(item)
            continue
        if kind != "compute" or not 0 <= item < len(runs):
            raise Violation(f"{where}: not an event of this graph")
        if stage == len(ran):
            ran.append(set())
            kept.append(set(live))
        if item in ran[stage]:
            raise Violation(f"{where}: runs twice in stage {stage}")
        if item > stage:
            raise Violation(f"{where}: the next first run is that of op {stage}")
        ran[stage].add(item)
        runs[item] += 1
        live.add(item)
        stage += item == stage
    readers: list[list[int]] = [[] for _ in runs]
    for op, reads in enumerate(ops["reads"]):
        for value in reads:
            readers[value].append(op)
    peak: int = 0
    kept.append(set())
    for t, stage_ops in enumerate(ran):
        if not kept[t + 1] <= kept[t] | stage_ops:
            raise Violation(f"stage {t + 1} begins with a value that stage {t} does not have")
        held = peak_of_stage = graph["static_bytes"] + sum(nbytes[v] for v in kept[t])
        for op in sorted(stage_ops):
            for value in ops["reads"][op]:
                if value not in kept[t] and value not in stage_ops:
                    raise Violation(f"op {op} in stage {t} reads value {value}, which is not live")
            held += nbytes[op]
            peak_of_stage = max(peak_of_stage, held)
            held -= sum(
                nbytes[v]
                for v in ops["reads"][op]
                if v not in kept[t + 1] and not any(r > op and r in stage_ops for r in readers[v])
            )
        peak = max(peak, peak_of_stage)
    return peak


def _writes(graph: Any) -> list[list[int]]:
    """Return the values that each op writes."""
    writes: list[list[int]] = [[] for _ in graph["ops"]["us"]]
    for value, op in enumerate(graph["values"]["op"]):
        writes[op].append(value)
    return writes


def main() -> None:
    graph_path, events_path, budget = sys.argv[1:]
    with open(graph_path) as graph, open(events_path) as events:
        try:
            print(json.dumps(judge(json.load(graph), json.load(events), int(budget))))
        except Violation as violation:
            sys.exit(f"violation: {violation}")


if __name__ == "__main__":
    main()
