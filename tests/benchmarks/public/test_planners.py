"""Check that every planner's schedule passes the judge, and that programs and simulator agree with it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from graph_rules import broken_graph_rules
from graphs import gpt2, random_profile

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import OpId
from benchmarks.public.check import judge
from benchmarks.public.instances import Instance, instance_of, least_bytes, save_all_peak
from benchmarks.public.lower_bound import least_again_us
from benchmarks.public.planner_graph import events_of, graph_of, step_graph_of
from benchmarks.public.planners import checkmate_program
from benchmarks.public.planners.ours import ours
from benchmarks.public.planners.published import events_of_stages
from benchmarks.public.readers import random_graphs
from benchmarks.public.run import BOUND, CHECKMATE, ONLINE, OURS, planners, rows_of
from benchmarks.public.step_graph import NoSchedule, StepGraph, StepOp, StepValue

pytestmark = pytest.mark.filterwarnings("ignore:.*PuLP 4.0:DeprecationWarning")  # torch's own calls
LAYERED = [random_graphs.layered(seed, 5) for seed in range(4)]


def overwrites_only_what_is_no_longer_read(graph):
    """Return True if a version is neither read by an op nor unpacked once another one is written over it."""
    return not any(
        reader > later.op or graph.versions[later.previous].saved_tensors
        for later in graph.versions
        if later.previous is not None
        for reader in graph.versions[later.previous].readers
    )


GRAPHS = {seed: build(random_profile(random.Random(seed))) for seed in range(40)}
PROFILES = {seed: graph for seed, graph in GRAPHS.items() if overwrites_only_what_is_no_longer_read(graph)}


def profiled(seed):
    return step_graph_of(f"profile {seed}", "test", PROFILES[seed])


def some_save_sets(graph, seed):
    draw = random.Random(seed)
    yield graph.everything
    for share in (0.8, 0.5, 0.2, 0.0):
        yield frozenset(OpId(op.id) for op in graph.ops if draw.random() < share)


@pytest.mark.parametrize("step", [*LAYERED, *map(profiled, PROFILES)], ids=lambda step: step.name)
def test_the_judge_agrees_with_the_simulator_to_the_byte(step):
    graph = graph_of(step)
    assert not broken_graph_rules(graph)
    for save_set in some_save_sets(graph, 0):
        found = judge(step.to_json(), events_of(step, save_set))
        simulated = peak_bytes(graph, save_set)
        copies = any(value.held_until for value in step.values)  # of what Python holds: see `_events`
        assert found["peak_bytes"] == simulated or (copies and found["peak_bytes"] < simulated)
        assert found["again_us"] == pytest.approx(recompute_us(graph, save_set))


@pytest.mark.parametrize("seed", PROFILES)
def test_the_step_graph_of_a_profile_saves_everything_in_at_most_its_bytes(seed):
    """It takes less where autograd drops a tensor later than after its last use."""
    graph = PROFILES[seed]
    assert len(PROFILES) > 12
    assert save_all_peak(profiled(seed)) <= peak_bytes(graph, graph.everything)


@pytest.mark.parametrize("step", LAYERED, ids=lambda step: step.name)
def test_checkmates_optimum_is_never_above_ours_nor_below_the_bound(step):
    for budget in instance_of(step).budgets:
        try:
            mine = judge(step.to_json(), ours(step, budget), budget)["us"]
        except NoSchedule:
            continue  # only with an op of forward that runs three times, or in forward again
        best = judge(step.to_json(), checkmate_program.with_cap(20)(step, budget), budget)["us"]
        assert best <= mine * (1 + 1e-4)
        assert least_again_us(step, budget) <= best - step.us + 1e-6


def test_every_planner_is_judged_and_none_breaks_a_rule():
    transformer = step_graph_of("gpt2", "test", build(gpt2(2, batch=2, length=64, width=48, vocabulary=64)))
    least, most = least_bytes(transformer), save_all_peak(transformer)
    instance = Instance(transformer, (most, least + 4 * (most - least) // 5))
    rows = list(rows_of(instance, cap_s=0.2))
    assert not [row for row in rows if row.violation or row.note.startswith("failed")]
    assert {row.planner for row in rows} == {*planners(instance, 1.0), BOUND}
    for budget in instance.budgets:
        times = {row.planner: row.again_us for row in rows if row.budget == budget}
        assert times[BOUND] == min(us for us in times.values() if us is not None)
        assert (times[BOUND] > 0) == (budget < most)
    solved = [row.planner for row in rows if row.again_us is not None and row.budget == most]
    assert set(planners(instance, 1.0)) - set(solved) <= {"published", CHECKMATE}
    assert all(row.again_us == 0 for row in rows if row.planner in (OURS, *ONLINE) and row.budget == most)
    assert all(row.again_us for row in rows if row.planner in (OURS, "DTR") and row.budget < most)


def test_the_bound_counts_what_a_recompute_needs_and_what_is_held():
    """The first op of backward reads the output of d, so a, b and c compete for the other bytes."""
    ops = [StepOp("a", 1, ()), StepOp("b", 5, (0,)), StepOp("c", 7, (1,)), StepOp("d", 1, (2,))]
    back = [StepOp("back", 1, (4 + j - 1, 3 - j) if j else (3,), repeatable=False) for j in range(4)]
    values = [StepValue(op, nbytes) for op, nbytes in enumerate((10, 10, 10, 10, 0, 0, 0, 0))]
    step = StepGraph("", "test", (*ops, *back), tuple(values), 4).checked()
    assert least_again_us(step, 40) == 0
    assert least_again_us(step, 30) == pytest.approx(1)  # a
    assert least_again_us(step, 20) == pytest.approx(1 + 5)  # a and b, from nothing
    assert least_again_us(step, 5) == math.inf
    held = replace(step, values=(*values[:2], replace(values[2], held_until=8), *values[3:]))
    assert least_again_us(held, 20) == pytest.approx(1 + 5)
    once = replace(step, ops=(replace(ops[0], repeatable=False), *ops[1:], *back))
    assert least_again_us(once, 30) == pytest.approx(5)  # b, from a


def test_online_eviction_recomputes_only_below_the_save_all_peak():
    step = random_graphs.layered(2, 12)
    most = save_all_peak(step)
    for plan in ONLINE.values():
        assert judge(step.to_json(), plan(step, most), most)["again_us"] == 0
        assert judge(step.to_json(), plan(step, most - 1), most - 1)["again_us"] > 0


def test_online_eviction_never_recomputes_what_is_not_repeatable_and_says_when_it_is_out_of_memory():
    ops = [StepOp(str(i), 1, (i - 1,) if i else (), repeatable=i != 1) for i in range(6)]
    ops += [StepOp("back", 1, (i, 5 + j) if j else (i,), repeatable=False) for j, i in enumerate((5, 3, 1))]
    values = [StepValue(op, nbytes) for op, nbytes in enumerate((10, 1, 2, 10, 10, 10, 5, 5, 5))]
    step = StepGraph("", "test", tuple(ops), tuple(values), 6).checked()
    for plan in ONLINE.values():
        assert judge(step.to_json(), plan(step, 25), 25)["again_us"] > 0
        with pytest.raises(NoSchedule, match="out of memory"):
            plan(step, 15)


def test_stages_become_events_that_free_after_the_last_read():
    ops = (StepOp("a", 1, ()), StepOp("b", 1, (0,)), StepOp("c", 1, (0, 1)))
    step = StepGraph("", "test", ops, (StepValue(0, 1), StepValue(1, 1)), 2)
    stages = [({0}, set()), ({1}, {0}), ({0, 2}, {1})]
    assert events_of_stages(step, stages) == [
        *(("compute", 0), ("compute", 1), ("free", 0)),
        *(("compute", 0), ("compute", 2), ("free", 0), ("free", 1)),
    ]
