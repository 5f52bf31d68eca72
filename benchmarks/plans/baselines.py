"""Nine other ways to decide which ops are recomputed: each is a function from a Graph to save sets.

A baseline returns a *family*: a save set for each of its settings (a depth of blocks, a fraction of
memory). The planner's simulator judges all save sets, under the rules of our own plans. For all baselines
but one this is in their favor: our runtime is lazy and recomputes an op outside the save set only if
something needs it. A selective policy of `torch.utils.checkpoint` is judged as torch runs it (`as_run`).

Every save set is completed by `without_cost_free_recomputes`: it holds the ops that must be saved, and
saving an op that nothing reads costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pulp

from autoac.planner.formats.op_key import OpKey
from autoac.planner.problem.graph import Graph, Moment, OpId, SavedTensor, SavedTensorId, SaveSet, StepId
from autoac.planner.problem.save_sets import may_be_recomputed, without_cost_free_recomputes

Family = dict[str, SaveSet]
"""Setting -> save set."""
Baseline = Callable[[Graph], Family]

SELECTIVE = "selective list"
EVERY = {"every matmul": 1, "every second matmul": 2}
MOST_DEPTHS = 2  # of blocks within blocks
FRACTIONS = tuple(round(0.05 * i, 2) for i in range(1, 20))
"""Fractions of memory, for baselines that take one."""
MANY_ITEMS = 5_000  # from here on torch's dp_knapsack would need a table of more than 200 MB


# Names of ops.


def is_attention(overload: str) -> bool:
    """Return True for a fused attention kernel."""
    return "attention" in overload and "backward" not in overload


def is_matmul(overload: str) -> bool:
    """Return True for a matrix product or a convolution, compute-intensive ops in torch's partitioner."""
    return overload.split(".")[1:2] in (
        ["mm"],
        ["addmm"],
        ["bmm"],
        ["baddbmm"],
        ["_scaled_mm"],
        ["_grouped_mm"],
        ["convolution"],
        ["convolution_overrideable"],
        ["cudnn_convolution"],
        ["mkldnn_convolution"],
    )


def is_random(overload: str) -> bool:
    """Return True if the op draws random numbers."""
    return any(
        word in overload for word in ("dropout", "bernoulli", "rand", "normal_", "uniform_", "exponential")
    )


# Rules of thumb.


def depths(graph: Graph) -> list[int]:
    """Return 1, 2, ... for each level of nested blocks, at most MOST_DEPTHS."""
    found = max((OpKey.parse(op.name).block_depth for op in graph.ops), default=0)
    return list(range(1, min(found, MOST_DEPTHS) + 1))


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
        f"depth {depth}": without_cost_free_recomputes(graph, boundary(graph, _blocks(graph, depth)))
        for depth in depths(graph)
    }


def attention_and_blocks(graph: Graph) -> Family:
    """Save block inputs and the outputs of attention. Return {} without attention."""
    attention = attention_outputs(graph)
    if not attention:
        return {}
    return {
        f"depth {depth}": without_cost_free_recomputes(
            graph, boundary(graph, _blocks(graph, depth)) | attention
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
        outputs = boundary(graph, _blocks(graph, depth))
        for which in EVERY:
            setting = f"{which}, depth {depth}"
            family[setting] = without_cost_free_recomputes(graph, listed(graph, setting) | outputs)
    return family


def listed(graph: Graph, setting: str) -> SaveSet:
    """Return the ops that the policy of a setting of `selective` lists."""
    which, depth = setting.split(", depth ")
    blocks, every = _blocks(graph, int(depth)), EVERY[which]
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
    blocks = _blocks(graph, int(setting.rpartition(" ")[2]))
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


# torch's knapsack.

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
    is its own op's, and memory is a fraction of the whole.
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
            _, chosen, _ = solver(memory, runtimes, fraction)
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
    """Run torch's `ilp_knapsack`, which needs scipy."""
    from torch._functorch._activation_checkpointing.knapsack import ilp_knapsack as solver

    return knapsack(graph, solver)


# One fraction for every block.


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
        blocks = _blocks(graph, depth)
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
        _sac_stats(graph, ops), min(max(fraction, 0.0), 1.0)
    )
    return [bool(d) for d in decisions] if decisions else [False] * len(ops)


def _sac_stats(graph: Graph, ops: Sequence[OpId]):  # type: ignore[no-untyped-def]  # torch's class
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


# torch's sac_milp.


@dataclass(frozen=True, slots=True)
class Module:
    """A module that runs other modules, with the ops that ran inside it."""

    name: str  # its path; "" is the model itself
    ops: tuple[OpId, ...]  # its modules' included
    within: tuple[int, ...]  # modules above it, as positions in pre-order


def module_tree(graph: Graph) -> list[Module]:
    """Return the modules that run other modules, in pre-order of their first op.

    A ModuleList is left out, since it never runs, and so is a leaf, which `sac_milp` may not choose.
    """
    inside: dict[str, list[OpId]] = {}
    own: set[str] = set()
    for op in graph.ops:
        module = OpKey.parse(op.name).module
        parts = module.split(".") if module else []
        own.add(".".join(parts))
        for i in range(len(parts) + 1):
            inside.setdefault(".".join(parts[:i]), []).append(op.id)
    children: dict[str, list[str]] = {}
    for path in inside:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)

    def is_list(path: str) -> bool:
        return path not in own and all(c.rpartition(".")[2].isdecimal() for c in children[path])

    modules: list[Module] = []
    stack: list[tuple[str, tuple[int, ...]]] = [("", ())]
    while stack:
        path, within = stack.pop()
        if path not in children:
            continue
        if not path or not is_list(path):
            modules.append(Module(path, tuple(inside[path]), within))
            within = (*within, len(modules) - 1)
        stack.extend((c, within) for c in sorted(children[path], key=lambda c: -inside[c][0]))
    return modules


def sac_milp(graph: Graph, fractions: Iterable[float] = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9)) -> Family:
    """Run torch's `sac_milp`: which modules to checkpoint, and how much of each to discard.

    torch's own function is called on a `torch.distributed._tools.ilp_utils.Graph` with numbers from our
    graph instead of from a MemTracker and a SACEstimator: activation bytes are those of storages that
    autograd saves, gradients and temporaries the most that the module's backward steps need, run times the
    profile's. The trade-off curve of a module is the estimator's greedy order
    (`SACEstimator._get_greedy_order_meta`); torch fits two lines to it with the package pwlf; here its
    convex hull is used, which fits at least as well. Within a chosen module the ops to save are from
    torch's program per module, within the memory that `sac_milp` left. HiGHS replaces CBC at the same gap
    of 5 %: CBC needs its full three minutes for each budget of an 80-layer model.

    Args:
        fractions: budgets, between static bytes and torch's estimate of saving everything.
    """
    from torch.distributed._tools import sac_ilp

    modules = module_tree(graph)
    family: Family = {}
    if len(modules) < 2:
        return family
    names = [f"m{i}" for i in range(len(modules))]  # torch finds ancestors by substrings of names
    tree = _sac_graph(graph, modules, names)
    most = max(node["act_total"] + node["act_grad_per_module"] for node in tree.nodes)
    for fraction in fractions:
        budget = (graph.static_bytes + fraction * most) / 2**30
        with mock.patch.object(sac_ilp, "PULP_CBC_CMD", _highs_for_cbc):
            found, _, peak = sac_ilp.sac_milp(tree, budget, 1)
        if peak < 0:
            continue  # no solution
        discard = {names.index(name): ratio for name, ratio in found.items()}
        unit = [""] * len(graph.ops)
        chosen: set[OpId] = set()
        for i, ratio in discard.items():
            for op in modules[i].ops:
                unit[op] = names[i]
            saves = block_policy(graph, modules[i].ops, 1 - ratio)
            chosen.update(op for op, save in zip(modules[i].ops, saves, strict=True) if save)
        family[f"budget {fraction:.2f}"] = without_cost_free_recomputes(graph, chosen | boundary(graph, unit))
    return family


def _highs_for_cbc(*, gapRel: float, timeLimit: float, msg: int) -> pulp.HiGHS:
    """Return HiGHS with the options that `sac_milp` gives to CBC, limited to a minute."""
    return pulp.HiGHS(msg=bool(msg), threads=1, gapRel=gapRel, timeLimit=min(timeLimit, 60.0))


def _sac_graph(graph: Graph, modules: Sequence[Module], names: Sequence[str]):  # type: ignore[no-untyped-def]
    from torch.distributed._tools.ilp_utils import Graph as Tree
    from torch.distributed._tools.sac_estimator import SACEstimator

    saved = [_saved_nbytes(graph, op.id) for op in graph.ops]
    so_far = [0]
    for nbytes in saved:
        so_far.append(so_far[-1] + nbytes)
    working = [0] * len(graph.ops)  # bytes of the most demanding step that unpacks an op's output
    for step in graph.steps:
        for h in step.unpacks:
            op = graph.versions[graph.saved_tensors[h].version].op
            working[op] = max(working[op], step.extra_bytes_peak)
    post = sorted(range(len(modules)), key=lambda i: (modules[i].ops[-1], -len(modules[i].within)))
    tree = Tree(len(modules))
    tree.fw_post_order = [names[i] for i in post]
    curves: dict[object, tuple[list[float], list[float]]] = {}
    for i, module in enumerate(modules):
        stats = _sac_stats(graph, module.ops)
        kind = (tuple(stats.func_names), tuple(stats.memory), tuple(stats.runtimes))
        if kind not in curves:
            order = SACEstimator._get_greedy_order_meta(None, stats)  # type: ignore[arg-type]  # no self in it
            costs = [(m.memory, m.runtime) for m in order.msps_meta]
            curves[kind] = tradeoff(costs, sum(stats.memory), sum(stats.runtimes))
        slopes, intercepts = curves[kind]
        node = {
            "fqn": names[i],
            "index": i,
            "pos_fw_post_order": post.index(i),
            "is_leaf": not sum(stats.memory) or not sum(stats.runtimes),
            "sac_memory": sum(stats.memory),
            "sac_runtime": sum(stats.runtimes),
            "act_fw_per_module": min(sum(saved[o] for o in module.ops), sum(stats.memory)),
            "act_grad_per_module": max(working[o] for o in module.ops),
            "act_total": so_far[module.ops[-1] + 1],
            "param_per_module": graph.static_bytes,  # only the root's counts
            "grad_total": 0,  # in act_grad_per_module
            "n_segments": len(slopes),
            "slopes": slopes,
            "intercepts": intercepts,
        }
        tree.add_node(node)  # type: ignore[arg-type]
        for j in module.within:
            tree.ad_matrix[j][i] = 1
    return tree


def _saved_nbytes(graph: Graph, op: OpId) -> int:
    """Return the bytes that `op` writes and autograd saves."""
    return sum(graph.nbytes(w) for w in graph.ops[op].writes if graph.versions[w].saved_tensors)


def tradeoff(
    costs: Sequence[tuple[float, float]], memory: float, runtime: float
) -> tuple[list[float], list[float]]:
    """Return slopes and intercepts of the least fraction of run time for each fraction of memory discarded.

    Args:
        costs: (bytes, run time) of ops that may be discarded, best first, as `SACEstimator` orders them.
        memory, runtime: of the whole module.

    >>> tradeoff([(6, 1), (4, 3)], 10, 4)
    ([0.4166..., 1.875], [0.0, -0.875])
    """
    if not memory or not runtime:
        return [], []
    points = [(0.0, 0.0)]
    for nbytes, us in costs:
        points.append((points[-1][0] + nbytes / memory, points[-1][1] + us / runtime))
    hull: list[tuple[float, float]] = []
    for x, y in points:
        if hull and x <= hull[-1][0]:
            continue  # takes time and frees nothing
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    slopes = [_slope(a, b) for a, b in itertools.pairwise(hull)]
    return slopes, [y - k * x for (x, y), k in zip(hull, slopes, strict=False)]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


# Minimum cut.


def minimum_cut(graph: Graph) -> Family:
    """Save the fewest bytes from which backward can recompute the rest, as AOTAutograd's partitioner does.

    "nothing banned": every op may be recomputed, so only ops that must be saved are. Bans are as in
    `torch._functorch.partitioners`: expensive ops (matmuls, convolutions, attention), random ones, and
    ops that shrink their inputs to a quarter.
    """
    overloads = [OpKey.parse(op.name).op for op in graph.ops]
    expensive = {OpId(i) for i, name in enumerate(overloads) if is_matmul(name) or is_attention(name)}
    random = {OpId(i) for i, name in enumerate(overloads) if is_random(name)}
    shrinking = {
        op.id
        for op in graph.ops
        if op.writes and 4 * nbytes_of(graph, op.id) <= sum(graph.nbytes(r) for r in op.reads)
    }
    return {
        "nothing banned": without_cost_free_recomputes(graph, cut(graph, set())),
        "expensive ops banned": without_cost_free_recomputes(graph, cut(graph, expensive)),
        "expensive, random and shrinking ops banned": without_cost_free_recomputes(
            graph, cut(graph, expensive | random | shrinking)
        ),
    }


def cut(graph: Graph, banned: set[OpId]) -> SaveSet:
    """Return the save set of the fewest bytes under which no banned op is recomputed.

    Each op is a pair of vertices; the edge between them costs the op's bytes, and cutting it saves the op.
    Edges lead from the source to banned ops, and to the sink from ops whose outputs autograd saves.
    """
    import networkx as nx

    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for op in graph.ops:
        if op.must_recompute:
            network.add_edge(("in", op.id), ("out", op.id))  # no capacity: cannot be cut
        else:
            free = bool(op.must_save)
            network.add_edge(("in", op.id), ("out", op.id), capacity=0 if free else nbytes_of(graph, op.id))
            if free or op.id in banned:
                network.add_edge("source", ("in", op.id))
        for w in op.writes:
            for r in graph.versions[w].readers:
                network.add_edge(("out", op.id), ("in", r))
            if any(graph.saved_tensors[h].unpacked for h in graph.versions[w].saved_tensors):
                network.add_edge(("out", op.id), "sink")
    _, (reached, _) = nx.minimum_cut(network, "source", "sink")
    return frozenset(op.id for op in graph.ops if ("in", op.id) in reached and ("out", op.id) not in reached)


def _blocks(graph: Graph, depth: int) -> list[str]:
    return [OpKey.parse(op.name).block(depth) for op in graph.ops]


BASELINES: dict[str, Baseline] = {
    "per-block checkpoint": per_block,
    "attention and block outputs": attention_and_blocks,
    SELECTIVE: selective,
    "dp_knapsack": dp_knapsack,
    "greedy_knapsack": greedy_knapsack,
    "ilp_knapsack": ilp_knapsack,
    "sac_milp": sac_milp,
    "uniform per-block program": uniform_blocks,
    "minimum cut": minimum_cut,
}
"""Baselines by their names in the report."""
