"""Check the plan of a policy on a profile, without solving."""

from __future__ import annotations

import graphs
import pytest

from autoac.planner import Constraints, OtherProfile, Policy, as_planned, carried, plan, simulate


@pytest.mark.parametrize("waiting", [0, 2])
def test_policy_and_its_profile_rebuild_the_plan(waiting: int) -> None:
    profile = graphs.gpt2(2, vocabulary=1024).model_copy(update={"waiting_microbatches": waiting})
    made = plan(profile, budget_bytes=graphs.between(profile))
    assert made.policy().predicted.microbatches == waiting + 1
    again = as_planned(Policy.from_json(made.policy().to_json()), profile)
    assert (again.peak, again.peak_at, again.recompute_us) == (made.peak, made.peak_at, made.recompute_us)
    assert (again.recompute_set, again.bound_us) == (made.recompute_set, made.bound_us)
    assert again.policy() == made.policy()
    with pytest.raises(OtherProfile, match="not made for this profile of gpt2-3"):
        as_planned(made.policy(), graphs.gpt2(3))


def test_policy_on_a_grown_model_saves_unknown_ops() -> None:
    small, large = graphs.gpt2(2), graphs.gpt2(3)
    made = plan(small, budget_bytes=graphs.between(small))
    policy = made.policy()
    found = carried(policy, large)
    again = {found.graph.ops[op].name for op in found.recompute_set}
    assert again == {made.graph.ops[op].name for op in made.recompute_set} != set()
    assert found.peak == simulate(found.graph, found.save_set).peak.live_bytes > made.peak
    assert found.bound_us == 0.0
    assert carried(policy, small).peak == as_planned(policy, small).peak == made.peak


def test_headroom_of_the_constraints_is_left_free() -> None:
    profile = graphs.step_with_fragments()
    budget = 2 * plan(profile, budget_gb=1).peak
    made = plan(profile, budget_bytes=budget, constraints=Constraints(headroom_bytes=budget // 4))
    assert as_planned(made.policy(), profile).budget == made.budget < budget == made.policy().budget_bytes
