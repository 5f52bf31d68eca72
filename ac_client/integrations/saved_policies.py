"""Use the policies that were saved with a checkpoint again, so that a resumed training need not plan.

A plan depends on more than a policy says. Where it may have been made for another budget, machine or
constraint, the saved policies are left alone, and the training is planned as if there were none.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from ac_client.integrations.options import ApplyArguments
from ac_client.planning.loaded_policy import other_environment
from ac_client.planning.options import Budget
from autoac.planner import PlannerError, PolicySet
from autoac.planner.budget import budget_in_bytes
from autoac.profiler import device_of

log = logging.getLogger("ac_client")

NOT_IN_A_POLICY = ("policy", "constraints", "host_budget_gb")  # arguments


def usable(text: str, budget_gb: Budget, options: ApplyArguments, model: nn.Module) -> PolicySet | None:
    """Return the policies in `text` if planning `model` would make the same ones; None if it may not.

    Args:
        text: JSON of a PolicySet.
        budget_gb, options: as for `ac_client.apply`.
        model: on its device.
    """
    named = any(options.get(name) is not None for name in NOT_IN_A_POLICY)
    if named or budget_gb is None or budget_gb == "device":
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # ranks may be others than before
    try:
        found = PolicySet.from_json(text)
    except PlannerError as error:
        log.warning("the saved policies cannot be used, and batches are planned again: %s", error)
        return None
    budget = budget_in_bytes(budget_gb)
    same = bool(found.buckets) and all(
        policy.model == type(model).__name__
        and policy.budget_bytes == budget
        and policy.predicted.peak_bytes <= budget
        and not other_environment(policy, device_of(model))
        for policy in (bucket.policy for bucket in found.buckets)
    )
    if not same:
        log.info("the saved policies are for another model, budget or machine, and batches are planned again")
    return found if same else None
