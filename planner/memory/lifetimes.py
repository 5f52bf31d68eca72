"""What is live when: for every version of a storage, from which event of the step to which."""

from __future__ import annotations

from dataclasses import dataclass

from autoac.planner.errors import Holding
from autoac.planner.memory.schedule import Compute, Free, OptimizerStep, Recompute
from autoac.planner.memory.simulate import Timeline, simulate, waiting_bytes
from autoac.planner.problem.graph import Graph, OpId, SaveSet, VersionId
from autoac.planner.problem.save_sets import with_forced_saves


@dataclass(frozen=True, slots=True)
class Life:
    """Memory that an op of forward filled, in forward or again in backward."""

    value: VersionId
    nbytes: int
    begin: int  # into Timeline.instants
    end: int  # the first instant at which it is live no more
    why: str  # "saved", "recomputed", ...


def lives(graph: Graph, save_set: SaveSet, timeline: Timeline) -> tuple[Life, ...]:
    """Who holds what in `timeline`, which is `simulate(graph, save_set)`; in the order of their beginning.

    At every instant the sizes of what is live, static bytes, what other microbatches hold, and what belongs
    to no storage (`beside`) add up to the instant's `live_bytes`. Memory that is written over in place is
    from then on the new version's.
    """
    saved = with_forced_saves(graph, save_set)
    found: list[Life] = []
    begun: dict[VersionId, list[tuple[int, str]]] = {}  # lives that have not ended: since when, and why

    def end(v: VersionId, at: int) -> None:
        # Of several, the latest: what Python holds of forward outlives what backward made again.
        since, why = begun[v].pop()
        if graph.nbytes(v):
            found.append(Life(v, graph.nbytes(v), since, at, why))

    for i, instant in enumerate(timeline.instants):
        match instant.event:
            case Compute(op, _, over) | Recompute(op, _, _, over):
                for v in over:
                    end(v, i)
                again = isinstance(instant.event, Recompute)
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


def beside(graph: Graph, timeline: Timeline, at: int) -> int:
    """Bytes live at instant `at` in no storage of forward: gradients, temporaries, a kernel's workspace."""
    instant = timeline.instants[at]
    match instant.event:
        case Compute(op):
            return graph.ops[op].workspace_bytes + graph.ops[op].extra_bytes
        case Recompute(op, _, step):
            return graph.ops[op].workspace_bytes + graph.steps[step].extra_bytes_while_unpacking
        case Free():
            return 0  # between two kernels
        case OptimizerStep():
            return graph.closing_bytes
        case event:
            return graph.steps[event.step].extra_bytes_peak


def live_at_peak(graph: Graph, save_set: SaveSet) -> list[Holding]:
    """What is live at the peak, largest first. The sizes add up to the peak."""
    timeline = simulate(graph, save_set)
    at = timeline.instants.index(timeline.peak)
    holdings = [
        Holding(life.nbytes, graph.ops[graph.versions[life.value].op].name, life.why)
        for life in lives(graph, save_set, timeline)
        if life.begin <= at < life.end
    ]
    if graph.waiting_microbatches and not isinstance(timeline.peak.event, OptimizerStep):
        waiting = graph.waiting_microbatches * waiting_bytes(graph, save_set)
        holdings.append(Holding(waiting, "other microbatches in flight", f"{graph.waiting_microbatches}"))
    holdings += [
        Holding(graph.static_bytes, "parameters, buffers, gradients, optimizer state, batch", "not planned"),
        Holding(beside(graph, timeline, at), "gradients, temporaries and workspace", "not planned"),
    ]
    return sorted((h for h in holdings if h.nbytes), key=lambda h: -h.nbytes)


def _why(graph: Graph, saved: SaveSet, op: OpId) -> str:
    reason = graph.ops[op].must_save
    if reason:
        return f"must be saved: {reason}"
    return "saved" if op in saved else "held by forward or Python"
