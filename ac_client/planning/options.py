"""Define what the user asked of `apply`, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ac_client.planning.ranks import AUTO, Group
from autoac.planner import Constraints

Budget = float | Literal["device"] | None
HostBudgetGb = float | Literal["auto"] | None
BudgetOf = Literal["allocated", "reserved"]


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """The arguments of `ac_client.apply`, checked. Its docstring says what each one means."""

    budget_bytes: int | None = None  # None: a policy was given without a budget
    headroom_bytes: int = 0
    budget_of: BudgetOf = "allocated"
    constraints: Constraints | None = None  # with the host's budget, if it was passed
    finds_host_budget: bool = False
    service: str | None = None
    strict: bool = False
    group: Group = AUTO
    verify: int | None = None
    take_over_checkpoints: bool = True

    @property
    def limit(self) -> int:
        """Return the most bytes that a planned peak may have."""
        assert self.budget_bytes is not None
        return self.budget_bytes - self.headroom_bytes
