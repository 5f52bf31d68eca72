"""What can be said of the peak before any solving: a floor that no save set beats, and the ceiling."""

from __future__ import annotations

from dataclasses import dataclass

from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import Graph, Moment
from autoac.planner.solver.recompute_windows import Facts, Role, facts


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range in which a budget is worth planning for, in bytes."""

    floor: int  # no save set has a smaller peak (proven)
    floor_at: Moment  # where
    ceiling: int  # the peak with nothing recomputed


def bounds(graph: Graph) -> Bounds:
    """The floor and the ceiling of `graph`. Cheap: no solving.

    The floor is the most that is live at any one moment whatever is saved: in forward what forward
    itself holds and what must be saved; in a step of backward what the step has anyway and every value
    that an unpack has asked for and a later one will ask for again.
    """
    return bounds_of(facts(graph))


def bounds_of(f: Facts) -> Bounds:
    """`bounds`, from facts that are known already."""
    graph = f.graph
    at, nbytes = _floor(f)
    return Bounds(floor=nbytes, floor_at=Moment(at), ceiling=peak_bytes(graph, graph.everything))


def _floor(f: Facts) -> tuple[int, int]:
    graph, n = f.graph, len(f.graph.ops)
    end = graph.end
    change = [0] * (end + 2)  # of the bytes held whatever is saved, by moment

    def hold(begin: int, until: int, nbytes: int) -> None:
        if begin < until:
            change[begin] += nbytes
            change[until] -= nbytes

    waiting = 0  # of another microbatch, whatever is saved
    for storage in graph.storages:
        if storage.versions:
            waiting += storage.nbytes * (f.base_release[storage.id] > n)
            hold(graph.versions[storage.versions[0]].op, f.base_release[storage.id], storage.nbytes)
    for value in graph.versions:
        v, nbytes = value.id, graph.nbytes(value.id)
        free_until = f.extra_from[v]  # until then a saved value takes no more than forward's own
        if f.role[value.op] is Role.SAVED:
            waiting += nbytes * (free_until <= n < f.dropped[v])
            hold(max(value.op, free_until), f.dropped[v], nbytes)
        elif value.saved_tensors:
            unpacked = [j for h in value.saved_tensors for j in graph.saved_tensors[h].unpacked[:1]]
            if unpacked:
                hold(max(n + min(unpacked), free_until), n + f.last_use[v] + 1, nbytes)
    most, at, live = graph.static_bytes + graph.closing_bytes, end, graph.static_bytes
    live += graph.waiting_microbatches * waiting
    for moment in range(end):
        live += change[moment]
        if moment < n:
            here = live + graph.ops[moment].workspace_bytes + graph.ops[moment].extra_bytes
        else:
            here = live + graph.steps[moment - n].extra_bytes_peak
        if here > most:
            most, at = here, Moment(moment)
    return at, most
