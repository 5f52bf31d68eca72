"""Knapsacks: torch's solvers over the whole step, and its program for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ac_client.measure.forked_call import run_in_child
from autoac.planner.formats.op_key import OpKey
from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.problem.save_sets import may_be_recomputed, without_cost_free_recomputes
from benchmarks.plans.block_rules import Family, blocks_of, boundary, depths
from benchmarks.plans.op_kinds import is_random

FRACTIONS = tuple(round(0.05 * i, 2) for i in range(1, 20))
"""Fractions of memory, for baselines that take one."""
MANY_ITEMS = 5_000  # from here on torch's dp_knapsack would need a table of more than 200 MB
ILP_LIMIT_S = 5.0  # torch's ilp_knapsack has none: equal items may take hours and gigabytes

Knapsack = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]
"""torch's signature: memory, run times, capacity -> run time saved, items to save, items to recompute."""


def knapsack_items(graph: Graph, *, packed_only: bool) -> list[OpId]:
    """Return the ops among which a knapsack chooses: those with bytes that may be recomputed.

    Args:
        packed_only: only ops of which autograd saves an output; all others are recomputed.
    """
    recomputable = may_be_recomputed(graph, frozenset())
    return [
        op.id
        for op in graph.ops
        if recomputable[op.id]
        and not op.must_save
        and not op.must_recompute
        and nbytes_of(graph, op.id)
        and (not packed_only or any(graph.versions[w].saved_tensors for w in op.writes))
    ]


def nbytes_of(graph: Graph, op: OpId) -> int:
    """Return the bytes of everything that `op` writes."""
    return sum(graph.nbytes(w) for w in graph.ops[op].writes)


def knapsack(graph: Graph, solver: Knapsack, fractions: Iterable[float] = FRACTIONS) -> Family:
    """Save the ops with the most run time that fit into a fraction of the candidates' bytes.

    There are two sets of candidates: ops whose outputs autograd saves ("packed"), and every op that
    backward may recompute ("all"). As in torch's `_optimize_runtime_with_given_memory`, an item's run time
    is its own op's, and memory is a fraction of the whole. A fraction is left out if the solver raises
    TimeoutError.
    """
    family: Family = {}
    for packed_only in (True, False):
        items = knapsack_items(graph, packed_only=packed_only)
        total = sum(nbytes_of(graph, op) for op in items)
        if not total:
            continue
        memory = [nbytes_of(graph, op) / total for op in items]
        runtimes = [graph.ops[op].runtime_us for op in items]
        for fraction in fractions:
            try:
                _, chosen, _ = solver(memory, runtimes, fraction)
            except TimeoutError:
                continue
            setting = f"{'packed' if packed_only else 'all'}, fraction {fraction:.2f}"
            family[setting] = without_cost_free_recomputes(graph, (items[i] for i in chosen))
    return family


def dp_knapsack(graph: Graph) -> Family:
    """Run torch's `dp_knapsack`, or its variant of linear memory if the table would be too large."""
    from torch._functorch._activation_checkpointing import knapsack as torchs

    large = len(graph.ops) > MANY_ITEMS
    return knapsack(graph, torchs.dp_knapsack_sliding_hirschberg if large else torchs.dp_knapsack)


def greedy_knapsack(graph: Graph) -> Family:
    """Run torch's `greedy_knapsack`."""
    from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack as solver

    return knapsack(graph, solver)


def ilp_knapsack(graph: Graph) -> Family:
    """Run torch's `ilp_knapsack`, which needs scipy, for at most `ILP_LIMIT_S` seconds a fraction."""
    from torch._functorch._activation_checkpointing.knapsack import ilp_knapsack as solver

    return knapsack(graph, partial(run_in_child, solver, limit_s=ILP_LIMIT_S))


def uniform_blocks(graph: Graph, fractions: Iterable[float] = FRACTIONS) -> Family:
    """Solve a program for each kind of block at one fraction of its memory, as xformers does.

    The policy of a block is from torch's copy of that program,
    `torch.distributed._tools.sac_ilp.get_optimal_checkpointing_policy_per_module`: the most run time saved
    within a fraction of the bytes of the block's ops, random ops all or none, an in-place op together with
    the op that it overwrites. Block inputs are saved, since each block is under checkpoint. Blocks with the
    same ops, bytes and run times are solved once.

    Source: xformers/checkpoint.py, `selective_checkpoint_wrapper`, `get_optimal_checkpoint_policy`.
    """
    family: Family = {}
    for depth in depths(graph):
        blocks = blocks_of(graph, depth)
        inside: dict[str, list[OpId]] = {}
        for op in graph.ops:
            if blocks[op.id]:
                inside.setdefault(blocks[op.id], []).append(op.id)
        outputs = boundary(graph, blocks)
        for fraction in fractions:
            solved: dict[object, list[bool]] = {}
            chosen = set(outputs)
            for ops in inside.values():
                kind = tuple(
                    (OpKey.parse(graph.ops[o].name).op, nbytes_of(graph, o), graph.ops[o].runtime_us)
                    for o in ops
                )
                if kind not in solved:
                    solved[kind] = block_policy(graph, ops, fraction)
                chosen.update(o for o, save in zip(ops, solved[kind], strict=True) if save)
            family[f"depth {depth}, fraction {fraction:.2f}"] = without_cost_free_recomputes(graph, chosen)
    return family


def block_policy(graph: Graph, ops: Sequence[OpId], fraction: float) -> list[bool]:
    """Return, for each op, True if torch's program per module saves it within a fraction of the bytes."""
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module

    decisions = get_optimal_checkpointing_policy_per_module(
        sac_stats(graph, ops), min(max(fraction, 0.0), 1.0)
    )
    return [bool(d) for d in decisions] if decisions else [False] * len(ops)


def sac_stats(graph: Graph, ops: Sequence[OpId]):  # type: ignore[no-untyped-def]  # torch's class
    """Return the ops as torch's estimator of selective checkpoint describes them."""
    from torch.distributed._tools.sac_estimator import SACStats

    at = {op: i for i, op in enumerate(ops)}
    names = [OpKey.parse(graph.ops[o].name).op for o in ops]
    inplace = []
    for o in ops:
        previous = [p for w in graph.ops[o].writes if (p := graph.versions[w].previous) is not None]
        if previous:  # torch pairs an op with its parent, or with itself if the parent is outside the module
            head = graph.versions[previous[0]].op
            while (before := _overwrites(graph, head)) is not None and before in at:
                head = before
            inplace.append((at[o], at.get(head, at[o])))
    return SACStats(
        func_names=names,
        runtimes=[graph.ops[o].runtime_us / 1000 for o in ops],
        memory=[nbytes_of(graph, o) for o in ops],
        view_like_ops=[],  # profiles contain no views
        rand_ops=[i for i, name in enumerate(names) if is_random(name)],
        saved_autograd_ops=[],
        inplace_ops=inplace,
        force_store_random=False,
    )


def _overwrites(graph: Graph, op: OpId) -> OpId | None:
    for w in graph.ops[op].writes:
        previous = graph.versions[w].previous
        if previous is not None:
            return graph.versions[previous].op
    return None
