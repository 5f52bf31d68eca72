"""The rules of NOTE [ Rules of the schedule ], one by one, and the laws of the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import graphs
import oracles
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoac.planner import Profile, UnknownOp, bounds, build, plan, schedule, simulate
from autoac.planner.formats.profile import Ragged
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.memory.schedule import Backward, Compute, Free, OptimizerStep, Recompute, recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import Graph, SaveSet, chain
from autoac.planner.problem.save_sets import (
    recomputed_by_backward,
    with_forced_saves,
    without_cost_free_recomputes,
)

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=150, derandomize=True, deadline=None)
few = settings(max_examples=40, derandomize=True, deadline=None)


def random_graph(seed: int, most_ops: int = 7) -> Graph:
    return build(graphs.random_profile(random.Random(seed), most_ops))


def told(graph: Graph, save: set[int]) -> list[str]:
    """The events as words: `+f 8` computed, `!f 8` recomputed, `-f 8` freed, `.j` the work of step j."""
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
        ({0, 1, 2, 3, 4}, 18, 0),  # nothing recomputed: both 8-byte outputs meet
        ({0, 2, 4}, 10, 2),
        ({2, 4}, 9, 3),
        ({4}, 18, 4),  # saving nothing has a higher peak: backward recomputes everything at once
    ],
)
def test_peak_and_recompute_of_a_chain(save: set[int], peak: int, recompute: int) -> None:
    graph = chain(1, 8, 1, 8, 0)
    assert peak_bytes(graph, frozenset(save)) == peak
    assert recompute_us(graph, frozenset(save)) == recompute


def test_the_peak_of_one_tensor_of_ten_bytes_is_ten() -> None:
    assert peak_bytes(chain(10), frozenset({0})) == 10
    assert peak_bytes(chain(10), frozenset()) == 10


def test_rule_a_a_saved_value_goes_when_its_last_saved_tensor_does() -> None:
    assert told(chain(1, 8), {0, 1}) == ["+op0 1", "+op1 8", ".0", "-op1 8", ".1", "-op0 1"]


def test_rule_a_a_saved_value_is_held_for_what_is_computed_from_it() -> None:
    # Autograd packed only y; x is saved, so it is held until y's saved tensor is dropped, and no longer.
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    (y,) = tape.op("y", [x], 8)
    tape.op("z", [], 0)
    tape.op("loss", [], 0)
    h = tape.save(y)
    tape.step("first", [h])
    tape.step("second", [])
    graph = build(tape.profile())
    assert told(graph, {0, 2, 3}) == [
        "+x 4", "+y 8", "+z 0", "-y 8", "+loss 0", "-z 0", "-loss 0",
        "!y 8", ".0", "-y 8", "-x 4", ".1",
    ]  # fmt: skip


def test_rule_a_what_neither_autograd_nor_a_recompute_wants_is_not_held() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    (y,) = tape.op("y", [x], 8)
    tape.op("z", [], 0)
    tape.op("loss", [], 0)
    tape.step("first", [tape.save(y)])
    graph = build(tape.profile())
    assert told(graph, {0, 1, 2, 3})[:5] == ["+x 4", "+y 8", "+z 0", "-x 4", "+loss 0"]


def test_rule_a_a_storage_that_is_written_over_is_held_for_a_saved_tensor_of_before() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    old = tape.save(x)
    tape.op("relu_", [], into=x)
    tape.step("first", [old])
    graph = build(tape.profile())
    assert told(graph, {0, 1}) == ["+x 4", "+relu_ 0", ".0", "-relu_ 4"]


def test_rule_b_a_write_over_a_value_that_a_recompute_reads_copies_it_first() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    (y,) = tape.op("y", [x], 8)
    packed = tape.save(y)
    tape.op("relu_", [], into=x)
    tape.step("first", [packed])
    graph = build(tape.profile())
    assert told(graph, {0, 2}) == [
        "+x 4",
        "+y 8",
        "+relu_ 4",
        "-relu_ 4",
        "-y 8",
        "!y 8",
        ".0",
        "-y 8",
        "-x 4",
    ]


def test_chunks_that_are_written_in_place_share_one_storage_saved_or_made_again() -> None:
    graph = build(graphs.chunks())
    forward = ["+x 8", "+sigmoid_ 0", "+tanh_ 0", "+loss 0"]
    assert told(graph, {0, 1, 2, 3}) == [*forward, "-loss 0", ".0", ".1", "-tanh_ 8"]
    assert told(graph, {3}) == [
        *forward, "-tanh_ 8", "-loss 0",
        "!x 8", "!sigmoid_ 0", "!tanh_ 0", ".0", ".1", "-tanh_ 8",
    ]  # fmt: skip


def test_writes_to_chunks_are_saved_together() -> None:
    graph = build(graphs.chunks())
    assert with_forced_saves(graph, frozenset({2})) == {1, 2}
    assert with_forced_saves(graph, frozenset({1})) == {1, 2}
    assert with_forced_saves(graph, frozenset({3})) == {3}


def test_an_op_that_only_writes_over_saved_values_is_saved() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    (y,) = tape.op("relu_", [], into=x)
    tape.step("first", [tape.save(y)])
    graph = build(tape.profile())
    assert recompute_us(graph, frozenset({0})) == 0
    assert recompute_us(graph, frozenset()) == 2


def test_rule_c_a_burst_runs_what_the_value_needs_in_forward_order_from_what_is_saved() -> None:
    graph = chain(1, 2, 4, 8)
    events = told(graph, {0})
    assert [e for e in events if e[0] == "!"] == ["!op1 2", "!op2 4", "!op3 8"]
    assert events.index("!op3 8") < events.index(".0")


def test_rule_d_a_value_is_run_again_once_and_freed_after_its_last_use() -> None:
    graph = build(graphs.diamond())
    events = told(graph, {3})
    assert [e for e in events if e[0] in "!.-"] == [
        "-x 4", "-f 8", "-g 8", "-sum 1",
        "!x 4", "!g 8", ".0", "-g 8",  # x stays: f will read it, and backward unpacks it
        "!f 8", ".1", "-f 8",
        ".2", "-x 4",
    ]  # fmt: skip


def test_rule_d_an_output_that_nothing_uses_is_freed_as_soon_as_it_is_made() -> None:
    tape = graphs.Tape()
    a, b = tape.op("two", [], 3, 5)
    tape.op("loss", [b], 0)
    tape.step("first", [tape.save(a)])
    graph = build(tape.profile())
    assert told(graph, {1})[-4:] == ["!two 8", "-two 5", ".0", "-two 3"]


def test_rule_e_dropout_run_again_writes_into_its_own_buffer() -> None:
    graph = build(graphs.dropout())
    events = told(graph, {0, 4, 5})
    assert [e for e in events if e[0] == "!"] == ["!empty_like 10", "!bernoulli_ 0", "!div_ 0"]
    assert peak_bytes(graph, frozenset({0, 4, 5})) == 30


def test_rule_e_an_old_version_that_a_saved_tensor_shows_is_copied() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    old = tape.save(x)
    (y,) = tape.op("relu_", [], into=x)
    new = tape.save(y)
    tape.op("loss", [], 0)
    tape.step("first", [new])
    tape.step("second", [old])
    graph = build(tape.profile())
    assert [e for e in told(graph, {2}) if e[0] == "!"] == ["!x 4", "!relu_ 4"]


def test_rule_f_a_saved_tensor_that_is_never_unpacked_takes_its_use_with_it() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4, us=7)
    (y,) = tape.op("y", [x], 8, us=9)
    tape.op("z", [], 0)
    asked, unasked = tape.save(x), tape.save(y)
    tape.step("first", [asked])
    tape.step("second", [])
    tape.handle_dropped[unasked] = 2
    graph = build(tape.profile())
    events = told(graph, set())
    assert [e for e in events if e[0] == "!"] == ["!x 4"]  # y never runs
    assert events[-1] == "-x 4"  # x was kept for y until y's saved tensor was dropped
    assert recompute_us(graph, frozenset()) == 7


def test_an_unknown_op_is_an_error_that_names_it() -> None:
    with pytest.raises(UnknownOp, match="op 7 is not in this graph"):
        list(schedule(chain(1, 2), frozenset({7})))


def assert_all_is_freed(graph: Graph, save_set: SaveSet) -> None:
    """During the optimizer's step only what Python holds is live; after it, nothing of forward is."""
    instants = simulate(graph, save_set).instants
    (optimizer,) = (i for i in instants if isinstance(i.event, OptimizerStep))
    held = sum(s.nbytes for s in graph.storages if s.released >= graph.end)
    assert optimizer.live_bytes == graph.static_bytes + graph.closing_bytes + held
    after = (i.event for i in instants[instants.index(optimizer) + 1 :])
    assert held == sum(event.nbytes for event in after if isinstance(event, Free))
    assert instants[-1] is optimizer or instants[-1].live_bytes == graph.static_bytes


def test_outputs_that_python_holds_are_live_in_the_optimizer_step() -> None:
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
@given(seeds)
def test_live_bytes_return_to_what_they_were(seed: int) -> None:
    graph = random_graph(seed)
    for save_set in oracles.every_save_set(graph):
        assert_all_is_freed(graph, save_set)


@quick
@given(seeds)
def test_saving_one_more_op_never_adds_recompute_time(seed: int) -> None:
    graph = random_graph(seed)
    rng = random.Random(seed)
    save_set = frozenset(op.id for op in graph.ops if rng.random() < 0.5)
    for op in graph.ops:
        assert recompute_us(graph, save_set | {op.id}) <= recompute_us(graph, save_set)


@quick
@given(seeds)
def test_recompute_time_is_that_of_the_ops_that_run_again_each_once(seed: int) -> None:
    graph = random_graph(seed)
    for save_set in oracles.every_save_set(graph):
        again = [e.op for e in schedule(graph, save_set) if isinstance(e, Recompute)]
        assert sorted(again) == [op for op, run in enumerate(recomputed_by_backward(graph, save_set)) if run]


@quick
@given(seeds)
def test_normalising_changes_no_recompute_time(seed: int) -> None:
    graph = random_graph(seed)
    for save_set in oracles.every_save_set(graph):
        assert recompute_us(graph, without_cost_free_recomputes(graph, save_set)) == recompute_us(
            graph, save_set
        )


@quick
@given(seeds)
def test_what_is_live_at_the_peak_adds_up_to_it(seed: int) -> None:
    graph = random_graph(seed)
    for save_set in (frozenset[int](), graph.everything):
        live = live_at_peak(graph, save_set)
        assert sum(h.nbytes for h in live) == peak_bytes(graph, save_set)


def test_a_saved_tensor_that_is_unpacked_twice_is_used_up_once() -> None:
    graph = chain(4, 4)
    last = graph.saved_tensors[1]
    twice = replace(
        graph,
        saved_tensors=(graph.saved_tensors[0], replace(last, unpacked=(*last.unpacked, *last.unpacked))),
        steps=(replace(graph.steps[0], unpacks=(last.id, last.id)), graph.steps[1]),
    )
    assert told(twice, set()) == told(graph, set())


def asked_again(seed: int) -> Graph:
    """A random graph in which some saved tensors are unpacked in a second step."""
    rng = random.Random(seed)
    found = graphs.random_profile(rng, 6)
    n, rows = len(found.ops), [list(row) for row in found.backward.unpacks.rows()]
    for h, dropped in enumerate(found.saved.dropped):
        first = next((j for j, row in enumerate(rows) if h in row), len(rows))
        later = range(first + 1, dropped - n)
        if later and rng.random() < 0.5:
            rows[rng.choice(later)].append(h)
    backward = found.backward.model_copy(update={"unpacks": Ragged.of(rows)})
    return build(Profile.model_validate(found.model_copy(update={"backward": backward}).model_dump()))


@few
@given(seeds)
def test_recompute_time_is_that_of_every_run_and_all_goes_in_the_end(seed: int) -> None:
    graph = asked_again(seed)
    for save_set in oracles.every_save_set(graph):
        runs = [e.op for e in schedule(graph, save_set) if isinstance(e, Recompute)]
        assert recompute_us(graph, save_set) == sum(graph.ops[op].runtime_us for op in runs)
        assert recompute_us(graph, save_set) >= sum(op.runtime_us for op in graph.ops if op.id in runs)
        assert_all_is_freed(graph, save_set)


def test_rule_g_what_is_unpacked_again_when_it_is_gone_runs_in_passing() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    (y,) = tape.op("y", [x], 8)
    h = tape.save(y)
    tape.op("loss", [], 0)
    tape.step("first", [h])
    tape.step("second", [h])
    graph = build(tape.profile())
    assert [e for e in told(graph, {2}) if e[0] in "!."] == ["!x 4", "!y 8", ".0", "!x 4", "!y 8", ".1"]
    assert told(graph, {2})[-4:] == ["!y 8", "-x 4", ".1", "-y 8"]
    assert recompute_us(graph, frozenset({2})) == 4


@few
@given(seeds)
@example(100000001)  # an op that shares its storage with an older version, which autograd holds, follows none
def test_plans_for_what_is_unpacked_again_fit_and_their_bounds_hold(seed: int) -> None:
    graph = asked_again(seed)
    table = oracles.peaks_and_times(graph)
    for budget in sorted({peak for peak, _ in table.values()})[:2]:
        made = plan(graph, budget_bytes=max(budget, 1), gap=0.0)
        least = oracles.least_time(table, budget)
        assert least is not None
        assert made.peak <= max(budget, 1)
        assert made.bound_us <= least + 1e-6
        assert made.recompute_us == recompute_us(graph, made.save_set)
