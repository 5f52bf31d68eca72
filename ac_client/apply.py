"""Apply a memory budget to a model: `apply`, the client's one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from ac_client.applied_model import Applied
from ac_client.arguments import (
    check_budget,
    check_model,
    check_optimizer,
    check_source,
    check_switches,
    check_unplanned,
    check_verify,
    checked_constraints,
    with_host_budget,
)
from ac_client.files import named
from ac_client.planning.loaded_policy import other_environment
from ac_client.planning.options import ApplyOptions, Budget, HostBudgetGb
from ac_client.planning.ranks import AUTO, Group
from autoac.planner import Constraints as Constraints
from autoac.planner import InvalidBudget, Policy
from autoac.planner import PolicySet as PolicySet
from autoac.planner.formats.policy_set import SET_FORMAT
from autoac.planner.units import format_bytes
from autoac.profiler.compiler.private_compiler import check_version
from autoac.profiler.model_device import check_one_device, device_of
from autoac.tape.distributed.fsdp import layout_of, watch_sharding
from autoac.tape.torch_facts.inductor import compiled_parts, is_called_compiled, uncompiled

log = logging.getLogger("ac_client")

Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    budget_gb: Budget = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    policy: Policy | PolicySet | str | os.PathLike[str] | None = None,
    service: str | None = None,
    host_budget_gb: HostBudgetGb = "auto",
    constraints: Constraints | None = None,
    strict: bool = False,
    group: Group = AUTO,
    verify: int | None = None,
) -> Model:
    """Make `model`'s training steps fit in `budget_gb`, at the least extra time, with the same gradients.

    Changes the model in place and returns it. The first training step is observed: it runs for real, without
    a plan, with about the memory of a checkpoint around each block. The second training forward is planned,
    and runs under its plan. The first step of a batch that no earlier plan covers is observed, too. A forward
    under `no_grad` is left alone, and so is a forward in `eval()` unless optimizer steps show that it trains.
    Each phase logs one line at INFO on the logger "ac_client".

    Args:
        model: the model, as it will be trained, or torch.compile of it.
            torch.compile of the model or of its blocks may also follow.
        budget_gb: the device's peak in GiB over the whole step: parameters, buffers, gradients and
            optimizer state included. Optional if `policy` is given. "device": what this process has and can
            still get of the model's GPU now, fragments included.
        optimizer: the optimizer that steps the model, or a list of several; their state counts, also before
            their first step.
        policy: the policy to carry out: a Policy, for every batch; a PolicySet, for the batches that it
            covers, and without `budget_gb` also for all others; or the path of a file with
            either.
        service: URL of a planning service. It returns a stored policy for this model, shapes, device, budget
            and constraints, and gets the profile if it has none. Its key is the environment's AUTOAC_TOKEN.
            If the service is away, the plan is made in this process.
        host_budget_gb: GiB of the host's memory that saved tensors may be moved to, where the link to the
            GPU makes that faster than to recompute them (docs/budget.md); 0: none are. "auto": what
            `constraints` says; if nothing, on a GPU a quarter of what the host has free after the first step.
        constraints: what must hold for the plan in addition to the budget: pins by module path or op, FSDP
            units, a budget for forward, headroom, ... (docs/constraints.md).
        strict: raise LeftThePath if the ops that run are not those of the policy, instead of saving what is
            unknown; and ShapeNotPlanned for a batch that no plan covers, instead of observing it. The first
            batch is always observed.
        group: the torch.distributed ProcessGroup whose ranks run each forward together: they meet in the
            second one, and get the same policy, which keeps the budget on each (docs/integrations.md).
            "auto": that of the model's DistributedDataParallel or `fully_shard`, and for other models that of
            the collectives in its first forward, if they show one; a warning says if they do not.
            None: each rank plans for itself.
        verify: compare what backward recomputes with what forward saved in every `verify`-th step, and not
            only in the first step of each plan (docs/semantics.md).

    Raises:
        TypeError: `model` is not a module, or one of TorchScript; `optimizer` is not an optimizer or a list
            of them, `policy` not a policy or path, `constraints` not Constraints, `group` not a group,
            or a switch not a bool.
        InvalidBudget: a budget or the headroom is not a number of GiB (one in bytes is refused); or there is
            no budget, and the policy set is empty; or it is for reserved memory, and the model is not on a
            GPU.
        ValueError: `group` is not one of its valid values, or `service` is not a URL.
        ServiceRefused: the service refused the request, such as for a wrong key. From the second training
            forward, which leaves the model without a plan.
        AlreadyApplied: the model, a part of it, or a model that it is part of is planned already.
        MalformedPolicy: `policy` is the path of a file without a policy.
        CheckpointingActive: the model checkpoints itself, and the constraints do not take that over.
        UnsupportedTorch: torch is too old for a compiled model (docs/versions.md). Also from a forward, for
            what `apply` cannot see yet: a model that is compiled later.
        CannotProfile: the model lies on several devices, or partly on the CPU. From a training forward: the
            model is traced, or for one of the reasons in docs/profiling.md.
        CannotCapture: a step is captured into a CUDA graph before its plan is final (docs/gpu.md). From a
            forward, before anything of the model is captured.
        InvalidConstraints: a pattern matches nothing, or constraints contradict each other. From the
            second training forward, which leaves the model without a plan; from `apply` if a policy is given.
        InfeasibleBudget: no plan fits. From the second training forward, which leaves the model without a
            plan.
        SolverOutOfTime: the planner used up its work limit and neither found a plan nor ruled one out. The
            error names the smallest budget for which it found one. From the second forward, as above.
    """
    check_model(model)
    watch_sharding()
    given, model = model, uncompiled(model)  # type: ignore[assignment]
    check_optimizer(optimizer, model)
    check_switches(strict=strict, group=group)
    check_source(budget_gb, policy, service)
    rules = checked_constraints(constraints, planned=policy is not None)
    if budget_gb == "device":
        rules = rules.model_copy(update={"budget_of": "reserved"})
    budget_bytes = check_budget(budget_gb, rules, model)
    finds_host_budget = host_budget_gb == "auto" and budget_bytes is not None and not rules.host_budget_bytes
    if host_budget_gb != "auto":
        rules = with_host_budget(rules, host_budget_gb, budget_bytes)
    check_verify(verify)
    check_unplanned(model, may_checkpoint=rules.take_over_checkpoints)
    if is_called_compiled(given) or compiled_parts(model):
        check_version()
    if policy is None:
        check_one_device(model)
    loaded = _read(policy)
    if isinstance(loaded, PolicySet) and not loaded.buckets and budget_bytes is None:
        raise InvalidBudget("the policy set has no buckets: pass budget_gb=... to fill it")
    here = device_of(model), layout_of(model)
    for difference in dict.fromkeys(other_environment(made, *here) for made in _policies(loaded)):
        if difference:
            where = type(model).__name__, difference
            log.warning("%s: the policy is for %s, so other ops may run, or take other times", *where)
    for predicted in (made.predicted for made in _policies(loaded)):
        if budget_bytes is not None and predicted.peak_bytes > budget_bytes - rules.headroom_bytes:
            raise InvalidBudget(
                "budget_gb less headroom must be at least the policy's peak of "
                f"{format_bytes(predicted.peak_bytes)}, got "
                f"{format_bytes(budget_bytes - rules.headroom_bytes)}: "
                "plan again for less, with `autoac plan` or without policy=..."
            )
    options = ApplyOptions(
        budget_bytes=budget_bytes,
        constraints=rules,
        finds_host_budget=finds_host_budget,
        service=service,
        strict=strict,
        group=group,
        verify=verify,
    )
    Applied(model, options, optimizer=optimizer, policy=loaded)
    return given


def _read(policy: Policy | PolicySet | str | os.PathLike[str] | None) -> Policy | PolicySet | None:
    if policy is None or isinstance(policy, (Policy, PolicySet)):
        return policy
    text = Path(policy).read_bytes()
    kind = PolicySet if f'"{SET_FORMAT}"'.encode() in text[:200] else Policy
    with named(policy):
        return kind.from_json(text)


def _policies(given: Policy | PolicySet | None) -> list[Policy]:
    if isinstance(given, PolicySet):
        return [bucket.policy for bucket in given.buckets]
    return [given] if given is not None else []
