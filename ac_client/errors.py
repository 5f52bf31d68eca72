"""Errors of the client.

    ApplyError (ValueError)
    +-- AlreadyApplied         the model, a part of it, or what it is part of, is planned already
    +-- CheckpointingActive    the model checkpoints itself
    +-- CompiledModel          an integration cannot plan a model compiled in this way
    NotApplied (LookupError)   applied(model) of a model that is not planned
    ShapeNotPlanned (LookupError)  strict mode: no bucket covers the batch
    RankFailed (RuntimeError)  another rank could not be profiled or planned
    RankMissing (RuntimeError) another rank did not come to plan with this one
    OtherRanks (ValueError)    a policy was planned for other ranks, and needs more here
    CommandError               a command of `autoac` cannot go on

Also raised: InvalidBudget and InfeasibleBudget of the planner, RemoteError of service_client/,
PolicyConflict, LeftThePath (strict mode), StaleError and ContentsDiffer of the executor (executor.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from autoac.planner.errors import InfeasibleBudget as InfeasibleBudget
from autoac.planner.errors import InvalidBudget as InvalidBudget
from autoac.planner.errors import InvalidConstraints as InvalidConstraints
from autoac.planner.errors import PickledError
from autoac.planner.errors import SolverOutOfTime as SolverOutOfTime
from autoac.planner.formats.policy_set import Shape, shape_in_words
from autoac.planner.units import format_bytes
from autoac.tape.errors import PinConflict as PinConflict


class ApplyError(PickledError, ValueError):
    """The model or an argument cannot be used; nothing was changed."""


class AlreadyApplied(ApplyError):
    """The model, a part of it, or a model that it is part of, is planned already."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} is planned already; call ac_client.applied(model).remove() first to plan it again"
        )


class CheckpointingActive(ApplyError):
    """The model checkpoints itself, so the plan would not decide what is recomputed."""

    def __init__(self, where: str, how: str) -> None:
        super().__init__(f"{where} has gradient checkpointing switched on; do {how} before ac_client.apply")


class CompiledModel(ApplyError):
    """The model is compiled in a way that a plan cannot follow."""

    def __init__(self, where: str, how: str) -> None:
        self.where, self.how = where, how
        super().__init__(f"{where} compiles more than a model, which a plan cannot follow: {how}")


class NotApplied(PickledError, LookupError):
    """`applied(model)` was called on a model that is not planned."""

    def __init__(
        self, model: str, next_step: str = "call ac_client.apply(model, budget_gb=...) first"
    ) -> None:
        super().__init__(f"this {model} is not planned; {next_step}")


NO_TRAINING = "its plan begins and ends with the training; `report` has the report of the last one"
"""The next step of NotApplied for a callback."""


class ShapeNotPlanned(PickledError, LookupError):
    """No bucket covers the batch, in strict mode. Nothing was computed.

    Args:
        shape: of the batch.
        planned: shapes of the buckets.
        budgeted: True if there is a budget to plan for.
    """

    def __init__(self, shape: Shape, planned: Sequence[Shape], budgeted: bool = True) -> None:
        self.shape, self.planned = dict(shape), tuple(dict(bucket) for bucket in planned)
        self.budgeted = budgeted
        advice = (
            "Call ac_client.applied(model).plan_for(...) with such a batch, or pass strict=False to have it "
            "planned in the forward"
            if budgeted
            else "Pass budget_gb as well as the policies and call ac_client.applied(model).plan_for(...) "
            "with such a batch, or pass strict=False to have it run under the largest"
        )
        super().__init__(
            f"no plan covers a batch of {shape_in_words(shape)}; planned are "
            f"{'; '.join(map(shape_in_words, planned))}. {advice}"
        )


class RankFailed(PickledError, RuntimeError):
    """Another rank could not be profiled or planned because of an unexpected error."""

    def __init__(self, rank: int, kind: str, words: str) -> None:
        self.rank, self.kind, self.words = rank, kind, words
        super().__init__(f"no rank is planned, because rank {rank} raised {kind}: {words}")


class RankMissing(PickledError, RuntimeError):
    """Another rank did not come to where all ranks plan together."""

    def __init__(self, ranks: Sequence[int], waited_s: float) -> None:
        self.ranks, self.waited_s = tuple(ranks), waited_s
        super().__init__(
            f"no rank is planned, because rank {', '.join(map(str, ranks))} did not come to plan with this "
            f"one within {waited_s:.0f} s: it has ended, or runs this forward unplanned. Call apply "
            "of ac_client on every rank, with the same arguments, or pass group=None: each then plans alone"
        )


class OtherRanks(PickledError, ValueError):
    """A policy was planned for other ranks, and the step needs more here than its budget."""

    def __init__(self, planned: str, here: str, needs: int, limit: int) -> None:
        self.planned, self.here, self.needs, self.limit = planned, here, needs, limit
        super().__init__(
            f"the policy must be for the ranks that train, {here}, got one for {planned}: parameters, "
            f"gradients, optimizer state and batch make its peak {format_bytes(needs)} here, over the limit "
            f"of {format_bytes(limit)}. Pass budget_gb=... to plan again, or plan on these ranks"
        )


class CommandError(Exception):
    """A command of `autoac` cannot go on; the message is one line for the user."""
