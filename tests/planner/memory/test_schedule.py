"""Check each rule of NOTE [ Rules of the schedule ], then the laws of the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import graphs
import oracles
import pytest
from graphs import chain
from hypothesis import example, given, settings

from autoac.planner import Profile, UnknownOp, bounds, build, plan, schedule, simulate
from autoac.planner.formats.profile import Ragged
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.memory.schedule import Backward, Compute, Free, OptimizerStep, Recompute, recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.problem.save_sets import (
    recomputed_by_backward,
    with_forced_saves,
    without_cost_free_recomputes,
)

quick = settings(max_examples=150, derandomize=True, deadline=None)
few = settings(max_examples=40, derandomize=True, deadline=None)


def event_words(graph: Graph, save: set[int]) -> list[str]:
    """Return the events as words: `+f 8` computes, `!f 8` recomputes, `-f 8` frees, `.j` works in step j."""
    names = [op.name.split("/")[-1].split("#")[0] for op in graph.ops]
    words = []
    for event in schedule(graph, frozenset(save)):
        match event:
            case Compute(op, nbytes):
                words.append(f"+{names[op]} {nbytes}")
            case Recompute(op, nbytes, _):
                words.append(f"!{names[op]} {nbytes}")
            case Free(value, nbytes):
                words.append(f"-{names[graph.versions[value].op]} {nbytes}")
            case Backward(step):
                words.append(f".{step}")
    return words


@pytest.mark.parametrize(
    ("save", "peak", "recompute"),
    [
        ({0, 1, 2, 3, 4}, 18, 0),  # nothing is recomputed: both 8-byte outputs are live at once
        ({0, 2, 4}, 10, 2),
        ({2, 4}, 9, 3),
        ({4}, 18, 4),  # saving nothing has a higher peak: backward recomputes everything at once
    ],
)
def test_peak_and_recompute_of_a_chain(save: set[int], peak: int, recompute: int) -> None:
    graph = chain(1, 8, 1, 8, 0)
    assert peak_bytes(graph, frozenset(save)) == peak
    assert recompute_us(graph, frozenset(save)) == recompute


def test_ops_that_write_to_chunks_of_one_storage_are_saved_together() -> None:
    graph = build(graphs.chunks())
    assert with_forced_saves(graph, frozenset({2})) == {1, 2}
    assert with_forced_saves(graph, frozenset({1})) == {1, 2}
    assert with_forced_saves(graph, frozenset({3})) == {3}


def test_op_that_only_writes_over_saved_versions_is_saved() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    (y,) = tape.op("relu_", [], into=x)
    tape.step("first", [tape.save(y)])
    graph = build(tape.profile())
    assert recompute_us(graph, frozenset({0})) == 0
    assert recompute_us(graph, frozenset()) == 2


def test_error_for_an_unknown_op_names_the_op() -> None:
    with pytest.raises(UnknownOp, match="op 7 is not in this graph"):
        list(schedule(chain(1, 2), frozenset({7})))


def assert_everything_is_freed(graph: Graph, save_set: SaveSet) -> None:
    """Assert that the optimizer step has only storages that Python holds, and that these are freed later."""
    instants = simulate(graph, save_set).instants
    (optimizer,) = (i for i in instants if isinstance(i.event, OptimizerStep))
    held = sum(s.nbytes for s in graph.storages if s.released >= graph.end)
    assert optimizer.live_bytes == graph.static_bytes + graph.closing_bytes + held
    after = (i.event for i in instants[instants.index(optimizer) + 1 :])
    assert held == sum(event.nbytes for event in after if isinstance(event, Free))
    assert instants[-1] is optimizer or instants[-1].live_bytes == graph.static_bytes


def test_outputs_held_by_python_are_live_in_the_optimizer_step() -> None:
    tape = graphs.Tape(static=100, gradients=1000)
    (x,) = tape.op("x", [], 4)
    (out,) = tape.op("out", [x], 8)
    tape.released[tape.value_storage[out]] = 3  # the end: 2 ops, 1 step
    tape.step("first", [tape.save(x)])
    graph = build(tape.profile())
    assert list(schedule(graph, graph.everything))[-3:] == [Free(x, 4), OptimizerStep(), Free(out, 8)]
    assert peak_bytes(graph, frozenset({0, 1})) == 100 + 1000 + 8
    assert bounds(graph).floor == 1108


@quick
@given(graphs.seeds)
def test_live_bytes_return_to_the_static_bytes(seed: int) -> None:
    graph = graphs.random_graph(seed)
    for save_set in oracles.every_save_set(graph):
        assert_everything_is_freed(graph, save_set)


@quick
@given(graphs.seeds)
def test_each_op_that_backward_needs_is_recomputed_once(seed: int) -> None:
    graph = graphs.random_graph(seed)
    for save_set in oracles.every_save_set(graph):
        again = [e.op for e in schedule(graph, save_set) if isinstance(e, Recompute)]
        assert sorted(again) == [op for op, run in enumerate(recomputed_by_backward(graph, save_set)) if run]


@quick
@given(graphs.seeds)
def test_saving_ops_without_recomputes_keeps_the_recompute_time(seed: int) -> None:
    graph = graphs.random_graph(seed)
    for save_set in oracles.every_save_set(graph):
        assert recompute_us(graph, without_cost_free_recomputes(graph, save_set)) == recompute_us(
            graph, save_set
        )


@quick
@given(graphs.seeds)
def test_bytes_live_at_the_peak_add_up_to_the_peak(seed: int) -> None:
    graph = graphs.random_graph(seed)
    for save_set in (frozenset[int](), graph.everything):
        live = live_at_peak(graph, save_set)
        assert sum(h.nbytes for h in live) == peak_bytes(graph, save_set)


def test_second_unpack_in_a_step_consumes_no_use() -> None:
    graph = chain(4, 4)
    last = graph.saved_tensors[1]
    twice = replace(
        graph,
        saved_tensors=(graph.saved_tensors[0], replace(last, unpacked=(*last.unpacked, *last.unpacked))),
        steps=(replace(graph.steps[0], unpacks=(last.id, last.id)), graph.steps[1]),
    )
    assert event_words(twice, set()) == event_words(graph, set())


def twice_unpacked_graph(seed: int) -> Graph:
    """Return a random graph in which a second step unpacks some of the saved tensors again."""
    rng = random.Random(seed)
    profile = graphs.random_profile(rng, 6)
    n, rows = len(profile.ops), [list(row) for row in profile.backward.unpacks.rows()]
    for h, dropped in enumerate(profile.saved.dropped):
        first = next((j for j, row in enumerate(rows) if h in row), len(rows))
        later = range(first + 1, dropped - n)
        if later and rng.random() < 0.5:
            rows[rng.choice(later)].append(h)
    backward = profile.backward.model_copy(update={"unpacks": Ragged.of(rows)})
    return build(Profile.model_validate(profile.model_copy(update={"backward": backward}).model_dump()))


@few
@given(graphs.seeds)
def test_repeated_recomputes_count_in_recompute_time_and_are_freed(seed: int) -> None:
    graph = twice_unpacked_graph(seed)
    for save_set in oracles.every_save_set(graph):
        runs = [e.op for e in schedule(graph, save_set) if isinstance(e, Recompute)]
        assert recompute_us(graph, save_set) == sum(graph.ops[op].runtime_us for op in runs)
        assert recompute_us(graph, save_set) >= sum(op.runtime_us for op in graph.ops if op.id in runs)
        assert_everything_is_freed(graph, save_set)


def test_rule_g_second_unpack_of_a_freed_version_recomputes_temporarily() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    (y,) = tape.op("y", [x], 8)
    h = tape.save(y)
    tape.op("loss", [], 0)
    tape.step("first", [h])
    tape.step("second", [h])
    graph = build(tape.profile())
    words = event_words(graph, {2})
    assert [w for w in words if w[0] in "!."] == ["!x 4", "!y 8", ".0", "!x 4", "!y 8", ".1"]
    assert words[-4:] == ["!y 8", "-x 4", ".1", "-y 8"]
    assert recompute_us(graph, frozenset({2})) == 4


@few
@given(graphs.seeds)
@example(100000001)  # an op shares its storage with an older version that autograd holds
def test_plans_for_repeated_unpacks_fit_and_their_bounds_hold(seed: int) -> None:
    graph = twice_unpacked_graph(seed)
    table = oracles.peaks_and_times(graph)
    for budget in sorted({peak for peak, _ in table.values()})[:2]:
        made = plan(graph, budget_bytes=max(budget, 1), gap=0.0)
        least = oracles.least_time(table, budget)
        assert made.peak <= max(budget, 1)
        assert made.bound_us <= least + 1e-6
        assert made.recompute_us == recompute_us(graph, made.save_set)
