"""Make save sets without a solver, as people do by hand: to start from, and never to be worse than."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from autoac.planner.formats.op_key import OpKey
from autoac.planner.memory.simulate import fits
from autoac.planner.problem.graph import Graph, OpId, SaveSet
from autoac.planner.problem.save_sets import recomputed_by_backward, without_cost_free_recomputes

FILL_TRIES = 60  # each a simulation


def simple_save_sets(graph: Graph) -> Iterator[SaveSet]:
    """Yield simple save sets, each once: all ops, block boundaries, and these with ops worth their bytes.

    Boundaries are those of every block, and of every few blocks, for each depth of nesting.
    """
    seen: set[SaveSet] = set()
    for save_set in chain(
        [graph.everything], (without_cost_free_recomputes(graph, s) for s in _simple(graph))
    ):
        if save_set not in seen:
            seen.add(save_set)
            yield save_set


def filled(graph: Graph, save_set: SaveSet, budget: int, tries: int = FILL_TRIES) -> SaveSet:
    """Return `save_set`, which fits, with as many more ops as fit, the most run time for its bytes first.

    Ops are added many at a time: twice as many after each success, half as many after each failure.
    """
    worth, run = _worth(graph), recomputed_by_backward(graph, save_set)
    order = sorted((op.id for op in graph.ops if run[op.id]), key=lambda op: -worth[op])
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


def every_block_recomputed(graph: Graph) -> SaveSet | None:
    """Return the save set of checkpointing every block: what enters a block, and all outside of blocks.

    Blocks are the outermost modules with a number for a name. None if there are fewer than two.
    """
    blocks = [OpKey.parse(op.name).block() for op in graph.ops]
    if len(set(blocks) - {""}) < 2:
        return None
    return without_cost_free_recomputes(graph, _crossing(graph, blocks) | _outside(graph, blocks))


def _simple(graph: Graph) -> Iterator[SaveSet]:
    boundary_sets: list[SaveSet] = []
    for blocks in _blocks(graph):
        boundary_sets += [_crossing(graph, blocks), _crossing(graph, blocks) | _outside(graph, blocks)]
        yield from boundary_sets[-2:]
    worth = _worth(graph)
    thresholds = sorted({w for w in worth if w > 0})
    levels = sorted({thresholds[len(thresholds) * i // 12] for i in range(12)}) if thresholds else []
    for boundary in [frozenset[OpId](), *boundary_sets]:
        yield boundary
        for level in levels:
            yield boundary | frozenset(op.id for op in graph.ops if worth[op.id] >= level)


def _blocks(graph: Graph) -> Iterator[list[str]]:
    """By op, which block it is in: by depth, then with every 1, 2, 4, ... neighbouring blocks as one."""
    keys = [OpKey.parse(op.name) for op in graph.ops]
    for depth in sorted({key.block_depth for key in keys} - {0}):
        blocks = [key.block(depth) for key in keys]
        names = [name for name in dict.fromkeys(blocks) if name]
        together = 1
        while together <= max(len(names) // 2, 1):
            group = {name: names[i // together * together] for i, name in enumerate(names)}
            yield [group.get(name, "") for name in blocks]
            together *= 2


def _crossing(graph: Graph, blocks: list[str]) -> SaveSet:
    """Return the ops whose outputs another block reads, or a block if the op is outside all blocks."""
    return frozenset(
        op.id
        for op in graph.ops
        if any(blocks[r] != blocks[op.id] for w in op.writes for r in graph.versions[w].readers)
    )


def _outside(graph: Graph, blocks: list[str]) -> SaveSet:
    return frozenset(op.id for op in graph.ops if not blocks[op.id])


def _worth(graph: Graph) -> list[float]:
    """Return by op the run time that saving it avoids, for each byte that it takes."""
    worth = []
    for op in graph.ops:
        nbytes = sum(graph.nbytes(w) for w in op.writes)
        worth.append(op.recompute_us / nbytes if nbytes else 0.0)
    return worth
