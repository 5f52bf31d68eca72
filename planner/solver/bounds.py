"""Bound the peak before any solving: by a floor that no save set beats, and by the save-all peak."""

from __future__ import annotations

from dataclasses import dataclass

from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import Graph
from autoac.planner.solver.recompute_windows import Role, Windows, find_windows


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range in which a budget is worth planning for, in bytes."""

    floor: int  # no save set has a smaller peak (proven)
    ceiling: int  # the peak with nothing recomputed


def bounds(graph: Graph) -> Bounds:
    """Return the floor and the ceiling of `graph` without solving anything.

    To find the floor, count at each moment the bytes that are live whatever is saved, and take the largest
    sum. In forward these are what forward itself holds and what must be saved. In a step of backward they are
    the step's own bytes, and each version that an unpack has asked for and a later unpack will ask for again.
    The ceiling is the peak with nothing recomputed.
    """
    return bounds_of(find_windows(graph))


def bounds_of(windows: Windows) -> Bounds:
    """Return the floor and the ceiling of a graph, as `bounds` does, from windows that were found before."""
    graph = windows.graph
    return Bounds(floor=_floor(windows), ceiling=peak_bytes(graph, graph.everything))


def _floor(windows: Windows) -> int:
    graph, n = windows.graph, len(windows.graph.ops)
    end = graph.end
    change = [0] * (end + 2)  # by moment: of the bytes that every save set holds

    def hold(begin: int, until: int, nbytes: int) -> None:
        if begin < until:
            change[begin] += nbytes
            change[until] -= nbytes

    waiting = 0  # bytes of another microbatch under every save set
    for storage in graph.storages:
        if storage.versions:
            waiting += storage.nbytes * (windows.released[storage.id] > n)
            hold(graph.versions[storage.versions[0]].op, windows.released[storage.id], storage.nbytes)
    for version in graph.versions:
        v, nbytes = version.id, graph.nbytes(version.id)
        free_until = windows.extra_from[v]  # until then saving it takes no more than forward's own
        if windows.role[version.op] is Role.SAVED:
            waiting += nbytes * (free_until <= n < windows.dropped[v])
            hold(max(version.op, free_until), windows.dropped[v], nbytes)
        elif version.saved_tensors:
            unpacked = [j for h in version.saved_tensors for j in graph.saved_tensors[h].unpacked[:1]]
            if unpacked:
                hold(max(n + min(unpacked), free_until), n + windows.last_use[v] + 1, nbytes)
    held = sum(storage.nbytes for storage in graph.storages if storage.released >= end)
    most = graph.static_bytes + graph.closing_bytes + held
    live = graph.static_bytes + graph.waiting_microbatches * waiting
    for moment in range(end):
        live += change[moment]
        if moment < n:
            extra = graph.ops[moment].workspace_bytes + graph.ops[moment].extra_bytes
        else:
            extra = graph.steps[moment - n].extra_bytes_peak
        most = max(most, live + extra)
    return most
