"""Check the difference between two plans or policies."""

from __future__ import annotations

from itertools import pairwise

import graphs

from autoac.planner import Plan, Policy, bounds, build, difference, difference_in_words, explain, plan
from autoac.planner.report.by_module import Decision, op_decisions


def at(share: float, layers: int = 3) -> Plan:
    profile = graphs.gpt2(layers)
    known = bounds(build(profile))
    return plan(profile, budget_bytes=int(known.floor + share * (known.ceiling - known.floor)))


def test_a_plan_does_not_differ_from_itself() -> None:
    made = at(0.5)
    found = difference(made, made)
    assert found.same
    assert "Both keep the same." in difference_in_words(found)
    assert difference(made.policy(), made.policy()).same


def test_one_more_saved_op_is_the_only_change() -> None:
    before, after = plan(graphs.greedy_trap(), budget_bytes=10), plan(graphs.greedy_trap(), budget_bytes=16)
    found = difference(before, after)
    (change,) = found.changes
    assert (change.name, change.gained, change.lost) == ("m", ("a",), ())
    assert (change.gained_bytes, change.lost_bytes) == (6, 0)
    assert (found.before.again, found.after.again) == (1, 0)
    text = difference_in_words(found, "small", "large")
    assert "large peaks 6 B higher and recomputes 3 us less." in text
    assert "  only large keeps a  (6 B)" in text


def test_reversed_comparison_swaps_gains_and_losses() -> None:
    small, large = at(0.3), at(0.7)
    there, back = difference(small, large), difference(large, small)
    assert (there.before, there.after) == (back.after, back.before)
    gained = {c.name: (c.gained, c.gained_bytes) for c in there.changes}
    assert gained == {c.name: (c.lost, c.lost_bytes) for c in back.changes}
    assert sum(c.gained_bytes - c.lost_bytes for c in there.changes) > 0


def test_layers_that_change_alike_share_one_entry() -> None:
    found = difference(at(0.1), at(0.9))
    assert any(len(change.modules) == 3 for change in found.changes)


def test_plans_of_two_models_name_the_ops_that_only_one_has() -> None:
    found = difference(at(0.5, 2).policy(), at(0.5, 3).policy())
    assert not found.only_before
    assert all(key.startswith("transformer.h.2") for key in found.only_after)
    text = difference_in_words(found)
    assert text.startswith("Two models: gpt2-2 and gpt2-3.")
    assert "more" in text.splitlines()[-1]


def test_op_that_only_one_plan_recomputes_twice_is_a_change() -> None:
    once = at(0.3).policy()
    key = next(key for key, decision in once.decisions.items() if decision == "recompute")
    later = list(once.decisions)[-1]
    fields = once.data() | {"version": 2, "use_groups": {key: [later, key]}}
    twice = Policy.model_validate(fields | {"decisions": once.decisions | {key: "recompute@2"}})
    found = difference(once, twice)
    (change,) = found.changes
    assert not found.same
    assert (change.gained, change.lost, len(change.otherwise)) == ((), (), 1)
    assert change.otherwise[0].endswith(" 2 times instead of once")
    assert f"new {change.otherwise[0]}" in difference_in_words(found, "old", "new")
    assert "(1 of them several times)" in explain(twice)
    assert "several times" not in explain(once)
    assert difference(twice, once).changes[0].otherwise[0].endswith(" once instead of 2 times")


def test_op_that_only_one_plan_moves_to_the_host_is_a_change() -> None:
    recomputed = at(0.3).policy()
    following = pairwise(recomputed.decisions.items())
    key, later = next((key, later) for (key, decided), (later, _) in following if decided == "recompute")
    decisions = recomputed.decisions | {key: "offload"}
    moves = {key: {"free": later, "fetch": later}}
    moved = Policy.model_validate(recomputed.data() | {"version": 4, "decisions": decisions, "moves": moves})
    name = "/".join(key.split("/")[1:]).removeprefix("aten.").split("#")[0]
    for found, words in (
        (difference(recomputed, moved), "moves {} to the host instead of recomputing it"),
        (difference(moved, recomputed), "recomputes {} instead of moving it to the host"),
    ):
        (change,) = found.changes
        assert not found.same
        assert (change.gained, change.lost) == ((), ())
        assert change.otherwise == (words.format(name),)
        assert f"new {change.otherwise[0]}" in difference_in_words(found, "old", "new")


def test_ops_unknown_to_the_first_are_never_lost() -> None:
    small, large = at(0.3), at(0.7)
    lost = [f"{c.modules[0]}/" for c in difference(large, small).changes if c.lost]
    assert lost
    assert large.profile is not None
    keys = large.profile.keys()
    unknown = [key for key in keys if key.startswith(lost[0])]
    found = difference(large, small, unknown)
    assert not [c for c in found.changes if c.lost and lost[0].removesuffix("/") in c.modules]


def test_ops_unknown_to_the_first_are_gained_if_the_second_keeps_them() -> None:
    made = at(0.7)
    assert made.profile is not None
    found = difference(made, made, made.profile.keys())
    assert sum(len(c.gained) * len(c.modules) for c in found.changes) == found.after.kept
    assert not [c for c in found.changes if c.lost]


def test_fact_that_only_one_side_has_is_no_change() -> None:
    made = at(0.5)
    policy = made.policy()
    real = op_decisions(made.graph, made.save_set, made.moved)
    assert any(op.decision is Decision.UNUSED for op in real)
    for before, after, became in (
        (policy, policy, (real, None)),
        (policy, policy, (None, real)),
        (made, policy, (None, None)),
        (policy, made, (None, None)),
    ):
        found = difference(before, after, became=became)
        assert found.same
        assert found.before == found.after
        assert found.before.idle is None
        assert "Ops that backward does not need count as kept" in difference_in_words(found)
    for found in (difference(policy, policy, became=(real, real)), difference(made, made)):
        assert found.before.idle
        assert "count as kept" not in difference_in_words(found)


def test_plans_of_two_profiles_are_marked_as_such() -> None:
    one = at(0.5).policy()
    other = one.model_copy(update={"profile_digest": "0" * 64})
    assert "Two profiles" in difference_in_words(difference(one, other))
    assert "Two profiles" not in difference_in_words(difference(one, one))
