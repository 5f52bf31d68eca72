"""Options that every integration passes on to `ac_client.apply`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

import torch

from ac_client.planning.options import BudgetOf, HostBudgetGb, Shapes
from ac_client.planning.ranks import Group
from autoac.planner import Constraints, Policy, PolicySet
from autoac.profiler import Loss


class ApplyArguments(TypedDict, total=False):
    """Keyword arguments of `ac_client.apply`."""

    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    policy: Policy | PolicySet | str | os.PathLike[str] | None
    service: str | None
    headroom_gb: float
    budget_of: BudgetOf
    host_budget_gb: HostBudgetGb
    constraints: Constraints | Literal["user"] | None
    strict: bool
    take_over_checkpoints: bool
    shapes: Shapes
    group: Group
    loss: Loss | None
    forwards_in_flight: int | None
    verify: int | None
