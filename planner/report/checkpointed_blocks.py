"""Return the save set of checkpointing every block, which the page draws next to a plan."""

from __future__ import annotations

from autoac.planner.formats.op_key import OpKey
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes


def every_block_recomputed(graph: Graph) -> SaveSet | None:
    """Return the save set of checkpointing every block: what enters a block, and all outside of blocks.

    Blocks are the outermost modules with a number for a name. Return None if there are fewer than two.
    """
    blocks = [OpKey.parse(op.name).block() for op in graph.ops]
    if len(set(blocks) - {""}) < 2:
        return None
    saved = frozenset(
        op.id
        for op in graph.ops
        if not blocks[op.id]
        or any(blocks[r] != blocks[op.id] for w in op.writes for r in graph.versions[w].readers)
    )
    return without_cost_free_recomputes(graph, saved)
