"""Rules of thumb over the blocks of a model: which ops to save, and how torch would run that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoac.planner.formats.op_key import OpKey
from autoac.planner.problem.graph import Graph, Moment, SavedTensor, SavedTensorId, SaveSet, StepId
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from benchmarks.plans.op_kinds import is_attention, is_matmul

Family = dict[str, SaveSet]
"""Setting -> save set."""

SELECTIVE = "selective list"
EVERY = {"every matmul": 1, "every second matmul": 2}
MOST_DEPTHS = 2  # of blocks within blocks


def blocks_of(graph: Graph, depth: int) -> list[str]:
    """Return for each op the block that it belongs to, `depth` blocks deep; "" for none."""
    return [OpKey.parse(op.name).block(depth) for op in graph.ops]


def depths(graph: Graph) -> list[int]:
    """Return 1, 2, ... for each level of nested blocks, at most MOST_DEPTHS."""
    return [depth for depth in range(1, MOST_DEPTHS + 1) if any(blocks_of(graph, depth))]


def boundary(graph: Graph, blocks: Sequence[str]) -> SaveSet:
    """Return the ops that `torch.utils.checkpoint` around each block saves.

    These are outputs that another block reads, and everything outside of blocks.

    Args:
        blocks: for each op, the block that it belongs to; "" for none.
    """
    return frozenset(
        op.id
        for op in graph.ops
        if not blocks[op.id]
        or any(blocks[r] != blocks[op.id] for w in op.writes for r in graph.versions[w].readers)
    )


def per_block(graph: Graph) -> Family:
    """Put `torch.utils.checkpoint` around every block: save its inputs and nothing inside."""
    return {
        f"depth {depth}": without_cost_free_recomputes(graph, boundary(graph, blocks_of(graph, depth)))
        for depth in depths(graph)
    }


def attention_and_blocks(graph: Graph) -> Family:
    """Save block inputs and the outputs of attention. Return {} without attention."""
    attention = attention_outputs(graph)
    if not attention:
        return {}
    return {
        f"depth {depth}": without_cost_free_recomputes(
            graph, boundary(graph, blocks_of(graph, depth)) | attention
        )
        for depth in depths(graph)
    }


def attention_outputs(graph: Graph) -> SaveSet:
    """Return fused attention kernels, or else the first batched matmul after each softmax."""
    fused = frozenset(op.id for op in graph.ops if is_attention(OpKey.parse(op.name).op))
    if fused:
        return fused
    found, after_softmax = set(), False
    for op in graph.ops:
        overload = OpKey.parse(op.name).op
        if "softmax" in overload:
            after_softmax = True
        elif after_softmax and overload.split(".")[1:2] in (["bmm"], ["baddbmm"]):
            found.add(op.id)
            after_softmax = False
    return frozenset(found)


def selective(graph: Graph) -> Family:
    """Put selective checkpoint around each block, with a policy that saves matmuls and attention.

    The policy is a list for `create_selective_checkpoint_contexts`. "Every second" saves the first, third,
    ... matmul of each block, as torchtitan's `selective` option does
    (torchtitan/distributed/activation_checkpoint.py). Return {} without blocks. The simulator judges these
    on the graph of `as_run`.
    """
    family: Family = {}
    for depth in depths(graph):
        outputs = boundary(graph, blocks_of(graph, depth))
        for which in EVERY:
            setting = f"{which}, depth {depth}"
            family[setting] = without_cost_free_recomputes(graph, listed(graph, setting) | outputs)
    return family


def listed(graph: Graph, setting: str) -> SaveSet:
    """Return the ops that the policy of a setting of `selective` lists."""
    which, depth = setting.split(", depth ")
    blocks, every = blocks_of(graph, int(depth)), EVERY[which]
    seen: dict[str, int] = {}
    found = set()
    for op in graph.ops:
        overload, block = OpKey.parse(op.name).op, blocks[op.id]
        if is_matmul(overload):
            seen[block] = seen.get(block, 0) + 1
            if seen[block] % every == 1 % every:
                found.add(op.id)
        elif is_attention(overload):
            found.add(op.id)
    return frozenset(found)


def as_run(graph: Graph, baseline: str, setting: str, save_set: SaveSet) -> tuple[Graph, SaveSet]:
    """Return a graph and a save set with the memory of the baseline; only selective checkpoint differs.

    `torch.utils.checkpoint` with a policy is not lazy. The first unpack in a block recomputes the whole
    block, up to its last saved tensor: the returned graph unpacks every saved tensor of a block in that
    step too. Tensors that the policy saves are held until then, even if backward never reads them: the
    returned graph counts them as extra bytes.
    """
    if baseline != SELECTIVE:
        return graph, save_set
    n = len(graph.ops)
    blocks = blocks_of(graph, int(setting.rpartition(" ")[2]))
    begins: dict[str, StepId] = {}  # by block: the step of its first unpack
    for step in graph.steps:
        for h in step.unpacks:
            begins.setdefault(blocks[graph.versions[graph.saved_tensors[h].version].op], step.id)
    crossing = boundary(graph, blocks)
    parked = {
        op
        for op in listed(graph, setting) - crossing
        if blocks[op] in begins and not any(graph.versions[w].saved_tensors for w in graph.ops[op].writes)
    }
    extra = [0] * (n + len(graph.steps) + 1)  # bytes, by moment
    values, handles, steps = list(graph.versions), list(graph.saved_tensors), list(graph.steps)
    for value in graph.versions:
        begin = begins.get(blocks[value.op]) if blocks[value.op] else None
        if begin is None:
            continue
        if value.op in parked:
            for moment in range(graph.storages[value.storage].released, n + begin):
                extra[moment] += graph.nbytes(value.id)
        elif value.saved_tensors:
            h = SavedTensorId(len(handles))
            handles.append(SavedTensor(h, value.id, value.op + 1, (begin,), Moment(n + begin + 1)))
            values[value.id] = replace(value, saved_tensors=(*value.saved_tensors, h))
            step = steps[begin]
            steps[begin] = replace(step, unpacks=(*step.unpacks, h), drops=(*step.drops, h))
    return replace(
        graph,
        ops=tuple(replace(op, extra_bytes=op.extra_bytes + extra[op.id]) for op in graph.ops),
        versions=tuple(values),
        saved_tensors=tuple(handles),
        steps=tuple(
            replace(
                step,
                extra_bytes_while_unpacking=step.extra_bytes_while_unpacking + extra[n + step.id],
                extra_bytes_peak=step.extra_bytes_peak + extra[n + step.id],
            )
            for step in steps
        ),
    ), save_set - parked
