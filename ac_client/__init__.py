"""Applies a memory budget to a live model, and carries the plan out with the same gradients."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ac_client.applied import Applied, applied, check_untouched
from ac_client.checkpoint import checkpoint, checkpoint_sequential
from ac_client.cursor import LeftThePath
from ac_client.errors import AlreadyApplied, ApplyError, CheckpointingActive, NotApplied
from ac_client.pins import Pin, pin
from ac_client.policies import PolicyConflict
from ac_client.recipes import StaleError
from ac_client.report import Report
from ac_client.runtime import save_recompute_policy, tag
from ac_client.split import split_backward
from autoac.planner import InfeasibleBudget, InvalidBudget, Policy
from autoac.planner.units import bytes_from_gb
from autoac.profiler.errors import PinConflict

__all__ = [
    "AlreadyApplied",
    "Applied",
    "ApplyError",
    "CheckpointingActive",
    "InfeasibleBudget",
    "InvalidBudget",
    "LeftThePath",
    "NotApplied",
    "Pin",
    "PinConflict",
    "PolicyConflict",
    "Report",
    "StaleError",
    "applied",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "pin",
    "save_recompute_policy",
    "split_backward",
    "tag",
]

Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    budget_gb: float | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    service: str | None = None,
    headroom_gb: float = 0.0,
    strict: bool = False,
) -> Model:
    """Make `model`'s training steps fit in `budget_gb`, at the least extra time, with the same gradients.

    Changes the model in place and returns it. The first training forward is profiled on its real batch,
    planned, and already runs planned; a forward in `eval()` or under `no_grad` is left alone.

    Args:
        model: as it will be trained. Must not checkpoint itself.
        budget_gb: the device's peak in GiB over the whole step: parameters, buffers, gradients and
            optimizer state included. May be left out if `policy` is given.
        optimizer: counts its state, also before its first step.
        policy: carry this one out and plan nothing: a Policy, or the path of a policy file.
        service: URL of a planning service to ask; with it away, the plan is made in this process.
        headroom_gb: left free below the budget, for fragmentation.
        strict: raise LeftThePath where the ops that run are not those of the policy, instead of saving
            what is unknown.

    Raises:
        InvalidBudget: the budget is not a positive, finite number of GiB.
        AlreadyApplied: the model or a part of it is planned already.
        CheckpointingActive: the model checkpoints itself.
        InfeasibleBudget: no plan fits. From `apply` where a policy is given, else from the first
            training forward, which leaves the model as it was.
    """
    if budget_gb is None and policy is None:
        raise InvalidBudget("pass budget_gb=..., the device's peak in GiB, or policy=...")
    budget_bytes = None
    if budget_gb is not None:
        if not math.isfinite(budget_gb) or budget_gb <= 0:
            raise InvalidBudget(f"budget_gb={budget_gb!r} is no budget: pass a positive number of GiB")
        budget_bytes = bytes_from_gb(budget_gb)
    if (
        not math.isfinite(headroom_gb)
        or headroom_gb < 0
        or (budget_gb is not None and headroom_gb >= budget_gb)
    ):
        raise InvalidBudget(
            f"headroom_gb={headroom_gb!r} must be at least 0 and below budget_gb={budget_gb!r}"
        )
    check_untouched(model)
    loaded = None
    if policy is not None:
        loaded = policy if isinstance(policy, Policy) else Policy.from_json(Path(policy).read_text("utf-8"))
        peak = loaded.predicted.peak_bytes
        if budget_bytes is not None and peak > budget_bytes - bytes_from_gb(headroom_gb):
            raise InfeasibleBudget(
                budget_bytes, loaded.predicted.static_bytes, peak, loaded.predicted.peak_at, ()
            )
    Applied(
        model,
        budget_bytes=budget_bytes,
        headroom_bytes=bytes_from_gb(headroom_gb),
        optimizer=optimizer,
        policy=loaded,
        service=service,
        strict=strict,
    )
    return model
