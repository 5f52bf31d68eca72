"""Give calls of compiled graphs that share code few different decisions, since each takes a compilation.

When every block of a model is compiled by itself, all blocks run the same graph. Code that saves other
tensors is other code: a *variant*. For six blocks that share one graph, a plan may decide

    block                0     1     2     3     4     5       variants
    best for the budget  ..    .x    .x    x.    xx    xx      4: one for each distinct row of decisions
    here                 ..    ..    ..    .x    .x    .x      2   (x: the output is saved)

A pair of variants is enough to fill a budget to within one block. The early blocks get the one that
recomputes more: their saved tensors live the longest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import permutations

from autoac.planner.formats.op_key import OpKey
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import fits
from autoac.planner.problem.graph import Graph, Op, OpId, SaveSet
from autoac.planner.problem.save_sets import with_forced_saves, without_cost_free_recomputes

MOST_VARIANTS = 3  # the first block is often a graph of its own, since its input needs no gradient: in all 4
_CANDIDATES = 4  # decisions of the plan that are tried, the most frequent first

Call = tuple[OpId, ...]
"""The ops of one call of a compiled graph."""

Variant = tuple[bool, ...]
"""By op of a call, True if its outputs are saved."""


def shared_calls(graph: Graph) -> list[list[Call]]:
    """Return the calls of compiled graphs that share code with another call, together with these."""
    calls: list[list[Op]] = []
    for op in graph.ops:
        if op.begins_graph:
            calls.append([])
        if op.compiled and calls:
            calls[-1].append(op)
    alike: dict[object, list[Call]] = defaultdict(list)
    for call in calls:
        alike[_content(graph, call)].append(tuple(op.id for op in call))
    return [group for group in alike.values() if len(group) > 1]


def with_few_variants(graph: Graph, save_set: SaveSet, budget: int) -> SaveSet:
    """Return a save set with at most `MOST_VARIANTS` different decisions for calls that share code.

    It recomputes little within the budget, though not always the least. If no save set of this form is found
    within the budget, the result is `save_set`.
    """
    for calls in shared_calls(graph):
        same = with_forced_saves(graph, without_cost_free_recomputes(graph, save_set))
        if _count(calls, same) <= MOST_VARIANTS and fits(graph, same, budget):
            save_set = same
        else:
            save_set = _best_pair(graph, same, budget, calls) or save_set
    return save_set


def _best_pair(graph: Graph, save_set: SaveSet, budget: int, calls: Sequence[Call]) -> SaveSet | None:
    """Return the best save set in which each of `calls` has one of two variants; None if none fits."""
    must_save = tuple(any(graph.ops[op].must_save for op in ops) for ops in zip(*calls, strict=True))
    frequent = Counter(_variant(call, save_set) for call in calls).most_common(_CANDIDATES)
    variants = dict.fromkeys(
        tuple(s or m for s, m in zip(variant, must_save, strict=True)) for variant, _ in frequent
    )
    variants |= dict.fromkeys([(True,) * len(must_save), must_save])
    outside = save_set.difference(*calls)
    best, least = None, float("inf")
    for early, late in permutations(variants, 2):

        def with_first(n: int, early: Variant = early, late: Variant = late) -> SaveSet:
            rows = zip(calls, [early] * n + [late] * (len(calls) - n), strict=True)
            return outside.union(*(_saved(call, variant) for call, variant in rows))

        low, high = 0, len(calls)  # between these is the fewest calls with `early` whose peak fits
        lowest_us, highest_us = (recompute_us(graph, with_first(n)) for n in (low, high))
        if min(lowest_us, highest_us) >= least or not fits(graph, with_first(high), budget):
            continue
        while low < high and min(lowest_us, highest_us) < least:
            middle = (low + high) // 2
            if fits(graph, with_first(middle), budget):
                high, highest_us = middle, recompute_us(graph, with_first(middle))
            else:
                low, lowest_us = middle + 1, recompute_us(graph, with_first(middle + 1))
        if min(lowest_us, highest_us) >= least:
            continue
        found = with_forced_saves(graph, without_cost_free_recomputes(graph, with_first(low)))
        spent = recompute_us(graph, found)
        if spent < least and _count(calls, found) <= MOST_VARIANTS and fits(graph, found, budget):
            best, least = found, spent
    return best


def _count(calls: Sequence[Call], save_set: SaveSet) -> int:
    return len({_variant(call, save_set) for call in calls})


def _variant(call: Call, save_set: SaveSet) -> Variant:
    return tuple(op in save_set for op in call)


def _saved(call: Call, variant: Variant) -> set[OpId]:
    return {op for op, saved in zip(call, variant, strict=True) if saved}


def _content(graph: Graph, call: Sequence[Op]) -> object:
    """Return what calls that share code have in common: ops, modules inside the outermost one, and sizes."""
    keys = [OpKey.parse(op.name) for op in call]
    paths = [key.module.split(".") for key in keys]
    depth = 0
    while all(len(path) > depth and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return tuple(
        (tuple(path[depth:]), key.op, tuple(graph.nbytes(w) for w in op.writes))
        for key, path, op in zip(keys, paths, call, strict=True)
    )
