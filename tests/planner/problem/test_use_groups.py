"""Test graphs with use groups: who uses which run, and what saved runs mean."""

from __future__ import annotations

import random
from dataclasses import replace

import oracles
import pytest
from graph_rules import broken_graph_rules
from graphs import chain_tape

from autoac.planner.errors import InfeasibleBudget
from autoac.planner.memory.schedule import Recompute, recompute_us, schedule
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import plan
from autoac.planner.problem.build import build
from autoac.planner.problem.distant_uses import distant_uses
from autoac.planner.problem.graph import Graph, Moment, OpId
from autoac.planner.problem.use_groups import joined, later_runs, with_use_groups
from autoac.planner.report.summary import explain
from autoac.planner.solver.highs import Stopped
from autoac.planner.solver.recompute_windows import canonical, find_windows
from autoac.planner.solver.variables import Options


def skip(n: int, nbytes: int = 8) -> Graph:
    """Return a chain whose op 1 is also read by its last op: its first use in backward, and its last."""
    tape = chain_tape(1, nbytes, *[2] * (n - 2), runtime_us=[20.0, 1.0, *[20.0] * (n - 3), 1.0])
    tape.reads[-1].insert(0, 1)
    tape.released[1] = n
    return build(tape.profile())


def test_each_run_serves_the_uses_up_to_its_position() -> None:
    graph = with_use_groups(skip(6), {OpId(1): (OpId(5), OpId(2))})
    assert [op.name for op in graph.ops[1:3]] == ["m/test.op#1", "m/test.op#1@2"]
    first, second = (graph.versions[graph.ops[run].writes[0]] for run in (1, 2))
    assert [graph.ops[r].name for r in first.readers] == ["m/test.op#5"]
    assert [graph.ops[r].name for r in second.readers] == ["m/test.op#2"]
    assert second.saved_tensors == (1,)
    assert not broken_graph_rules(graph)


def test_op_runs_once_for_each_group_and_is_freed_in_between() -> None:
    base = skip(6)
    saved = frozenset(OpId(i) for i in (0, 2, 3, 4))
    graph = with_use_groups(base, {OpId(1): (OpId(5), OpId(2))})
    apart = frozenset(OpId(op + (op > 1)) for op in saved)
    runs = [graph.ops[e.op].name for e in schedule(graph, apart) if isinstance(e, Recompute)]
    assert runs == ["m/test.op#1", "m/test.op#5", "m/test.op#1@2"]
    assert recompute_us(graph, apart) == recompute_us(base, saved) + 1.0


def test_saved_runs_mean_the_graph_without_use_groups() -> None:
    chance, base = random.Random(3), skip(9)
    graph = with_use_groups(base, {OpId(1): (OpId(8), OpId(2), OpId(1)), OpId(4): (OpId(5), OpId(4))})
    others = later_runs(graph)
    ids = [op.id for op in graph.ops if op.id not in others]
    for _ in range(30):
        saved = frozenset(op.id for op in base.ops if chance.random() < 0.5)
        same = frozenset(ids[op] for op in saved) | others
        assert peak_bytes(graph, same) == peak_bytes(base, saved)
        assert recompute_us(graph, same) == recompute_us(base, saved)
        assert not broken_graph_rules(joined(graph, same))


@pytest.mark.parametrize(
    ("nbytes", "step_bytes", "groups"),
    [
        (2, (0, 10, 10, 0, 0), {1: (4, 2), 2: (4, 2), 3: (4, 3)}),
        (8, (0, 0, 10, 10, 0), {1: (3, 2), 2: (4, 2), 3: (4, 3)}),
        (8, (30, 0, 30, 30, 0, 0), {1: (2, 1), 2: (5, 4), 3: (5, 3)}),
        (8, (10, 10, 30, 30, 0, 0), {2: (5, 4), 3: (5, 3), 4: (5, 4)}),
    ],
)
def test_nothing_is_kept_of_a_run_that_nothing_needs(
    nbytes: int, step_bytes: tuple[int, ...], groups: dict[int, tuple[int, ...]]
) -> None:
    # Else the canonical form loses save sets, and a bound that is proven for it is wrong for them.
    base = skip(len(step_bytes), nbytes)
    steps = (replace(step, extra_bytes_peak=peak) for step, peak in zip(base.steps, step_bytes, strict=True))
    runs = {OpId(op): (OpId(first), OpId(second)) for op, (first, second) in groups.items()}
    graph = with_use_groups(replace(base, steps=tuple(steps)), runs)
    windows = find_windows(graph)
    for save_set in oracles.every_save_set(graph):
        plain = canonical(windows, save_set)
        assert recompute_us(graph, plain) <= recompute_us(graph, save_set)
        assert peak_bytes(graph, plain) <= peak_bytes(graph, save_set)


def narrow_in_the_middle(n: int) -> Graph:
    """Return a skip connection around a step of backward that leaves no room for it."""
    base = skip(n)
    ops = (*base.ops[:-1], replace(base.ops[-1], must_recompute=True))  # so that its step needs op 1
    steps = list(base.steps)
    steps[n // 2] = replace(steps[n // 2], extra_bytes_peak=40)
    return replace(base, ops=ops, steps=tuple(steps))


@pytest.mark.parametrize("work", [0.005, 0.0116, 0.02, 0.05, 0.1, 0.3])
def test_plan_is_optimal_only_if_the_search_with_use_groups_was_not_cut_short(work: float) -> None:
    graph = narrow_in_the_middle(30)
    budget = peak_bytes(graph, graph.everything) - 2
    made = plan(graph, budget_bytes=budget, work_limit=work)
    best_us = plan(graph, budget_bytes=budget).recompute_us
    assert (made.stopped is Stopped.OPTIMAL) == (made.recompute_us == best_us)
    assert made.stopped is not Stopped.OPTIMAL or "stopped early" not in explain(made)


def test_plan_recomputes_a_skip_connection_twice_where_once_does_not_fit() -> None:
    graph = narrow_in_the_middle(12)
    assert distant_uses(graph) == {OpId(1): (OpId(11), OpId(2), OpId(1))}
    once = frozenset(OpId(i) for i in range(11) if i != 1)
    budget = peak_bytes(graph, once) - 8
    with pytest.raises(InfeasibleBudget):
        plan(graph, budget_bytes=budget, options=Options(use_groups=False))
    made = plan(graph, budget_bytes=budget)
    assert made.peak <= budget
    assert [graph.ops[2].name, made.graph.ops[2].name] == ["m/test.op#2", "m/test.op#1@2"]
    assert made.recompute_us == 2 * 1.0 + 1.0  # op 1 twice, and the last op


def test_dear_ops_may_have_groups_where_a_backward_inside_of_forward_lies_between_its_uses() -> None:
    graph = skip(12)
    ops = tuple(replace(op, runtime_us=400.0) if op.id == 1 else op for op in graph.ops)
    dear = replace(graph, ops=ops)
    assert not distant_uses(dear)
    saved = tuple(replace(h, needed_until=Moment(8)) if h.version == 7 else h for h in graph.saved_tensors)
    assert distant_uses(replace(dear, saved_tensors=saved))
