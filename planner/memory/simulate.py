"""Fold the events of a step into live bytes: the only definition of "peak"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from autoac.planner.memory.schedule import (
    Backward,
    Compute,
    Event,
    Free,
    OptimizerStep,
    Recompute,
    schedule,
)
from autoac.planner.problem.graph import Graph, Moment, SaveSet


class Instant(NamedTuple):
    """The device's memory at one event."""

    event: Event
    live_bytes: int  # all that is live at the event, static bytes and the kernel's workspace included
    moment: Moment  # forward op or backward step


@dataclass(frozen=True, slots=True)
class Timeline:
    """The live bytes of one step, event by event."""

    instants: tuple[Instant, ...]

    @property
    def peak(self) -> Instant:
        """Return the first instant at which the most bytes are live."""
        return max(self.instants, key=lambda instant: instant.live_bytes)


def simulate(graph: Graph, save_set: SaveSet) -> Timeline:
    """Replay one training step and count the bytes live at every event.

    Counted: static bytes; what waiting microbatches hold, except at the optimizer step; every storage that
    an op of `graph` allocates, once, however many tensors view it; gradients and temporaries of backward;
    what a kernel holds in addition to its outputs while it runs. Compare `live_bytes` directly with a budget.

    Args:
        graph: one step.
        save_set: ops whose outputs are saved; ops that must be saved are added.

    Returns:
        One instant for each event, in order.

    Raises:
        UnknownOp: `save_set` names an op that `graph` does not have.
    """
    return Timeline(tuple(map(Instant._make, instants(graph, save_set))))


def instants(graph: Graph, save_set: SaveSet) -> Iterator[tuple[Event, int, Moment]]:
    """Yield the fields of each Instant of `simulate`, in order."""
    n = len(graph.ops)
    waiting = graph.waiting_microbatches * waiting_bytes(graph, save_set) if graph.waiting_microbatches else 0
    live = graph.static_bytes + waiting
    moment = Moment(0)
    for event in schedule(graph, save_set):
        match event:
            case Free():
                live -= event.nbytes
            case Compute():
                moment = Moment(event.op)
                live += event.nbytes
            case Recompute():
                moment = Moment(n + event.step)
                live += event.nbytes
            case Backward():
                moment = Moment(n + event.step)
            case OptimizerStep():
                moment = graph.end
                live -= waiting
        yield event, live + extra_bytes(graph, event), moment


def extra_bytes(graph: Graph, event: Event) -> int:
    """Return the bytes that are live only during `event`: gradients, temporaries, a kernel's workspace."""
    match event:
        case Free():
            return 0  # between two kernels
        case Compute():
            return graph.ops[event.op].workspace_bytes + graph.ops[event.op].extra_bytes
        case Recompute():
            step = graph.steps[event.step]
            return graph.ops[event.op].workspace_bytes + step.extra_bytes_while_unpacking
        case Backward():
            return graph.steps[event.step].extra_bytes_peak
        case OptimizerStep():
            return graph.closing_bytes


def waiting_bytes(graph: Graph, save_set: SaveSet) -> int:
    """Return the bytes that a microbatch holds from the end of its forward until its backward begins.

    Those are saved tensors that backward may need, and storages that Python holds beyond forward (the
    outputs). Each of `graph.waiting_microbatches` holds as many while this one runs (docs/pipelines.md).
    """
    live = 0
    for event in schedule(graph, save_set):
        match event:
            case Compute(_, nbytes):
                live += nbytes
            case Free(_, nbytes):
                live -= nbytes
            case _:
                break
    return live


def peak_of(graph: Graph, save_set: SaveSet) -> Instant:
    """Return the peak of `simulate`, without the timeline."""
    return Instant(*max(instants(graph, save_set), key=lambda instant: instant[1]))


def peak_bytes(graph: Graph, save_set: SaveSet) -> int:
    """Return the most bytes live at any event of the step."""
    return max(live for _, live, _ in instants(graph, save_set))


def fits(graph: Graph, save_set: SaveSet, budget: int) -> bool:
    """Return True if the peak is within `budget`. Stop at the first event above it."""
    return all(live <= budget for _, live, _ in instants(graph, save_set))


def instant_name(graph: Graph, instant: Instant) -> str:
    """Return where in the step `instant` is, in words."""
    match instant.event:
        case Recompute(op, _, step):
            return f"{graph.ops[op].name}, run again in backward step {step} ({graph.steps[step].name})"
        case _:
            return graph.moment_name(instant.moment)
