"""Save sets that need no solver: what people do by hand, to start from and never to be worse than."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import fits
from autoac.planner.problem.graph import Graph, OpId, SaveSet
from autoac.planner.problem.save_sets import recomputed_by_backward, without_cost_free_recomputes

FILL_TRIES = 60  # each a simulation
_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number standing alone in a module path


def candidates(graph: Graph) -> Iterator[SaveSet]:
    """Simple save sets, each once: everything, block boundaries, and these with what is worth its bytes.

    Boundaries are those of every block, and of every few blocks, for each depth of nesting.
    """
    seen: set[SaveSet] = set()
    for save_set in chain(
        [graph.everything], (without_cost_free_recomputes(graph, s) for s in _simple(graph))
    ):
        if save_set not in seen:
            seen.add(save_set)
            yield save_set


def greedy(graph: Graph, faster_than_us: float) -> SaveSet:
    """The fewest of the ops that are dear for their bytes whose saving leaves less to run again than that.

    What a greedy knapsack saves, at the first size at which it would be faster.
    """
    worth = _worth(graph)
    order = sorted((op.id for op in graph.ops), key=lambda op: -worth[op])
    few, many = 0, len(order)
    while few < many:
        middle = (few + many) // 2
        if recompute_us(graph, frozenset(order[:middle])) < faster_than_us:
            many = middle
        else:
            few = middle + 1
    return without_cost_free_recomputes(graph, order[:few])


def filled(graph: Graph, save_set: SaveSet, budget: int, tries: int = FILL_TRIES) -> SaveSet:
    """`save_set`, which fits, with as much as fits of what it recomputes, the dearest for its bytes first.

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


def per_block(graph: Graph) -> SaveSet | None:
    """What is saved where every block is recomputed: what enters a block, and all outside of blocks.

    Blocks are the outermost modules with a number for a name. None where there are fewer than two.
    """
    blocks = [block_of(op.name) for op in graph.ops]
    if len(set(blocks) - {""}) < 2:
        return None
    return without_cost_free_recomputes(graph, _crossing(graph, blocks) | _outside(graph, blocks))


def block_of(key: str) -> str:
    """The outermost block that an op of this key is in: `h.3` of `h.3.attn/aten.mm.default#0`; or ""."""
    return _block(key, 1)


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
    depths = sorted({len(_LAYER.findall(_module(op.name))) for op in graph.ops} - {0})
    for depth in depths:
        blocks = [_block(op.name, depth) for op in graph.ops]
        names = [name for name in dict.fromkeys(blocks) if name]
        together = 1
        while together <= max(len(names) // 2, 1):
            group = {name: names[i // together * together] for i, name in enumerate(names)}
            yield [group.get(name, "") for name in blocks]
            together *= 2


def _module(name: str) -> str:
    return name.split("/", 1)[0]


def _block(name: str, depth: int) -> str:
    """The module path up to its `depth`-th number: `h.3` of `h.3.attn`. "" outside all blocks."""
    module = _module(name)
    for i, match in enumerate(_LAYER.finditer(module), start=1):
        if i == depth:
            return module[: match.end()]
    return ""


def _crossing(graph: Graph, blocks: list[str]) -> SaveSet:
    """Ops that another block reads, and ops outside all blocks that a block reads."""
    return frozenset(
        op.id
        for op in graph.ops
        if any(blocks[r] != blocks[op.id] for w in op.writes for r in graph.versions[w].readers)
    )


def _outside(graph: Graph, blocks: list[str]) -> SaveSet:
    return frozenset(op.id for op in graph.ops if not blocks[op.id])


def _worth(graph: Graph) -> list[float]:
    """Run time that saving an op avoids, for each byte that it takes."""
    worth = []
    for op in graph.ops:
        nbytes = sum(graph.nbytes(w) for w in op.writes)
        worth.append(op.recompute_us / nbytes if nbytes else 0.0)
    return worth
