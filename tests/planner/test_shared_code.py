"""Test that calls of compiled graphs that share code get few different decisions."""

from __future__ import annotations

from dataclasses import replace

from graphs import chain

from autoac.planner import plan
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import DEFAULT_GAP
from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.shared_code import MOST_VARIANTS, shared_calls, with_few_variants
from autoac.planner.solver.highs import Stopped

OPS = ("linear", "gelu", "drop", "add")


def blocks(n: int) -> Graph:
    """Return `n` compiled blocks of four ops between two eager ops; the last op of a block is saved."""
    sizes, times = [64, 96, 48, 80], [9.0, 1.0, 5.0, 3.0]
    graph = chain(8, *sizes * n, 8, runtime_us=[1.0, *times * n, 1.0])
    ops = list(graph.ops)
    for i in range(4 * n):
        block, j = divmod(i, 4)
        ops[i + 1] = replace(
            ops[i + 1],
            name=f"layers.{block}.part/aten.{OPS[j]}.default#0",
            compiled=True,
            begins_graph=j == 0,
            must_save="its graph ends" if j == 3 else "",
        )
    ops[0], ops[-1] = (
        replace(op, name=f"./aten.{name}.default#0") for op, name in ((ops[0], "in"), (ops[-1], "out"))
    )
    return replace(graph, ops=tuple(ops))


def variants(graph: Graph, save_set: frozenset[OpId]) -> int:
    (calls,) = shared_calls(graph)
    return len({tuple(op in save_set for op in call) for call in calls})


def test_calls_with_the_same_ops_and_sizes_share_code() -> None:
    graph = blocks(3)
    assert shared_calls(graph) == [[(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]]
    other = replace(graph.storages[6], nbytes=1)
    changed = replace(graph, storages=(*graph.storages[:6], other, *graph.storages[7:]))
    assert shared_calls(changed) == [[(1, 2, 3, 4), (9, 10, 11, 12)]]


def test_model_compiled_as_a_whole_shares_no_code() -> None:
    graph = blocks(3)
    ops = (replace(op, begins_graph=op.id == 1) for op in graph.ops)
    assert shared_calls(replace(graph, ops=tuple(ops))) == []


def test_save_set_stays_if_no_pair_of_variants_fits() -> None:
    graph = blocks(6)
    many = graph.everything - {OpId(i) for i in (1, 6, 7, 11, 13, 14, 21)}
    assert with_few_variants(graph, many, 1) == many


def test_plan_has_few_variants_and_keeps_the_budget() -> None:
    graph = blocks(8)
    lowest = peak_bytes(graph, graph.must_save | {OpId(0), OpId(33)})
    for share in (0.2, 0.5, 0.8):
        budget = int(lowest + share * (peak_bytes(graph, graph.everything) - lowest))
        found = plan(graph, budget_bytes=budget)
        assert found.peak <= budget
        assert variants(found.graph, found.save_set) <= MOST_VARIANTS
        allowed_us = max(DEFAULT_GAP * found.recompute_us, 0.001 * found.step_us)
        is_optimal = found.recompute_us - found.bound_us <= allowed_us
        assert found.stopped is (Stopped.OPTIMAL if is_optimal else Stopped.FEW_VARIANTS)
