"""Save sets that need no solver: what people do by hand, to start from and never to be worse than."""

from __future__ import annotations

import re

from autoac.planner.graph import Graph, OpId, SaveSet, normalised

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number standing alone in a module path


def candidates(graph: Graph) -> list[SaveSet]:
    """Simple save sets, each once: everything, block boundaries, and both with what is worth its bytes."""
    boundary_sets = [frozenset[OpId]()]
    depths = sorted({len(_LAYER.findall(_module(op.name))) for op in graph.ops} - {0})
    for depth in depths:
        blocks = [_block(op.name, depth) for op in graph.ops]
        boundary_sets.append(_crossing(graph, blocks))
        boundary_sets.append(_crossing(graph, blocks) | _outside(graph, blocks))
    worth = _worth(graph)
    thresholds = sorted({w for w in worth if w > 0})
    levels = sorted({thresholds[len(thresholds) * i // 12] for i in range(12)}) if thresholds else []
    found = [graph.everything]
    for boundary in boundary_sets:
        found.append(normalised(graph, boundary))
        for level in levels:
            dear = frozenset(op.id for op in graph.ops if worth[op.id] >= level)
            found.append(normalised(graph, boundary | dear))
    return list(dict.fromkeys(found))


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
        if any(blocks[r] != blocks[op.id] for w in op.writes for r in graph.values[w].readers)
    )


def _outside(graph: Graph, blocks: list[str]) -> SaveSet:
    return frozenset(op.id for op in graph.ops if not blocks[op.id])


def _worth(graph: Graph) -> list[float]:
    """Run time that saving an op avoids, for each byte that it takes."""
    worth = []
    for op in graph.ops:
        nbytes = sum(graph.nbytes(w) for w in op.writes)
        worth.append(op.runtime_us / nbytes if nbytes else 0.0)
    return worth
