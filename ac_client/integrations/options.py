"""Options that every integration passes on to `ac_client.apply`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict

import torch

from ac_client.planning.options import HostBudgetGb
from ac_client.planning.ranks import Group
from autoac.planner import Constraints, Policy, PolicySet


class ApplyArguments(TypedDict, total=False):
    """Keyword arguments of `ac_client.apply`."""

    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    policy: Policy | PolicySet | str | os.PathLike[str] | None
    service: str | None
    host_budget_gb: HostBudgetGb
    constraints: Constraints | None
    strict: bool
    group: Group
    verify: int | None
