"""The minimum cut of AOTAutograd's partitioner."""

from __future__ import annotations

from autoac.planner.formats.op_key import OpKey
from autoac.planner.problem.graph import Graph, OpId, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from benchmarks.plans.block_rules import Family
from benchmarks.plans.knapsacks import nbytes_of
from benchmarks.plans.op_kinds import is_attention, is_matmul, is_random


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
