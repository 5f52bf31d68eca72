"""Check the table of decisions on which two policies differ."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import graphs
import pytest

from autoac.planner import Plan, Policy, diff_as_table, diff_rows, plan
from autoac.planner.report.by_module import Decision, op_decisions
from autoac.planner.report.policy_diff import DiffRow


def at(share: float, layers: int = 3) -> Plan:
    profile = graphs.gpt2(layers)
    return plan(profile, budget_bytes=graphs.between(profile, share))


def test_plan_does_not_differ_from_itself() -> None:
    made = at(0.5)
    assert diff_rows(made, made) == diff_rows(made.policy(), made.policy()) == ()


def test_one_more_saved_op_is_the_only_row() -> None:
    before, after = plan(graphs.greedy_trap(), budget_bytes=10), plan(graphs.greedy_trap(), budget_bytes=16)
    rows = diff_rows(before, after)
    assert rows == (DiffRow("m", ("m",), "a", "recomputed", "saved", 6, -3.0),)
    assert [line.split() for line in diff_as_table(rows, "small", "large")] == [
        ["module", "op", "small", "large", "held", "recompute"],
        ["m", "a", "recomputed", "saved", "+6", "B", "-3", "us"],
    ]


@pytest.mark.parametrize("shares", [(0.1, 0.9), (0.7, 0.3), (0.4, 0.5)])
def test_rows_name_each_op_that_differs_once_and_add_up(shares: tuple[float, float]) -> None:
    before, after = map(at, shares)
    rows = diff_rows(before, after)
    words = [
        {op.key: op.decision.name.lower() for op in op_decisions(made.graph, made.save_set)}
        for made in (before, after)
    ]
    differing = [key for key in words[0] if words[0][key] != words[1][key]]
    assert sum(len(row.modules) for row in rows) == len(differing) > 0
    for row in rows:
        for module in row.modules:
            (key,) = (key for key in differing if key.startswith(f"{module}/aten.{row.op}"))
            assert (words[0][key], words[1][key]) == (row.before, row.after)
    assert sum(row.recompute_us for row in rows) == pytest.approx(after.recompute_us - before.recompute_us)


def test_layers_that_change_alike_share_a_row() -> None:
    assert any(len(row.modules) == 3 for row in diff_rows(at(0.1), at(0.9)))


def test_swapped_sides_have_the_opposite_signs() -> None:
    small, large = at(0.3), at(0.7)
    there = {(row.module, row.op): row for row in diff_rows(small, large)}
    for row in diff_rows(large, small):
        other = there.pop((row.module, row.op))
        assert (row.before, row.after) == (other.after, other.before)
        assert (row.held_bytes, row.recompute_us) == (-other.held_bytes, pytest.approx(-other.recompute_us))
    assert not there


def test_ops_that_one_model_does_not_have_are_absent() -> None:
    rows = diff_rows(at(0.5, 2).policy(), at(0.5, 3).policy())
    added = [row for row in rows if row.before == "absent"]
    assert added
    assert all(module.startswith("transformer.h.2") for row in added for module in row.modules)
    assert not [row for row in rows if row.after == "absent"]


def test_policy_and_plan_are_compared_by_the_decisions_of_both() -> None:
    made = at(0.5)
    decided = [op.decision for op in op_decisions(made.graph, made.save_set)]
    assert Decision.UNUSED in decided, "a policy counts it as saved"
    assert diff_rows(made, made.policy()) == diff_rows(made.policy(), made) == ()


def test_moved_op_is_a_row_and_a_table_without_bytes_has_no_columns_for_them() -> None:
    recomputed = at(0.3).policy()
    following = pairwise(recomputed.decisions.items())
    key, later = next((key, later) for (key, decided), (later, _) in following if decided == "recompute")
    moved = with_decisions(recomputed, {key: "offload"}, moves={key: {"free": later, "fetch": later}})
    (row,) = diff_rows(recomputed, moved)
    assert (row.before, row.after, row.held_bytes, row.recompute_us) == ("recomputed", "moved", 0, 0.0)
    assert key.startswith(f"{row.module}/aten.{row.op}")
    head, line = diff_as_table([row])
    assert head.split() == ["module", "op", "before", "after"]
    assert line.split()[-2:] == ["recomputed", "moved"]


def with_decisions(policy: Policy, decisions: Mapping[str, str], **fields: object) -> Policy:
    data = policy.model_dump(mode="json") | {"decisions": policy.decisions | decisions} | fields
    return Policy.model_validate(data)
