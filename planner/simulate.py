"""Bytes live after each event: the only definition of "peak"."""

from __future__ import annotations

from dataclasses import dataclass

from autoac.planner.errors import Holding
from autoac.planner.graph import Graph, OpId, SaveSet, ValueId
from autoac.planner.schedule import Backward, Compute, Event, Free, Recompute, schedule


@dataclass(frozen=True, slots=True)
class Instant:
    """The device at one event."""

    event: Event | None  # None: optimizer.step()
    live_bytes: int  # all that is live at the event, static bytes and the kernel's workspace included
    place: int  # the moment: forward op or backward step


@dataclass(frozen=True, slots=True)
class Timeline:
    """The bytes live over one step."""

    instants: tuple[Instant, ...]

    @property
    def peak(self) -> Instant:
        """The first instant at which the most bytes are live."""
        return max(self.instants, key=lambda instant: instant.live_bytes)


def simulate(graph: Graph, save_set: SaveSet) -> Timeline:
    """Replay one training step and count the bytes live at every event.

    Counted: static bytes; every storage that an op of `graph` allocates, once, however many tensors
    view it; gradients and temporaries of backward; what a kernel holds beside its outputs while it runs.
    `live_bytes` compares with a budget as it is.

    Args:
        graph: one step.
        save_set: ops whose outputs are saved; ops that must be are added.

    Returns:
        One instant for each event, in order, then one for the optimizer step.

    Raises:
        UnknownOp: `save_set` names an op that `graph` does not have.

    >>> from autoac.planner.graph import chain
    >>> simulate(chain(1, 8, 1, 8, 0), frozenset({0, 2})).peak.live_bytes
    10
    """
    n = len(graph.ops)
    instants: list[Instant] = []
    live = graph.static_bytes
    place = 0
    for event in schedule(graph, save_set):
        at = live
        match event:
            case Compute(op, nbytes):
                place = op
                live += nbytes
                at = live + graph.ops[op].workspace + graph.ops[op].other
            case Recompute(op, nbytes, step):
                place = n + step
                live += nbytes
                at = live + graph.ops[op].workspace + graph.steps[step].other
            case Backward(step):
                place = n + step
                at = live + graph.steps[step].peak
            case Free(_, nbytes):
                live -= nbytes
                at = live
        instants.append(Instant(event, at, place))
    instants.append(Instant(None, live + graph.closing_bytes, graph.end))
    return Timeline(tuple(instants))


def peak_bytes(graph: Graph, save_set: SaveSet) -> int:
    """The most bytes live at any event of the step."""
    return simulate(graph, save_set).peak.live_bytes


def live_at_peak(graph: Graph, save_set: SaveSet) -> list[Holding]:
    """What is live at the peak, largest first. The sizes add up to the peak."""
    timeline = simulate(graph, save_set)
    peak = timeline.peak
    held: dict[ValueId, tuple[int, str]] = {}
    for instant in timeline.instants:
        match instant.event:
            case Compute(op, nbytes) | Recompute(op, nbytes):
                for w in graph.ops[op].writes:
                    previous = graph.values[w].previous
                    if previous is not None:
                        held.pop(previous, None)
                    why = "recomputed" if isinstance(instant.event, Recompute) else _why(graph, save_set, op)
                    if nbytes or previous is not None:
                        held[w] = (graph.nbytes(w), why)
            case Free(value, _):
                held.pop(value, None)
            case _:
                pass
        if instant is peak:
            break
    holdings = [
        Holding(size, graph.ops[graph.values[v].op].name, why) for v, (size, why) in held.items() if size
    ]
    rest = peak.live_bytes - graph.static_bytes - sum(h.nbytes for h in holdings)
    holdings.append(
        Holding(graph.static_bytes, "parameters, buffers, gradients, optimizer state, batch", "not planned")
    )
    if rest > 0:
        holdings.append(Holding(rest, "gradients, temporaries and workspace", "not planned"))
    return sorted((h for h in holdings if h.nbytes), key=lambda h: -h.nbytes)


def _why(graph: Graph, save_set: SaveSet, op: OpId) -> str:
    reason = graph.ops[op].must_save
    if reason:
        return f"must be saved: {reason}"
    return "saved" if op in save_set else "held by forward or Python"
