"""Carry out a plan that was made elsewhere, with all that its executor derives from the plan's graph."""

from __future__ import annotations

from torch import nn

import ac_client
from ac_client.planning.loaded_policy import LoadedPolicy
from autoac.planner import Plan


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """Apply `plan` to `model`. In contrast to a policy from a file, modules may run again as a whole."""
    policy = plan.policy()
    ac_client.apply(model, policy=policy)
    bucket = ac_client.applied(model)._store.single_policy
    assert bucket is not None
    bucket.loaded = LoadedPolicy(policy, plan)
    return model
