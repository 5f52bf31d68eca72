"""List the live interval of every storage version: the events of the step between which it is live."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autoac.planner.errors import Holding
from autoac.planner.memory.schedule import Compute, Free, OptimizerStep, Recompute
from autoac.planner.memory.simulate import Timeline, extra_bytes, simulate, waiting_bytes
from autoac.planner.problem.graph import Graph, OpId, SaveSet, VersionId
from autoac.planner.problem.save_sets import with_forced_saves


@dataclass(frozen=True, slots=True)
class Life:
    """The live interval of memory that an op wrote, in forward or recomputed in backward."""

    value: VersionId
    nbytes: int
    begin: int  # into Timeline.instants
    end: int  # exclusive: the first instant after the interval
    why: str  # "saved", "recomputed", ...


def lives(
    graph: Graph, save_set: SaveSet, timeline: Timeline, moved: Collection[OpId] = ()
) -> tuple[Life, ...]:
    """Return the live intervals of `timeline`, which is `simulate(graph, save_set)`, earliest first.

    At every instant the sizes of live versions, static bytes, bytes of waiting microbatches, and the
    event's `extra_bytes` add up to the instant's `live_bytes`. Memory that is written over in place belongs
    to the new version from then on. `moved` has the ops whose outputs `graph` moves.
    """
    saved = with_forced_saves(graph, save_set)
    found: list[Life] = []
    begun: dict[VersionId, list[tuple[int, str]]] = {}  # begin and reason of intervals that have not ended

    def end(v: VersionId, at: int) -> None:
        # Of several, the latest: what Python holds of forward outlives what backward recomputed.
        since, why = begun[v].pop()
        if graph.nbytes(v):
            found.append(Life(v, graph.nbytes(v), since, at, why))

    for i, instant in enumerate(timeline.instants):
        match instant.event:
            case Compute(op, _, over) | Recompute(op, _, _, over):
                for v in over:
                    end(v, i)
                again = isinstance(instant.event, Recompute)
                if op in moved:
                    why = "fetched from the host" if again else "until it is on the host"
                else:
                    why = "recomputed" if again else _why(graph, saved, op)
                for w in graph.ops[op].writes:
                    begun.setdefault(w, []).append((i, why))
            case Free(v, _):
                end(v, i)
            case _:
                pass
    for v, still in begun.items():
        for _ in range(len(still)):
            end(v, len(timeline.instants))
    return tuple(sorted(found, key=lambda life: (life.begin, life.value)))


def live_at_peak(graph: Graph, save_set: SaveSet, moved: Collection[OpId] = ()) -> list[Holding]:
    """Return what is live at the peak, largest first. The sizes add up to the peak."""
    timeline = simulate(graph, save_set)
    at = timeline.instants.index(timeline.peak)
    holdings = [
        Holding(life.nbytes, graph.ops[graph.versions[life.value].op].name, life.why)
        for life in lives(graph, save_set, timeline, moved)
        if life.begin <= at < life.end
    ]
    if graph.waiting_microbatches and not isinstance(timeline.peak.event, OptimizerStep):
        waiting = graph.waiting_microbatches * waiting_bytes(graph, save_set)
        holdings.append(Holding(waiting, "other microbatches in flight", f"{graph.waiting_microbatches}"))
    holdings += [
        Holding(graph.static_bytes, "parameters, buffers, gradients, optimizer state, batch", "not planned"),
        Holding(
            extra_bytes(graph, timeline.peak.event), "gradients, temporaries and workspace", "not planned"
        ),
    ]
    return sorted((h for h in holdings if h.nbytes), key=lambda h: -h.nbytes)


def _why(graph: Graph, saved: SaveSet, op: OpId) -> str:
    reason = graph.ops[op].must_save
    if reason:
        return f"must be saved: {reason}"
    return "saved" if op in saved else "held by forward or Python"
