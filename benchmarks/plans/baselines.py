"""What else decides which ops run again: each baseline as a function from a Graph to save sets.

A baseline gives a *family*: a save set for each of its settings (a depth of blocks, a fraction of memory).
Its own idea of memory and time ends there; `planner.simulate` says what each save set really takes, under
the rules that ours is judged by. For all but one that is in the baselines' favour: under the runtime's lazy
rules an op outside the save set runs again only if something needs it. A selective policy of
`torch.utils.checkpoint` is judged as torch runs it (`as_run`).

Every save set is completed (`without_cost_free_recomputes`): what must be saved is, and saving what nothing
asks for costs nothing.
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
"""Of memory, for the baselines that are given one."""
MANY_ITEMS = 5_000  # from here on torch's dp_knapsack would need a table of more than 200 MB


# Names of ops.


def is_attention(overload: str) -> bool:
    """A fused attention kernel."""
    return "attention" in overload and "backward" not in overload


def is_matmul(overload: str) -> bool:
    """A matrix product or a convolution: what torch's partitioner calls compute-intensive."""
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
    """Draws from a generator."""
    return any(
        word in overload for word in ("dropout", "bernoulli", "rand", "normal_", "uniform_", "exponential")
    )


# People's rules.


def depths(graph: Graph) -> list[int]:
    """How many numbers deep blocks are nested, outermost first; no more than MOST_DEPTHS."""
    found = max((OpKey.parse(op.name).block_depth for op in graph.ops), default=0)
    return list(range(1, min(found, MOST_DEPTHS) + 1))


def boundary(graph: Graph, blocks: Sequence[str]) -> SaveSet:
    """What `torch.utils.checkpoint` around each block keeps: outputs read by another block, all outside.

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
    """`torch.utils.checkpoint` around every block: its inputs are saved and nothing inside."""
    return {
        f"depth {depth}": without_cost_free_recomputes(graph, boundary(graph, _blocks(graph, depth)))
        for depth in depths(graph)
    }


def attention_and_blocks(graph: Graph) -> Family:
    """Block inputs and what attention returns. Empty where nothing looks like attention."""
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
    """Fused attention kernels, else the first batched matmul after each softmax."""
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
    """torch's selective list: checkpoint around each block, with matmuls and attention as the policy.

    As `create_selective_checkpoint_contexts` takes it. "Every second" saves the first, third, ... matmul of
    each block, as torchtitan's `selective` option does (torchtitan/distributed/activation_checkpoint.py).
    Empty where there are no blocks. What these take is judged on the graph of `as_run`.
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
    """A graph and a save set that take what the baseline's takes; only selective checkpoint differs.

    `torch.utils.checkpoint` with a policy is not lazy. The first unpack in a block runs the whole block
    again, up to its last saved tensor: here every saved tensor of a block is unpacked in that step too. And
    what the policy saves is held until then, even if backward asks for none of it: here as bytes that
    belong to no storage.
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
"""As in torch: memory, run times, capacity -> run time saved, items to save, items to recompute."""


def knapsack_items(graph: Graph, *, packed_only: bool) -> list[OpId]:
    """Ops among which a knapsack chooses: what backward may ask for, with bytes, and free to drop.

    Args:
        packed_only: only those of which autograd keeps an output; all others run again.
    """
    asked = may_be_recomputed(graph, frozenset())
    return [
        op.id
        for op in graph.ops
        if asked[op.id]
        and not op.must_save
        and not op.must_recompute
        and nbytes_of(graph, op.id)
        and (not packed_only or any(graph.versions[w].saved_tensors for w in op.writes))
    ]


def nbytes_of(graph: Graph, op: OpId) -> int:
    """Bytes of all that `op` writes."""
    return sum(graph.nbytes(w) for w in graph.ops[op].writes)


def knapsack(graph: Graph, solver: Knapsack, fractions: Iterable[float] = FRACTIONS) -> Family:
    """The save sets of a knapsack: the most run time saved within a fraction of the candidates' bytes.

    Two sets of candidates are tried: what autograd keeps ("packed"), and everything that backward may
    ask for ("all"). As torch does (`_optimize_runtime_with_given_memory`), an item's run time is its own
    op's, and memory is a fraction of the whole.
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
    """torch's `dp_knapsack`, in its variant of linear memory where the table would be too large."""
    from torch._functorch._activation_checkpointing import knapsack as torchs

    large = len(graph.ops) > MANY_ITEMS
    return knapsack(graph, torchs.dp_knapsack_sliding_hirschberg if large else torchs.dp_knapsack)


def greedy_knapsack(graph: Graph) -> Family:
    """torch's `greedy_knapsack`."""
    from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack as solver

    return knapsack(graph, solver)


def ilp_knapsack(graph: Graph) -> Family:
    """torch's `ilp_knapsack`, which needs scipy."""
    from torch._functorch._activation_checkpointing.knapsack import ilp_knapsack as solver

    return knapsack(graph, solver)


# One fraction for every block.


def uniform_blocks(graph: Graph, fractions: Iterable[float] = FRACTIONS) -> Family:
    """A program for each kind of block, at one fraction of its memory: xformers' selective checkpointing.

    The policy of a block comes from torch's own copy of it,
    `torch.distributed._tools.sac_ilp.get_optimal_checkpointing_policy_per_module`: the most run time
    saved within a fraction of the bytes of the block's ops, random ops all or none, an in-place op with
    what it writes over. Block inputs are saved, since each block is under checkpoint. A kind of block is
    what has the same ops, bytes and run times; each is solved once.

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
    """Which of a block's ops torch's program per module saves, at a fraction of their bytes."""
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
        if previous:  # torch pairs it with its parent, or with itself where that is outside the module
            head = graph.versions[previous[0]].op
            while (before := _overwrites(graph, head)) is not None and before in at:
                head = before
            inplace.append((at[o], at.get(head, at[o])))
    return SACStats(
        func_names=names,
        runtimes=[graph.ops[o].runtime_us / 1000 for o in ops],
        memory=[nbytes_of(graph, o) for o in ops],
        view_like_ops=[],  # a profile lists none
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
    """A module that runs other modules, with the ops that ran within it."""

    name: str  # its path; "" is the model itself
    ops: tuple[OpId, ...]  # its modules' included
    within: tuple[int, ...]  # modules above it, as positions in pre-order


def module_tree(graph: Graph) -> list[Module]:
    """The modules that run other modules, in pre-order of their first op.

    A ModuleList never runs, so it is none; nor is a leaf, which `sac_milp` may not choose.
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
    """torch's `sac_milp`: which modules to checkpoint and how much of each to discard.

    torch's own function is called, on a `torch.distributed._tools.ilp_utils.Graph` whose numbers are read
    from ours instead of from a MemTracker and a SACEstimator: activation bytes are those of storages that
    autograd keeps, gradients and temporaries the most that the module's backward steps need, run times
    the profile's. The trade-off curve of a module is the estimator's greedy order
    (`SACEstimator._get_greedy_order_meta`); torch fits two straight pieces to it with the package pwlf,
    here its convex hull stands for them, which is never a worse fit. Within a chosen module the ops to save
    come from torch's program per module, at what `sac_milp` left of its memory. HiGHS solves it in place of
    CBC, with the same gap of 5 %: CBC needs its full three minutes for each budget of an 80-layer model.

    Args:
        fractions: budgets, between its static bytes and what it thinks that saving everything takes.
    """
    from torch.distributed._tools import sac_ilp

    modules = module_tree(graph)
    family: Family = {}
    if len(modules) < 2:
        return family
    names = [f"m{i}" for i in range(len(modules))]  # torch tells ancestors from substrings of names
    tree = _sac_graph(graph, modules, names)
    most = max(node["act_total"] + node["act_grad_per_module"] for node in tree.nodes)
    for fraction in fractions:
        budget = (graph.static_bytes + fraction * most) / 2**30
        with mock.patch.object(sac_ilp, "PULP_CBC_CMD", _highs_for_cbc):
            found, _, peak = sac_ilp.sac_milp(tree, budget, 1)
        if peak < 0:
            continue  # its model has no solution
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
    """What `sac_milp` asks of CBC, from HiGHS, in a minute at most."""
    return pulp.HiGHS(msg=bool(msg), threads=1, gapRel=gapRel, timeLimit=min(timeLimit, 60.0))


def _sac_graph(graph: Graph, modules: Sequence[Module], names: Sequence[str]):  # type: ignore[no-untyped-def]
    from torch.distributed._tools.ilp_utils import Graph as Tree
    from torch.distributed._tools.sac_estimator import SACEstimator

    kept = [_kept_nbytes(graph, op.id) for op in graph.ops]
    so_far = [0]
    for nbytes in kept:
        so_far.append(so_far[-1] + nbytes)
    working = [0] * len(graph.ops)  # the most that the steps need which unpack an op's outputs
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
            "act_fw_per_module": min(sum(kept[o] for o in module.ops), sum(stats.memory)),
            "act_grad_per_module": max(working[o] for o in module.ops),
            "act_total": so_far[module.ops[-1] + 1],
            "param_per_module": graph.static_bytes,  # the root's is what counts
            "grad_total": 0,  # in act_grad_per_module
            "n_segments": len(slopes),
            "slopes": slopes,
            "intercepts": intercepts,
        }
        tree.add_node(node)  # type: ignore[arg-type]
        for j in module.within:
            tree.ad_matrix[j][i] = 1
    return tree


def _kept_nbytes(graph: Graph, op: OpId) -> int:
    """Bytes of what `op` writes and autograd keeps."""
    return sum(graph.nbytes(w) for w in graph.ops[op].writes if graph.versions[w].saved_tensors)


def tradeoff(
    costs: Sequence[tuple[float, float]], memory: float, runtime: float
) -> tuple[list[float], list[float]]:
    """Slopes and intercepts of the least share of run time at each share of memory discarded.

    Args:
        costs: (bytes, run time) of what may be discarded, best first, as `SACEstimator` orders it.
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
    """The fewest bytes from which backward's values can be made again, as AOTAutograd's partitioner cuts.

    "nothing banned": any op may run again, so that everything follows from parameters and batch, and the
    cut is empty but for what must be saved. Bans as in `torch._functorch.partitioners`: expensive ops
    (matmuls, convolutions, attention), random ones, and ops that shrink what they read to a quarter.
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
    """The save set of least bytes such that no banned op runs again.

    Vertices are ops, split in two; the edge between the halves is cut when the op is saved and costs its
    bytes. The source reaches what is banned, the sink is reached from what autograd keeps.
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
"""Every baseline by its name in the report."""
