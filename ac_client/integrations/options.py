"""Options that every integration passes on to `ac_client.apply`."""

from __future__ import annotations

import os
from typing import TypedDict

from ac_client.planning.options import BudgetOf, Shapes
from autoac.planner import Constraints, Policy, PolicySet


class ApplyArguments(TypedDict, total=False):
    """Keyword arguments of `ac_client.apply`."""

    policy: Policy | PolicySet | str | os.PathLike[str] | None
    alias: str | None
    service: str | None
    require_service: bool
    headroom_gb: float
    budget_of: BudgetOf
    host_budget_gb: float | None
    constraints: Constraints | None
    strict: bool
    take_over_checkpoints: bool
    shapes: Shapes
