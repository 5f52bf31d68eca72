"""Carry out a plan that was made elsewhere, with all that its executor derives from the plan's graph."""

from __future__ import annotations

from torch import nn

import ac_client
from ac_client.planning.loaded_policy import LoadedPolicy
from autoac.planner import Plan, Profile
from autoac.planner.plan import plan_of
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import SaveSet
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.variables import Options


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """Apply `plan` to `model`. In contrast to a policy from a file, modules may run again as a whole."""
    policy = plan.policy()
    ac_client.apply(model, policy=policy)
    bucket = ac_client.applied(model)._store.single_policy
    assert bucket is not None
    bucket.loaded = LoadedPolicy(policy, plan)
    return model


def apply_save_set(model: nn.Module, profile: Profile, save_set: SaveSet) -> nn.Module:
    """Apply the plan that saves these ops of `build(profile)` and recomputes each other op once."""
    problem = SearchProblem(build(profile), Options(use_groups=False))
    return apply_plan(model, plan_of(problem, profile, 1 << 40, save_set))
