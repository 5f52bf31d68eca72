"""What can go wrong in the client.

    ApplyError (ValueError)
    +-- AlreadyApplied         the model, or a part of it, is planned already
    +-- CheckpointingActive    the model checkpoints itself
    NotApplied (LookupError)   applied(model) of a model that is not planned

Further: InvalidBudget and InfeasibleBudget of the planner, PolicyConflict of policies.py, LeftThePath of
cursor.py (strict mode), StaleError of nodes.py.
"""

from __future__ import annotations


class ApplyError(ValueError):
    """`apply` cannot do what was asked, and has changed nothing."""


class AlreadyApplied(ApplyError):
    """The model, or a part of it, is planned already."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} is planned already; call ac_client.applied(model).remove() first to plan it again"
        )


class CheckpointingActive(ApplyError):
    """The model checkpoints itself, which would recompute under the plan's feet."""

    def __init__(self, where: str, how: str) -> None:
        super().__init__(f"{where} has gradient checkpointing switched on; do {how} before ac_client.apply")


class NotApplied(LookupError):
    """`applied(model)` of a model that is not planned."""

    def __init__(self, model: str) -> None:
        super().__init__(f"this {model} is not planned; call ac_client.apply(model, budget_gb=...) first")
