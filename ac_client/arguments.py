"""Check what a user passes to `apply`, before anything is changed."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn

from ac_client.applied_model import planned_models
from ac_client.errors import AlreadyApplied, CheckpointingActive
from ac_client.planning.facts.device_memory import free_nbytes
from ac_client.planning.ranks import AUTO
from ac_client.service_client.connection import policies_url
from autoac.planner import Constraints, InvalidBudget, InvalidConstraints, Policy, PolicySet
from autoac.planner.budget import amount_in_bytes, budget_in_bytes
from autoac.planner.formats.constraints import UNCONSTRAINED
from autoac.planner.units import format_bytes
from autoac.profiler import device_of

log = logging.getLogger("ac_client")


def check_model(model: Any) -> None:
    """Raise TypeError if `model` is not an nn.Module, or one of TorchScript."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"model must run in Python, got a {type(model).__name__}, which takes no hooks: apply to a "
            "module around it, such as nn.Sequential(model), and train that"
        )


CHECKPOINTING_SWITCHES = (
    "activation_checkpointing",
    "gradient_checkpointing",
)  # since transformers 5.23; before


def check_unplanned(model: nn.Module, *, may_checkpoint: bool) -> None:
    """Refuse a model that cannot be planned as it is.

    Args:
        may_checkpoint: the plan takes over the checkpoints of the model's own code.

    Raises:
        AlreadyApplied: the model, a part of it, or a model that it is part of, is planned already.
        CheckpointingActive: the model checkpoints itself, and must not.
    """
    planned = planned_models()
    for whole in planned:
        for path, module in whole.named_modules():
            if module is model and path:
                raise AlreadyApplied(f"{type(whole).__name__}, of which this is {path},")
    for path, module in model.named_modules():
        where = f"{type(module).__name__}{f' at {path}' if path else ''}"
        if any(module is one for one in planned):
            raise AlreadyApplied(where)
        if may_checkpoint:
            continue
        for attribute in CHECKPOINTING_SWITCHES:
            if vars(module).get(attribute) is True:
                methods = (f"{switch}_disable" for switch in CHECKPOINTING_SWITCHES)
                method = next((method for method in methods if hasattr(model, method)), None)
                raise CheckpointingActive(
                    where, f"model.{method}()" if method else f"{where}.{attribute} = False"
                )
        if type(module).__name__ == "CheckpointWrapper":
            raise CheckpointingActive(where, "your own code without checkpoint_wrapper")


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise TypeError if `optimizer` is not an optimizer, or a list of them.

    Warn if it steps no parameter of `model`.
    """
    if optimizer is None:
        return
    several = optimizer if isinstance(optimizer, (list, tuple)) and optimizer else [optimizer]
    for one in several:
        if isinstance(one, type) or not (hasattr(one, "state") and hasattr(one, "param_groups")):
            raise TypeError(
                "optimizer must be the torch.optim.Optimizer that steps this model, or a list of several, "
                f"got {described(one)}; pass optimizer=... as the training loop has it"
            )
    stepped = [p for one in several for group in one.param_groups for p in group["params"]]
    own = set(map(id, model.parameters()))
    if stepped and not any(id(p) in own for p in stepped):
        log.warning(
            "optimizer steps %d parameters, and none of them belongs to this %s: its state is counted "
            "anyway; pass the optimizer that was made from model.parameters()",
            len(stepped),
            type(model).__name__,
        )


def check_budget(budget_gb: Any, rules: Constraints, model: nn.Module) -> int | None:
    """Return the budget in bytes; warn if it is more than this process can have.

    Raises:
        InvalidBudget: the budget is not a number of GiB, the headroom uses it up, or it is for reserved
            memory, and the model is not on a GPU, whose allocator alone reserves some.
    """
    if budget_gb is None:
        return None
    device = device_of(model)
    free = free_nbytes(device)
    if rules.budget_of == "reserved" and device.type != "cuda":
        got = "a budget of the device" if budget_gb == "device" else 'Constraints(budget_of="reserved")'
        raise InvalidBudget(
            f"the budget must be in GiB of allocated memory for a model on {device}, got {got}: move "
            "the model to its GPU first"
        )
    budget = free if budget_gb == "device" and free is not None else budget_in_bytes(budget_gb)
    if rules.headroom_bytes >= budget:
        raise InvalidBudget(
            f"headroom_bytes must be below budget_gb={budget_gb!r}, got {format_bytes(rules.headroom_bytes)}"
        )
    if free is not None and budget > free:
        log.warning(
            "budget_gb=%r is more than the %s that this process can have on %s, so the plan may not fit; "
            "budget_gb is in GiB",
            budget_gb,
            format_bytes(free),
            "this machine" if device.type == "cpu" else device,
        )
    return budget


def with_host_budget(constraints: Constraints, host_budget_gb: Any, budget_bytes: int | None) -> Constraints:
    """Return `constraints` with the host's budget.

    Raises:
        InvalidBudget: it is not a number of GiB, or comes without a budget of the device.
    """
    if host_budget_gb is None:
        return constraints
    host_budget = amount_in_bytes(host_budget_gb, "host_budget_gb")
    if host_budget and budget_bytes is None:
        raise InvalidBudget(
            f"host_budget_gb must come with budget_gb, got host_budget_gb={host_budget_gb!r} alone: a policy "
            "that was planned elsewhere says itself what moves"
        )
    return constraints.model_copy(update={"host_budget_bytes": host_budget})


def check_source(budget_gb: Any, policy: Any, service: Any) -> None:
    """Check the sources of the policy: a budget, a policy, or a service.

    Raises:
        TypeError: `policy` is not a policy, a policy set or a path.
        ValueError: `service` is not a URL.
        InvalidBudget: there is neither a budget nor a policy.
    """
    if policy is not None and not isinstance(policy, (Policy, PolicySet, str, os.PathLike)):
        raise TypeError(
            f"policy must be a Policy, a PolicySet or the path of a file, got {described(policy)}"
        )
    if service is not None:
        policies_url(service)  # raises
    if budget_gb is None and policy is None:
        raise InvalidBudget("pass budget_gb=..., the device's peak in GiB, or policy=...")


def checked_constraints(constraints: Any, *, planned: bool) -> Constraints:
    """Return the constraints. Most need a budget to plan for.

    Args:
        constraints: as passed to `apply`.
        planned: True if a policy was given.

    Raises:
        TypeError: `constraints` is not a Constraints.
        InvalidConstraints: a policy was given, and they have more than what is settled at run time.
    """
    if constraints is None:
        return UNCONSTRAINED
    if not isinstance(constraints, Constraints):
        raise TypeError(
            f"constraints must be ac_client.Constraints(pin_save=..., ...), got {described(constraints)}"
        )
    if planned and constraints.model_copy(update=SETTLED_AT_RUN_TIME) != UNCONSTRAINED:
        raise InvalidConstraints(
            "a policy is carried out as it is: plan it under the constraints, or leave policy=... out"
        )
    return constraints


SETTLED_AT_RUN_TIME = {
    name: getattr(UNCONSTRAINED, name) for name in ("headroom_bytes", "budget_of", "take_over_checkpoints")
}


def check_switches(*, strict: Any, group: Any) -> None:
    """Check the arguments that have only a few valid values.

    Raises:
        TypeError: `strict` is not a bool, or `group` is not a ProcessGroup.
        ValueError: `group` is another string than "auto".
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict must be True or False, got {strict!r}")
    if isinstance(group, str):
        if group != AUTO:
            raise ValueError(f'group must be "auto", a ProcessGroup or None, got {group!r}')
    elif group is not None and not _is_process_group(group):
        raise TypeError(f'group must be "auto", a ProcessGroup or None, got {described(group)}')


def check_verify(verify: Any) -> None:
    """Check the argument `verify`.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1.
    """
    if verify is None:
        return
    if isinstance(verify, bool) or not isinstance(verify, int):
        raise TypeError(f"verify must be a positive integer, got {verify!r}")
    if verify < 1:
        raise ValueError(f"verify must be a positive integer, got {verify}")


def _is_process_group(group: Any) -> bool:
    return torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)


def described(value: Any) -> str:
    """Return a short description of a value of the wrong type, for an error."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return type(value).__name__
