"""Compare plans under constraints with brute force over all save sets, and check the errors."""

from __future__ import annotations

import json
import pickle
import random

import graphs
import oracles
import pytest
from graphs import chain
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autoac.planner import (
    ConflictingPins,
    Constraints,
    Graph,
    InfeasibleBudget,
    InvalidBudget,
    InvalidConstraints,
    Policy,
    Profile,
    UnmatchedPattern,
    as_planned,
    bounds,
    build,
    constrained,
    explain,
    plan,
    simulate,
)
from autoac.planner.formats.profile import DECIDES, FUNCTIONAL_COLLECTIVE, OpFlag
from autoac.planner.memory.schedule import Compute, recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.apply_constraints import with_forward_limit
from autoac.planner.problem.graph import SaveSet
from autoac.planner.problem.save_sets import with_forced_saves

laws = settings(max_examples=60, derandomize=True, deadline=None)


def forward_peak(graph: Graph, save_set: SaveSet) -> int:
    """Return the most bytes live while forward runs an op."""
    instants = simulate(graph, save_set).instants
    return max(i.live_bytes for i in instants if isinstance(i.event, Compute))


def peaks_and_time_of_each(graph: Graph) -> dict[SaveSet, tuple[int, int, float]]:
    """Return (peak, forward peak, recompute time) of each save set, with the forced saves in the key."""
    table = {}
    for save_set in oracles.every_save_set(graph):
        table[with_forced_saves(graph, save_set)] = (
            peak_bytes(graph, save_set),
            forward_peak(graph, save_set),
            recompute_us(graph, save_set),
        )
    return table


# --- the forward budget ---------------------------------------------------------------------------------


@laws
@given(graphs.seeds, st.integers(0, 30), st.integers(0, 30))
def test_reserved_bytes_in_forward_are_equivalent_to_a_forward_limit(
    seed: int, budget: int, forward: int
) -> None:
    graph = graphs.random_graph(seed, 6)
    searched = with_forward_limit(graph, budget, forward)
    for save_set in oracles.every_save_set(graph):
        both = peak_bytes(graph, save_set) <= budget and forward_peak(graph, save_set) <= forward
        assert (peak_bytes(searched, save_set) <= budget) == both


def test_plan_reports_its_peak_without_the_reserved_bytes() -> None:
    # Saving both 8-byte outputs peaks at 16 in forward, and again when backward begins.
    graph = chain(1, 8, 1, 8, 0)
    made = plan(graph, budget_bytes=18, constraints=Constraints(forward_budget_bytes=17))
    assert (forward_peak(graph, made.save_set), made.ceiling, made.floor) == (
        forward_peak(made.graph, made.save_set),
        bounds(graph).ceiling,
        bounds(graph).floor,
    )
    assert forward_peak(graph, made.save_set) <= 17
    assert made.peak == peak_bytes(graph, made.save_set) <= 18
    assert "must leave free" not in explain(made)


def test_headroom_is_subtracted_from_both_budgets() -> None:
    graph = chain(1, 8, 1, 8, 0)
    rules = Constraints(forward_budget_bytes=27, headroom_bytes=10)
    made = plan(graph, budget_bytes=28, constraints=rules)
    assert forward_peak(graph, made.save_set) <= 17
    assert made.budget == 18
    with pytest.raises(InvalidBudget, match="leaves nothing of forward's budget"):
        plan(graph, budget_bytes=28, constraints=rules.model_copy(update={"headroom_bytes": 27}))


def test_error_names_a_forward_budget_that_is_too_small() -> None:
    graph = chain(8, 8, 8, 8)  # whatever is saved, forward holds an output and its input
    with pytest.raises(InfeasibleBudget, match=r"Forward may hold 15 B .* 17 B apart") as caught:
        plan(graph, budget_bytes=32, constraints=Constraints(forward_budget_bytes=15))
    error = caught.value
    assert (error.budget, error.proven_floor, error.smallest_found) == (32, 33, 33)
    plan(
        graph, budget_bytes=33, constraints=Constraints(forward_budget_bytes=16)
    )  # both budgets are raised by 1
    assert sum(h.nbytes for h in error.live) == error.smallest_found
    assert [h.nbytes for h in error.live if h.why == "forward_budget_bytes"] == [17]


# --- pins -----------------------------------------------------------------------------------------------


def profile_with_modules(seed: int) -> tuple[Profile, random.Random]:
    """Return a random step with its ops in the modules `a.0`, `a.1` and `b`."""
    rng = random.Random(seed)
    profile = graphs.random_profile(rng, 7)
    modules = ("a.0", "a.1", "b")
    column = tuple(sorted(rng.randrange(3) for _ in profile.ops.module))
    ops = profile.ops.model_copy(update={"module": column})
    return profile.model_copy(update={"modules": modules, "ops": ops}), rng


def random_constraints(profile: Profile, rng: random.Random, most_forward: int) -> Constraints:
    """Return a random mix of all kinds of constraints."""
    keys = profile.keys()
    present = sorted({key.partition("/")[0] for key in keys})
    return Constraints(
        pin_save=[rng.choice(keys)] if rng.random() < 0.4 else [],
        pin_recompute=[rng.choice([*keys, *present])] if rng.random() < 0.4 else [],
        fsdp_units=present if rng.random() < 0.3 else [],
        forward_budget_bytes=rng.randint(1, most_forward) if rng.random() < 0.6 else None,
        extra_static_bytes=rng.randrange(4),
        gradients=rng.choice(["as profiled", "present", "absent"]),
    )


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None)
@given(graphs.seeds, st.integers(0, 2))
@example(76, 0)  # draws no constraints
def test_plan_with_waiting_microbatches_is_the_fastest_under_all_constraints_together(
    seed: int, waiting: int
) -> None:
    profile, rng = profile_with_modules(seed)
    profile = profile.model_copy(update={"waiting_microbatches": waiting})
    plain = peaks_and_time_of_each(build(profile))
    rules = random_constraints(profile, rng, max(f for _, f, _ in plain.values()) + 4)
    rules = rules.model_copy(update={"gradients": "as profiled"})
    extra, forward = rules.extra_static_bytes, rules.forward_budget_bytes
    budget = max(1, extra + rng.choice(sorted(peak for peak, _, _ in plain.values())))
    try:
        graph = constrained(profile, rules)
    except ConflictingPins:
        return
    save = {op.id for op in graph.ops if op.must_save}
    must_recompute = {op.id for op in graph.ops if op.must_recompute}
    fitting = [
        us
        for s, (peak, f, us) in plain.items()
        if save <= s
        and not must_recompute & s
        and peak + extra <= budget
        and (forward is None or f + extra <= forward)
    ]
    try:
        made = plan(profile, budget_bytes=budget, constraints=rules, gap=0.0)
    except InfeasibleBudget:
        assert not fitting
        return
    assert made.recompute_us == pytest.approx(min(fitting))
    assert made.peak <= budget
    assert made.profile is profile
    assert made.constraints == rules


@laws
@given(graphs.seeds)
def test_recompute_never_reaches_into_another_fsdp_unit(seed: int) -> None:
    profile, _ = profile_with_modules(seed)
    keys = profile.keys()
    unit = [key.partition("/")[0] for key in keys]
    graph = constrained(profile, Constraints(fsdp_units=tuple(sorted(set(unit)))))
    for save_set in oracles.every_save_set(graph):
        saved = with_forced_saves(graph, save_set)
        for op in graph.ops:
            if op.id not in saved:
                made_by = {graph.versions[v].op for v in op.reads}
                assert all(m in saved or unit[m] == unit[op.id] for m in made_by)
    # The constraint saves no other op.
    for before, after in zip(build(profile).ops, graph.ops, strict=True):
        crosses = any(unit[r] != unit[after.id] for w in after.writes for r in graph.versions[w].readers)
        assert after.must_save == (before.must_save or ("another FSDP unit reads it" if crosses else ""))


def test_innermost_matching_module_is_the_fsdp_unit() -> None:
    tape = graphs.Tape()
    (a,) = tape.op("a", [], 1, module="h.0.attn")
    (b,) = tape.op("b", [a], 1, module="h.0.mlp.up")
    (c,) = tape.op("c", [b], 1, module="h.0.mlp.down")
    (d,) = tape.op("d", [c], 1, module="h.1.attn")
    tape.op("e", [d], 1, module="head")

    def saved(*units: str) -> str:
        graph = constrained(tape.profile(), Constraints(fsdp_units=units))
        return "".join(op.name[-3] for op in graph.ops if op.must_save)

    assert saved("h.*") == "cd"  # from layer to layer, and from the last to the rest
    assert saved("h.*", "h.*.mlp") == "acd"
    assert saved("h.1") == "cd"
    assert saved(".") == ""


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("h.0.mlp", "bc"),  # a module and everything inside
        ("h.*.mlp", "bce"),
        ("h.*", "abcde"),
        ("h.1*", "de"),
        ("**.up", "bce"),
        ("**", "abcdefg"),
        (".", "abcdefg"),
        ("*", "abcdefg"),
        ("h.*.mlp/aten.mm.default", "bce"),
        ("*/aten.mm", "abceg"),
        ("*/aten.mm.default#1", "c"),
        ("h.0.mlp.up/aten.mm.default#1", "c"),
        ("./aten.mm.default#0", "g"),  # a whole key matches only this op
        ("head/*", "f"),
    ],
)
def test_pattern_matches_these_ops(pattern: str, found: str) -> None:
    tape = graphs.Tape()
    for module, op in [
        ("h.0.attn", "aten.mm.default"),
        ("h.0.mlp.up", "aten.mm.default"),
        ("h.0.mlp.up", "aten.mm.default"),
        ("h.1.attn", "aten.mul.Tensor"),
        ("h.1.mlp.up", "aten.mm.default"),
        ("head", "aten.mul.Tensor"),
        (".", "aten.mm.default"),
    ]:
        tape.op(op, [], 1, module=module)
    graph = constrained(tape.profile(), Constraints(pin_save=(pattern,)))
    assert "".join("abcdefg"[op.id] for op in graph.ops if op.must_save) == found


def test_error_for_an_unmatched_pattern_names_similar_keys() -> None:
    profile = graphs.gpt2(2)
    with pytest.raises(UnmatchedPattern, match=r"'transformer\.h\.0\.mpl' matches none .*h\.0\.mlp"):
        constrained(profile, Constraints(pin_save=("transformer.h.0.mpl",)))
    with pytest.raises(UnmatchedPattern, match=r"pin_save .*aten\.addmm\.default#0") as caught:
        constrained(profile, Constraints(pin_save=("transformer.h.0.attn.c_attn/aten.admm.default",)))
    assert pickle.loads(pickle.dumps(caught.value)).near == caught.value.near  # noqa: S301 (our own bytes)
    with pytest.raises(UnmatchedPattern, match="fsdp_units 'layers"):
        constrained(profile, Constraints(fsdp_units=("layers.*",)))


def conflict(profile: Profile, **rules: object) -> ConflictingPins:
    """Return the error that these constraints raise."""
    with pytest.raises(ConflictingPins) as caught:
        constrained(profile, Constraints.model_validate(rules))
    return caught.value


def test_error_for_contradictory_pins_names_both() -> None:
    profile = graphs.gpt2(1)
    error = conflict(profile, pin_save=["transformer.h.*"], pin_recompute=["*/aten.addmm"])
    assert error.key.endswith("attn.c_attn/aten.addmm.default#0")
    assert (error.first, error.second) == ("pin_recompute '*/aten.addmm'", "pin_save 'transformer.h.*'")
    assert str(error).endswith("Remove one of the two")
    error = conflict(profile, pin_save=["lm_head"], pin_recompute=["lm_head"])
    assert (error.first, error.second) == ("pin_recompute 'lm_head'", "pin_save 'lm_head'")


@pytest.mark.parametrize(("word", "other"), [("pin_save", "must_recompute"), ("pin_recompute", "pinned")])
def test_pins_in_the_profile_count_like_pins_in_constraints(word: str, other: str) -> None:
    tape = graphs.Tape()
    flags, must = (int(OpFlag.MUST_RECOMPUTE), "") if word == "pin_save" else (0, "pinned")
    tape.op("a", [], 1, flags=flags, must=must)
    assert other in conflict(tape.profile(), **{word: ["m"]}).second
    agrees = {"pin_save": "pin_recompute", "pin_recompute": "pin_save"}[word]
    graph = constrained(tape.profile(), Constraints.model_validate({agrees: ["m"]}))
    assert (graph.ops[0].must_save, graph.ops[0].must_recompute) == (must, not must)


def test_collectives_and_deciding_ops_stay_saved_in_a_recomputed_module() -> None:
    tape = graphs.Tape()
    (a,) = tape.op("mm", [], 1)
    (b,) = tape.op("all_gather", [a], 1, flags=int(OpFlag.COLLECTIVE))
    (c,) = tape.op("topk", [b], 1, must=DECIDES)
    tape.op("add", [c], 1)
    graph = constrained(tape.profile(), Constraints(pin_recompute=("m",)))
    assert [op.must_save for op in graph.ops] == ["", "collective", DECIDES, ""]
    assert [op.must_recompute for op in graph.ops] == [True, False, False, True]
    assert conflict(tape.profile(), pin_recompute=["m/all_gather"]).second == "collective"
    assert conflict(tape.profile(), pin_recompute=["m/topk#0"]).second == DECIDES


def test_functional_collective_is_lifted_by_a_constraint_of_its_own() -> None:
    tape = graphs.Tape()
    (a,) = tape.op("mm", [], 1)
    (b,) = tape.op("all_gather", [a], 1, flags=int(OpFlag.COLLECTIVE), must=FUNCTIONAL_COLLECTIVE)
    tape.op("topk", [b], 1, must=DECIDES)
    rules = Constraints(save_collectives=False)
    assert [op.must_save for op in constrained(tape.profile(), rules).ops] == ["", "", DECIDES]
    assert [op.must_save for op in constrained(tape.profile(), Constraints()).ops[1:]] == [
        FUNCTIONAL_COLLECTIVE,
        DECIDES,
    ]
    assert rules.digest != Constraints().digest == Constraints(save_collectives=True).digest


def test_in_place_op_is_recomputed_with_the_ops_it_writes_over() -> None:
    # In dropout on a CPU, empty_like, bernoulli_ and div_ share one storage.
    graph = constrained(graphs.dropout(), Constraints(pin_recompute=("m/div_",)))
    assert [op.id for op in graph.ops if op.must_recompute] == [1, 2, 3]
    error = conflict(graphs.dropout(), pin_recompute=["m/div_"], pin_save=["m/bernoulli_"])
    assert error.second == "pin_save 'm/bernoulli_' (of m/bernoulli_#0, whose memory it shares)"


def test_error_names_the_pins_that_hold_too_many_bytes() -> None:
    tape = graphs.Tape()
    values = []
    for i in range(4):
        values += tape.op("mm", values[-1:], 8, module=f"h.{i}")
    saved_tensors = [tape.save(v) for v in values]
    tape.op("loss", values[-1:], 0)
    for h in reversed(saved_tensors):
        tape.step("step", [h])
    profile = tape.profile()
    fits = plan(profile, budget_bytes=24).peak
    with pytest.raises(InfeasibleBudget) as caught:
        plan(profile, budget_bytes=fits, constraints=Constraints(pin_save=("h.*", "h.3")))
    held = [h.nbytes for h in caught.value.live if h.why == "must be saved: pin_save 'h.*'"]
    assert held == [8, 8, 8, 8]
    assert caught.value.constraints == ("Without these pins a plan may fit: pin_save 'h.*', pin_save 'h.3'.",)
    assert pickle.loads(pickle.dumps(caught.value)).constraints == caught.value.constraints  # noqa: S301
    with pytest.raises(InfeasibleBudget) as without:
        plan(profile, budget_bytes=7)
    assert without.value.constraints == ()


# --- bytes ----------------------------------------------------------------------------------------------


def with_gradients(existing: int, made: int) -> Profile:
    profile = graphs.greedy_trap().model_copy(update={"gradient_nbytes": made})
    return profile.model_copy(update={"static": profile.static.model_copy(update={"gradients": existing})})


def test_present_gradients_are_static_and_not_allocated_again() -> None:
    profile = with_gradients(0, 4)
    present = constrained(profile, Constraints(gradients="present"))
    assert (present.static_bytes, present.closing_bytes) == (4, 0)
    absent = constrained(profile, Constraints(gradients="absent"))
    assert absent == constrained(profile, Constraints()) == build(profile)
    kept = with_gradients(4, 0)
    assert constrained(kept, Constraints(gradients="present")) == build(kept)


def test_gradients_in_the_profile_cannot_be_absent() -> None:
    with pytest.raises(InvalidConstraints, match=r"4 B of gradients existed.*set_to_none=True"):
        constrained(with_gradients(4, 0), Constraints(gradients="absent"))
    with pytest.raises(InvalidConstraints, match="pass a Profile"):
        constrained(chain(1, 8), Constraints(gradients="present"))


# --- constraints as data ----------------------------------------------------------------------------------


def test_constraints_round_trip_through_json_and_policies() -> None:
    profile = graphs.gpt2(2)
    rules = Constraints(
        pin_save=("transformer.h.0.attn",),
        fsdp_units=("transformer.h.*",),
        forward_budget_bytes=3 << 30,
        extra_static_bytes=5,
    )
    assert Constraints.model_validate(json.loads(rules.model_dump_json())) == rules
    made = plan(profile, budget_gb=4.0, constraints=rules)
    policy = Policy.from_json(made.policy().to_json())
    assert policy.constraints == rules
    reread = as_planned(policy, profile)
    assert (reread.peak, reread.graph, reread.constraints) == (made.peak, made.graph, rules)
    plain = plan(profile, budget_gb=4.0).policy()
    assert plain.constraints == Constraints()
    assert plan(profile, budget_gb=4.0, constraints=Constraints()).policy() == plain


@pytest.mark.parametrize(
    "data",
    [
        {"pin_save": "transformer"},
        {"pin_save": [""]},
        {"pin_save": ["a"] * 1001},
        {"forward_budget_bytes": 0},
        {"extra_static_bytes": -1},
        {"gradients": "maybe"},
        {"pins": ["a"]},
    ],
)
def test_invalid_constraints_are_rejected(data: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Constraints.model_validate(data)


def test_patterns_with_many_wildcards_match_quickly() -> None:
    tape = graphs.Tape()
    tape.op("aten." + "a" * 200, [], 1, module=".".join("a" * 200))
    with pytest.raises(UnmatchedPattern):
        constrained(
            tape.profile(), Constraints(pin_save=(".".join(["**"] * 500) + ".b/" + "a*" * 500 + "b",))
        )
