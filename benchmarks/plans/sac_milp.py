"""torch's `sac_milp`: which modules to checkpoint, and how much of each to discard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from unittest import mock

import pulp

from autoac.planner.formats.op_key import OpKey
from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from benchmarks.plans.block_rules import Family, boundary
from benchmarks.plans.knapsacks import block_policy, sac_stats


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
        stats = sac_stats(graph, module.ops)
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
