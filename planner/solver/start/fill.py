"""Fill a budget greedily: save more ops in the best plan of a search that reached a limit."""

from __future__ import annotations

from autoac.planner.memory.simulate import fits
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.problem.save_sets import recomputed_by_backward, without_cost_free_recomputes

TRIES = 60  # each a simulation


def filled(graph: Graph, save_set: SaveSet, budget: int, tries: int = TRIES) -> SaveSet:
    """Return `save_set`, which fits, with more ops that fit: the ones with the most run time per byte first.

    Ops are added many at a time: twice as many after each success, half as many after each failure.
    """
    run = recomputed_by_backward(graph, save_set)
    nbytes = [sum(graph.nbytes(w) for w in op.writes) for op in graph.ops]
    worth = [op.recompute_us / max(nbytes[op.id], 1) for op in graph.ops]
    order = sorted((op.id for op in graph.ops if run[op.id] and nbytes[op.id]), key=lambda op: -worth[op])
    begin, many = 0, len(order)
    for _ in range(tries):
        if begin >= len(order):
            break
        more = without_cost_free_recomputes(graph, save_set | set(order[begin : begin + many]))
        if fits(graph, more, budget):
            save_set, begin, many = more, begin + many, 2 * many
        elif many > 1:
            many //= 2
        else:
            begin += 1
    return save_set
