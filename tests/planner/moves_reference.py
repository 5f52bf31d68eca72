"""A second simulator of moves: intervals of memory, and three servers that work off queues of tasks.

It shares no code with clocks.py or moves.py. Of the step it takes the events with all moved ops saved, which
test_schedule.py checks by a model of its own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoac.planner.memory.schedule import Backward, Compute, Event, Free, OptimizerStep, Recompute, schedule
from autoac.planner.problem.graph import Graph, SaveSet, VersionId
from autoac.planner.problem.moves import Link, Move


@dataclass
class Task:
    """Work of one server, which begins once the tasks in `after` are done."""

    server: str
    us: float
    after: list[Task] = field(default_factory=list)
    done: float | None = None


@dataclass(frozen=True)
class Reference:
    peak: int
    end_us: float
    host_peak: int
    copied: dict[VersionId, tuple[float | None, float | None]]  # when the copies out and back are over


def run(graph: Graph, save_set: SaveSet, moves: Sequence[Move], link: Link) -> Reference:
    """Return what a step does under `save_set`, which saves no moved op."""
    moved = {move.op: move for move in moves}
    of_version = {w: move for move in moves for w in graph.ops[move.op].writes}
    events = list(schedule(graph, save_set | set(moved)))
    n, last_use = len(graph.ops), _last_uses(graph, events, of_version)

    live, peak, on_host, host_peak = graph.static_bytes, 0, 0, 0
    queues: dict[str, deque[Task]] = {"compute": deque(), "out": deque(), "in": deque()}
    out: dict[VersionId, Task] = {}
    back: dict[VersionId, Task] = {}
    waits: list[Task] = []  # that the next task of compute waits for
    is_free: set[VersionId] = set()
    used: set[VersionId] = set()
    moment = -1

    def issue(server: str, us: float, after: Sequence[Task] = ()) -> Task:
        task = Task(server, us, list(after))
        queues[server].append(task)
        return task

    def at(new_moment: int) -> None:
        nonlocal moment, live, peak
        for here in range(moment + 1, new_moment + 1):
            for v, move in of_version.items():
                if move.free == here and v not in is_free:
                    is_free.add(v)
                    live -= graph.nbytes(v)
                    waits.append(out[v])
            for move in sorted(moves, key=lambda move: -move.op):
                if move.fetch is not None and n + move.fetch == here:
                    fetch(move)
        moment = new_moment

    def fetch(move: Move) -> None:
        nonlocal live, peak
        live += sum(map(graph.nbytes, graph.ops[move.op].writes))
        extra = graph.steps[moment - n].extra_bytes_while_unpacking if moment >= n else 0
        extra = graph.steps[move.fetch].extra_bytes_while_unpacking if move.fetch is not None else extra
        peak = max(peak, live + extra)
        begin = issue("compute", 0.0, waits)
        waits.clear()
        for w in graph.ops[move.op].writes:
            back[w] = issue("in", link.in_us(graph.nbytes(w)), [begin, out[w]])

    def use(versions: Sequence[VersionId]) -> None:
        nonlocal on_host
        for v in versions:
            if v in of_version and v not in used:
                used.add(v)
                waits.append(back[v])
                on_host -= graph.nbytes(v)

    for i, event in enumerate(events):
        match event:
            case Compute(op, nbytes):
                at(op)
                live += nbytes
                peak = max(peak, live + graph.ops[op].workspace_bytes + graph.ops[op].extra_bytes)
                task = issue("compute", graph.ops[op].runtime_us, waits)
                waits.clear()
                if op in moved:
                    for w in graph.ops[op].writes:
                        out[w] = issue("out", link.out_us(graph.nbytes(w)), [task])
                        on_host += graph.nbytes(w)
                    host_peak = max(host_peak, on_host)
            case Recompute(op, nbytes, step):
                at(n + step)
                use(graph.ops[op].reads)
                live += nbytes
                step_bytes = graph.steps[step].extra_bytes_while_unpacking
                peak = max(peak, live + graph.ops[op].workspace_bytes + step_bytes)
                issue("compute", graph.ops[op].recompute_us, waits)
                waits.clear()
            case Backward(step):
                at(n + step)
                use([graph.saved_tensors[h].version for h in graph.steps[step].unpacks])
                peak = max(peak, live + graph.steps[step].extra_bytes_peak)
                issue("compute", graph.steps[step].runtime_us, waits)
                waits.clear()
            case Free(v, nbytes):
                if v not in of_version:
                    live -= nbytes
            case OptimizerStep():
                at(graph.end)
                peak = max(peak, live + graph.closing_bytes)
        for v in last_use.get(i, ()):
            live -= graph.nbytes(v)
    end_us = _work_off(queues)
    return Reference(peak, end_us, host_peak, {v: (out[v].done, back[v].done) for v in back})


def _last_uses(
    graph: Graph, events: Sequence[Event], of_version: dict[VersionId, Move]
) -> dict[int, list[VersionId]]:
    """Return by position of an event the moved versions that are freed right after it."""
    last: dict[VersionId, int] = {}
    end_of_step = {event.step: i for i, event in enumerate(events) if isinstance(event, Backward)}
    for i, event in enumerate(events):
        if isinstance(event, Recompute):
            for v in graph.ops[event.op].reads:
                last[v] = max(last.get(v, 0), i)
        if isinstance(event, Backward):
            for h in graph.steps[event.step].unpacks:
                v = graph.saved_tensors[h].version
                last[v] = max(last.get(v, 0), end_of_step[event.step])
    found: dict[int, list[VersionId]] = {}
    for v in of_version:
        found.setdefault(last[v], []).append(v)
    return found


def _work_off(queues: dict[str, deque[Task]]) -> float:
    """Let each server take its tasks in order, each as soon as it may begin; return when compute ends."""
    now, busy = 0.0, dict.fromkeys(queues, False)
    running: list[tuple[float, int, Task]] = []
    count, compute_ends = 0, 0.0
    while True:
        for server, queue in queues.items():
            while queue and not busy[server] and all(t.done is not None for t in queue[0].after):
                task = queue.popleft()
                busy[server], count = True, count + 1
                heapq.heappush(running, (now + task.us, count, task))
        if not running:
            assert not any(queues.values()), "a task waits for ever"
            return compute_ends
        now, _, task = heapq.heappop(running)
        task.done, busy[task.server] = now, False
        if task.server == "compute":
            compute_ends = now
