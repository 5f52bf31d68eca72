"""Define what the user asked of `apply`, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ac_client.planning.ranks import AUTO, Group
from autoac.planner.formats.constraints import UNCONSTRAINED, Constraints

Budget = float | Literal["device"] | None
HostBudgetGb = float | Literal["auto"] | None


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """The arguments of `ac_client.apply`, checked. Its docstring says what each one means."""

    budget_bytes: int | None = None  # None: a policy was given without a budget
    constraints: Constraints = UNCONSTRAINED  # with the host's budget, if it was passed
    finds_host_budget: bool = False
    service: str | None = None
    strict: bool = False
    group: Group = AUTO
    verify: int | None = None

    @property
    def limit(self) -> int:
        """Return the most bytes that a planned peak may have."""
        assert self.budget_bytes is not None
        return self.budget_bytes - self.constraints.headroom_bytes
