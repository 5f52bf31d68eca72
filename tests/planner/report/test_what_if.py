"""Check why an op is saved or recomputed, and what more memory saves, against the simulator."""

from __future__ import annotations

import random

import graphs
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoac.planner import (
    OtherProfile,
    Plan,
    Profile,
    UnknownKey,
    bounds,
    build,
    find_minimum_peak,
    more,
    more_in_words,
    plan,
    simulate,
    why,
    why_in_words,
)
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.problem.graph import Graph, chain
from autoac.planner.problem.save_sets import (
    recomputed_by_backward,
    with_forced_saves,
    without_cost_free_recomputes,
)
from autoac.planner.report.by_module import Decision, op_decisions
from autoac.planner.report.what_if import as_planned, carried, find_op, marginal

seeds = st.integers(0, 2**32 - 1)
laws = settings(max_examples=40, derandomize=True, deadline=None)


def some_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    graph = build(graphs.random_profile(rng, 6))
    peaks = sorted({peak for peak, _ in oracles.peaks_and_times(graph).values()})
    return plan(graph, budget_bytes=max(rng.choice(peaks), 1), gap=0.0)


@laws
@given(seeds)
def test_opposite_decision_has_the_simulated_peak_and_time(seed: int) -> None:
    made = some_plan(seed)
    graph = made.graph
    for op, row in zip(graph.ops, op_decisions(graph, made.save_set), strict=True):
        answer = why(made, op.name)
        assert (answer.fate, answer.planned_peak) == (row.decision, made.peak)
        assert answer.gain_us == pytest.approx(made.recompute_us - answer.recompute_us)
        assert answer.key in why_in_words(answer)
        if row.decision is Decision.RECOMPUTED and not op.must_recompute:
            # One more saved op never costs time, and if it fits it gains none: the plan is the fastest.
            assert answer.gain_us >= 0
            assert not answer.fits or answer.gain_us == pytest.approx(0)
        if row.decision is Decision.SAVED and not op.must_save:
            assert answer.gain_us <= 0
            assert answer.fits == (answer.peak <= made.budget)


@pytest.mark.parametrize("op", ["sigmoid_", "tanh_"])
def test_chunks_that_are_written_in_place_are_judged_together(op: str) -> None:
    graph = build(graphs.chunks())
    answer = why(plan(graph, budget_bytes=100), op)
    assert answer.recompute_us == recompute_us(graph, frozenset({3})) == 3


@laws
@given(seeds)
def test_plan_keeps_exactly_its_save_set(seed: int) -> None:
    made = some_plan(seed)
    graph = made.graph
    kept = {
        op.id
        for op, d in zip(graph.ops, op_decisions(graph, made.save_set), strict=True)
        if d.decision is Decision.SAVED
    }
    alone = without_cost_free_recomputes(graph, kept)
    assert simulate(graph, alone).peak.live_bytes == made.peak
    assert recompute_us(graph, alone) == made.recompute_us


def test_saving_the_dropped_op_of_the_greedy_trap_costs_its_bytes() -> None:
    made = plan(graphs.greedy_trap(), budget_bytes=10)
    answer = why(made, "m/a#0")
    assert answer.fate is Decision.RECOMPUTED
    assert (answer.peak, answer.gain_us, answer.fits) == (16, 3.0, False)
    text = why_in_words(answer)
    assert "m/a#0 is recomputed in backward." in text
    assert "recompute 3 us less (0 us in all)" in text
    assert "The peak would be 16 B (planned: 10 B)" in text
    assert "6 B over the budget of 10 B" in text


def test_dropping_a_saved_op_reports_freed_bytes_and_cost() -> None:
    made = plan(graphs.greedy_trap(), budget_bytes=16)
    answer = why(made, "b")
    assert (answer.fate, answer.gain_us, answer.at_peak_bytes) == (Decision.SAVED, -2.0, -5)
    assert "With it recomputed, backward would recompute 2 us more (2 us in all)." in why_in_words(answer)


def test_op_that_must_be_saved_has_its_reason() -> None:
    tape = graphs.Tape()
    (v,) = tape.op("rand", [], 4, must="random")
    tape.op("loss", [v], 0)
    tape.step("step", [tape.save(v)])
    made = plan(tape.profile(), budget_bytes=100)
    assert why_in_words(why(made, "rand")) == "m/rand#0 is saved. It must be saved: random."


def test_follower_names_its_leader() -> None:
    made = plan(build(graphs.dropout()), budget_bytes=30)
    answer = why(made, "empty_like")
    assert answer.follows == "m/div_#0"


def test_a_chain_of_writes_in_place_is_dropped_together() -> None:
    made = plan(build(graphs.dropout()), budget_bytes=1000)
    answer = why(made, "div_")
    assert answer.fate is Decision.SAVED
    assert answer.recompute_us == 9.0  # x, empty_like, bernoulli_, div_: nothing before the mask is kept


def test_unknown_key_suggests_similar_keys() -> None:
    graph = build(graphs.gpt2(2))
    assert graph.ops[find_op(graph, "h.1.mlp.act/aten.tanh.default")].name.startswith("transformer.h.1.mlp")
    with pytest.raises(UnknownKey) as caught:
        find_op(graph, "aten.tanh.default")
    assert caught.value.near == tuple(f"transformer.h.{i}.mlp.act/aten.tanh.default#0" for i in (0, 1))
    with pytest.raises(UnknownKey, match=r"transformer\.h\.1\.mlp\.act/aten\.tanh\.default#0"):
        find_op(graph, "transformer.h.1.mlp.act/aten.tan.default#0")
    with pytest.raises(UnknownKey, match="a policy lists all keys"):
        find_op(chain(1, 2), "softmax")


def test_more_memory_saves_what_a_new_plan_saves_and_nothing_above_the_ceiling() -> None:
    graph = build(graphs.gpt2(2))
    known = bounds(graph)
    made = plan(graph, budget_bytes=find_minimum_peak(graph).found)
    some = more(made, (known.ceiling - made.budget) // 2)
    assert some.plan is not None
    assert some.gain_us == pytest.approx(made.recompute_us - some.plan.recompute_us)
    assert some.gain_us > 0
    assert some.peak <= some.larger < known.ceiling
    assert some.next is not None
    assert some.next.gain_us > 0
    everything = more(made, 1 << 40)
    assert (everything.larger, everything.recompute_us_then) == (known.ceiling, 0.0)
    assert "the ceiling" in more_in_words(everything)
    assert some.next.key in more_in_words(some)


def test_more_memory_saves_nothing_if_nothing_is_recomputed() -> None:
    made = plan(chain(1, 8, 1), budget_bytes=100)
    assert more(made).plan is None
    assert marginal(made) is None
    assert more_in_words(more(made)) == "More memory saves no time: nothing is recomputed."
    with pytest.raises(ValueError, match="positive"):
        more(made, 0)


def test_more_uses_the_planning_argument() -> None:
    asked = []

    def planning(subject: Profile | Graph, budget: int) -> Plan:
        asked.append(budget)
        return plan(subject, budget_bytes=budget)

    made = plan(graphs.greedy_trap(), budget_bytes=10)
    bought = more(made, 3, planning=planning)
    assert asked == [13]
    assert bought.gain_us == 1.0  # a (3 us) is dropped at 10 bytes, b or c (2 us) at 13


@laws
@given(seeds)
def test_marginal_op_is_the_best_single_op(seed: int) -> None:
    made = some_plan(seed)
    graph = made.graph
    found = marginal(made, tried=100)
    rates = []
    for op in made.recompute_set:
        answer = why(made, graph.ops[op].name)
        if answer.gain_us > 0:
            rates.append(answer.gain_us / max(answer.peak - made.peak, 1))
    assert (found is None) == (not rates)
    if found is not None:
        assert found.gain_us / max(found.extra_bytes, 1) == pytest.approx(max(rates))


def test_policy_and_its_profile_rebuild_the_plan() -> None:
    profile = graphs.gpt2(2)
    known = bounds(build(profile))
    made = plan(profile, budget_bytes=(known.floor + known.ceiling) // 2)
    again = as_planned(made.policy(), profile)
    assert (again.peak, again.peak_at, again.recompute_us) == (made.peak, made.peak_at, made.recompute_us)
    assert (again.recompute_set, again.bound_us) == (made.recompute_set, made.bound_us)
    assert again.policy() == made.policy()
    with pytest.raises(OtherProfile, match="not made for this profile of gpt2-3"):
        as_planned(made.policy(), graphs.gpt2(3))


def test_words_never_contradict_the_save_set() -> None:
    graph = build(graphs.gpt2(1))
    known = bounds(graph)
    made = plan(graph, budget_bytes=(known.floor + known.ceiling) // 2)
    again = recomputed_by_backward(graph, with_forced_saves(graph, made.save_set))
    for op in graph.ops:
        assert ("recomputed in backward." in why_in_words(why(made, op.name))) == again[op.id]
    assert simulate(graph, made.save_set).peak.live_bytes == made.peak
    assert recompute_us(graph, made.save_set) == made.recompute_us


def test_policy_on_a_grown_model_saves_unknown_ops() -> None:
    small, large = graphs.gpt2(2), graphs.gpt2(3)
    known = bounds(build(small))
    made = plan(small, budget_bytes=(known.floor + known.ceiling) // 2)
    policy = made.policy()
    found = carried(policy, large)
    again = {found.graph.ops[op].name for op in found.recompute_set}
    assert again == {made.graph.ops[op].name for op in made.recompute_set} != set()
    assert found.peak == simulate(found.graph, found.save_set).peak.live_bytes > made.peak
    assert found.bound_us == 0.0
    assert carried(policy, small).peak == as_planned(policy, small).peak == made.peak
