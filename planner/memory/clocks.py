"""Run a step on three clocks, compute and both directions of the link, and see where compute waits.

The events, and so the bytes on the device, are those of schedule.py for the graph with moves. This module
adds when they happen. Each direction copies one storage after another, in the order of the events.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

from autoac.planner.memory.schedule import (
    Backward,
    Compute,
    Event,
    Free,
    Recompute,
    held_until,
    schedule,
)
from autoac.planner.problem.graph import Graph, OpId, SavedTensorId, SaveSet, VersionId
from autoac.planner.problem.moves import Link, Move


@dataclass(frozen=True, slots=True)
class Copy:
    """An output that moves to the host and back: begins and ends in microseconds since the step began."""

    op: OpId
    nbytes: int
    host_us: tuple[float, float]  # the host holds it, until autograd has dropped what needs it
    out_us: tuple[float, float]  # the copy to the host
    free_us: float  # the device frees it
    in_us: tuple[float, float]  # the copy back
    stall_us: float  # compute waits for both


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of a step, in microseconds, and what it moves to the host, in bytes."""

    end_us: float
    stall_us: float  # of it, compute waits for copies
    moved_bytes: int  # to the host, which holds them until autograd has dropped what needs them
    begin_us: tuple[float, ...] = field(repr=False)  # of each event of `schedule`, after its stall
    copies: tuple[Copy, ...] = field(repr=False)  # of what is fetched, in the order of forward


def timing(graph: Graph, save_set: SaveSet, moves: Sequence[Move], link: Link) -> Timing:
    """Return the times of a step under `save_set`.

    Args:
        graph: with `moves` (`with_moves`).
        save_set: saves no moved op.
        moves: all of them are carried out.
        link: of device and host.
    """
    clocks = _Clocks(graph, moves, link)
    for event in schedule(graph, save_set):
        clocks.take(event)
    copies = tuple(clocks.copies(held_until(graph, save_set)))
    return Timing(clocks.now, sum(clocks.stalls.values()), clocks.moved_bytes, tuple(clocks.begins), copies)


def compute_times(graph: Graph, save_set: SaveSet, moved: Container[OpId]) -> Iterator[tuple[Event, float]]:
    """Yield each event with the microsecond at which it begins if compute never waits.

    Args:
        graph: with moves.
        save_set: saves none of `moved`.
        moved: ops that are moved, whose recompute is a copy.
    """
    now = 0.0
    for event in schedule(graph, save_set):
        yield event, now
        now += runtime_us_of(graph, event, moved)


def runtime_us_of(graph: Graph, event: Event, moved: Container[OpId] = ()) -> float:
    """Return the time that compute takes for an event; for a recompute of `moved`, a copy, none."""
    match event:
        case Compute(op):
            return graph.ops[op].runtime_us
        case Recompute(op):
            return 0.0 if op in moved else graph.ops[op].recompute_us
        case Backward(step):
            return graph.steps[step].runtime_us
        case _:
            return 0.0


class _Clocks:
    """The clocks while a step runs. Only this module uses it."""

    def __init__(self, graph: Graph, moves: Sequence[Move], link: Link) -> None:
        self._graph, self._link, self._moved_ops = graph, link, {move.op for move in moves}
        self._fetches = {  # saved tensors that `with_moves` has added
            graph.versions[w].saved_tensors[-1]
            for move in moves
            if move.fetch is not None
            for w in graph.ops[move.op].writes
        }
        self.now = 0.0
        self.moved_bytes = 0
        self.begins: list[float] = []  # of events
        self.stalls: dict[VersionId, float] = {}
        self._out_free = self._in_free = 0.0
        self._made: dict[VersionId, float] = {}
        self._out: dict[VersionId, tuple[float, float]] = {}  # waited for where it is freed
        self._freed: dict[VersionId, float] = {}
        self._in: dict[VersionId, tuple[float, float]] = {}  # waited for at the first use
        self._used: set[VersionId] = set()
        self._step_ends: list[float] = []

    def take(self, event: Event) -> None:
        """Let `event` happen."""
        graph = self._graph
        match event:
            case Free(v) if v in self._out and v not in self._in:
                self._wait(v, self._out[v])
                self._freed[v] = self.now
            case Recompute(op) if op in self._moved_ops:
                for w in graph.ops[op].writes:
                    begin = max(self.now, self._in_free, self._out[w][1])
                    self._in_free = begin + self._link.in_us(graph.nbytes(w))
                    self._in[w] = begin, self._in_free
            case Recompute(op, _, step, _, h):
                unpacks = graph.steps[step].unpacks
                self._unpack(unpacks[: unpacks.index(h)])
                self._use(graph.ops[op].reads)
            case Backward(step):
                self._unpack(graph.steps[step].unpacks)
            case _:
                pass
        self.begins.append(self.now)
        self.now += runtime_us_of(graph, event, self._moved_ops)
        if isinstance(event, Compute) and event.op in self._moved_ops:
            self._leave(event.op)
        elif isinstance(event, Backward):
            self._step_ends.append(self.now)

    def copies(self, held: Sequence[int]) -> Iterator[Copy]:
        """Yield what was fetched; `held` has for each version the moment until which it is needed."""
        graph = self._graph
        for w, back in sorted(self._in.items()):
            drop = self._step_ends[held[w] - len(graph.ops) - 1]
            host, stall = (self._made[w], drop), self.stalls.get(w, 0.0)
            op, nbytes = graph.versions[w].op, graph.nbytes(w)
            freed = self._freed.get(w, back[0])  # another profile's Python may hold it longer
            yield Copy(op, nbytes, host, self._out[w], freed, back, stall)

    def _leave(self, op: OpId) -> None:
        for w in self._graph.ops[op].writes:
            nbytes = self._graph.nbytes(w)
            begin = max(self.now, self._out_free)
            self._out_free = begin + self._link.out_us(nbytes)
            self._made[w], self._out[w] = self.now, (begin, self._out_free)
            self.moved_bytes += nbytes

    def _unpack(self, saved_tensors: Sequence[SavedTensorId]) -> None:
        unpacked = (h for h in saved_tensors if h not in self._fetches)
        self._use([self._graph.saved_tensors[h].version for h in unpacked])

    def _use(self, versions: Sequence[VersionId]) -> None:
        for v in versions:
            if v in self._out and v not in self._used:
                self._used.add(v)
                self._wait(v, self._in[v])

    def _wait(self, v: VersionId, copy: tuple[float, float]) -> None:
        self.stalls[v] = self.stalls.get(v, 0.0) + max(copy[1] - self.now, 0.0)
        self.now = max(self.now, copy[1])
