"""Turn a StepGraph into the planner's Graph, and the planner's schedule into events.

The planner recomputes ops of forward and runs backward as it is. So ops from `forward_ops` on become steps of
backward, the values that they pass to each other become bytes that no plan changes, and the forward values
that they read become saved tensors, one for each op that reads one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from autoac.planner.memory.schedule import Backward, Compute, Free, OptimizerStep, Recompute, schedule
from autoac.planner.problem.graph import (
    BackwardStep,
    Graph,
    Moment,
    Op,
    OpId,
    SavedTensor,
    SavedTensorId,
    SaveSet,
    StepId,
    Storage,
    StorageId,
    StorageVersion,
    VersionId,
)
from benchmarks.public.step_graph import Event, StepGraph, StepOp, StepValue


@functools.lru_cache(maxsize=4)
def graph_of(step: StepGraph) -> Graph:
    """Return the planner's Graph of a step."""
    n = step.forward_ops
    count = sum(value.op < n for value in step.values)  # forward values come first
    storage_of, chains = _storages(step, count)
    saved: list[SavedTensor] = []
    of_value: list[list[SavedTensorId]] = [[] for _ in range(count)]
    steps = []
    before, during = _backward_bytes(step)
    for number in range(n, len(step.ops)):
        unpacks = []
        for value in step.ops[number].reads:
            if value < count:
                h, j = SavedTensorId(len(saved)), StepId(number - n)
                packed = step.values[value].op + 1
                saved.append(SavedTensor(h, VersionId(value), packed, (j,), Moment(number + 1)))
                of_value[value].append(h)
                unpacks.append(h)
        op, unpacked = step.ops[number], tuple(unpacks)
        bytes_of_step = before[number], during[number]
        steps.append(BackwardStep(StepId(number - n), op.name, unpacked, unpacked, op.us, *bytes_of_step))
    return Graph(
        ops=tuple(_op(step, number) for number in range(n)),
        versions=tuple(
            StorageVersion(
                VersionId(v),
                OpId(step.values[v].op),
                StorageId(storage_of[v]),
                None if (previous := step.values[v].previous) is None else VersionId(previous),
                tuple(OpId(reader) for reader in step.readers[v] if reader < n),
                tuple(of_value[v]),
            )
            for v in range(count)
        ),
        storages=tuple(
            Storage(StorageId(i), step.values[chain[0]].nbytes, _released(step, chain[-1]), tuple(chain))
            for i, chain in enumerate(chains)
        ),
        saved_tensors=tuple(saved),
        steps=tuple(steps),
        static_bytes=step.static_bytes,
        closing_bytes=0,
    )


def _op(step: StepGraph, number: int) -> Op:
    op = step.ops[number]
    return Op(
        id=OpId(number),
        name=op.name,
        reads=tuple(VersionId(v) for v in op.reads),
        writes=tuple(VersionId(v) for v in step.writes[number]),
        runtime_us=op.us,
        workspace_bytes=op.workspace_bytes,
        extra_bytes=op.first_bytes,
        must_save="" if op.repeatable else "not repeatable",
    )


def _storages(step: StepGraph, count: int) -> tuple[list[int], list[list[VersionId]]]:
    """Return the storage of each forward value, and the values of each storage."""
    storage_of: list[int] = []
    chains: list[list[VersionId]] = []
    for v in range(count):
        previous = step.values[v].previous
        if previous is None:
            storage_of.append(len(chains))
            chains.append([])
        else:
            storage_of.append(storage_of[previous])
        chains[storage_of[v]].append(VersionId(v))
    return storage_of, chains


def _released(step: StepGraph, value: int) -> Moment:
    """Return the moment from which neither forward nor the step's result needs the memory of `value`."""
    if value in step.keep:
        return Moment(len(step.ops))
    readers = [reader for reader in step.readers[value] if reader < step.forward_ops]
    return Moment(max(step.values[value].held_until, step.values[value].op + 1, *(r + 1 for r in readers)))


def _backward_bytes(step: StepGraph) -> tuple[list[int], list[int]]:
    """Return for each op the bytes of gradients and the like that are live before it and while it runs."""
    before, during = [0] * len(step.ops), [0] * len(step.ops)
    live, ends = 0, _backward_ends(step)
    for number in range(step.forward_ops, len(step.ops)):
        op = step.ops[number]
        over = sum(step.values[v].nbytes for v in overwritten_in_backward(step, number))
        outputs = sum(step.values[v].nbytes for v in step.writes[number])
        before[number] = live + op.before_bytes
        live += outputs - over
        during[number] = live + op.workspace_bytes + op.first_bytes
        live -= sum(step.values[v].nbytes for v in ends.get(number, ()))
    return before, during


def overwritten_in_backward(step: StepGraph, number: int) -> tuple[int, ...]:
    """Return the backward values that a backward op writes over, since nothing reads them later."""
    found = (step.values[w].previous for w in step.writes[number])
    return tuple(
        p
        for p in found
        if p is not None
        and step.values[p].op >= step.forward_ops
        and step.readers[p][-1] == number
        and p not in step.keep
    )


@functools.lru_cache(maxsize=4)
def _backward_ends(step: StepGraph) -> dict[int, list[int]]:
    """Return for each op the backward values that nothing needs once it has run."""
    ends: dict[int, list[int]] = {}
    for v, value in enumerate(step.values):
        if value.op < step.forward_ops or v in step.keep:
            continue
        last = max([value.op, value.held_until - 1, *step.readers[v]])
        if last >= len(step.ops) or v in overwritten_in_backward(step, last):
            continue
        ends.setdefault(last, []).append(v)
    return ends


def events_of(step: StepGraph, save_set: SaveSet, graph: Graph | None = None) -> list[Event]:
    """Return the schedule of a save set as events; `graph` is that of the plan if ops have use groups."""
    return list(_events(step, save_set, graph or graph_of(step)))


def _events(step: StepGraph, save_set: SaveSet, graph: Graph) -> Iterator[Event]:
    """Yield the events of a schedule.

    The runtime recomputes an unsaved value into new memory even if Python still holds the old one. The
    checker drops such a second copy at once, so its `Free` is left out.
    """
    ends = _backward_ends(step)
    copies = [0] * len(step.values)  # of forward values
    first = {run: row[0] for row in graph.runs for run in row}
    value_of = {
        v: w
        for run, op in first.items()
        for v, w in zip(graph.ops[run].writes, graph.ops[op].writes, strict=True)
    }
    numbers = {op: i for i, op in enumerate(op.id for op in graph.ops if first.get(op.id, op.id) == op.id)}
    for event in schedule(graph, save_set):
        match event:
            case Compute(run, _, overwritten) | Recompute(run, _, _, overwritten):
                op = numbers[first.get(run, run)]
                for v in step.writes[op]:
                    copies[v] += 1
                for v in overwritten:
                    copies[v] -= 1
                yield ("compute", op, overwritten) if overwritten else ("compute", op)
            case Backward(j):
                number = step.forward_ops + j
                over = overwritten_in_backward(step, number)
                yield ("compute", number, over) if over else ("compute", number)
                yield from (("free", v) for v in ends.get(number, ()))
            case Free(version, _):
                v = value_of.get(version, version)
                copies[v] -= 1
                if not copies[v] and v not in step.keep:
                    yield ("free", v)
            case OptimizerStep():
                pass


def step_graph_of(name: str, source: str, graph: Graph) -> StepGraph:
    """Return the StepGraph of a Graph that was built from a profile.

    Backward steps run once. A tensor that autograd holds longer than the last unpack needs it counts as held
    only until then. Time to record an op is left out.
    """
    n, end = len(graph.ops), int(graph.end)
    ops = [
        StepOp(op.name, op.runtime_us, op.reads, not op.must_save, op.workspace_bytes, op.extra_bytes)
        for op in graph.ops
    ]
    for j in graph.steps:
        reads = tuple(dict.fromkeys(graph.saved_tensors[h].version for h in j.unpacks))
        peak, unpacking = j.extra_bytes_peak, j.extra_bytes_while_unpacking
        ops.append(StepOp(f"backward/{j.name}", j.runtime_us, reads, False, 0, peak, unpacking))
    ops.append(StepOp("optimizer.step", 0.0, (), False, 0, graph.closing_bytes))
    values = []
    for v in graph.versions:
        storage = graph.storages[v.storage]
        held = storage.released if v.id == storage.versions[-1] else 0
        values.append(StepValue(v.op, storage.nbytes, v.previous, end + 1 if held >= end else held))
    return StepGraph(name, source, tuple(ops), tuple(values), n, graph.static_bytes).checked()
