"""Profile one training step: everything about it that a planner needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoac.planner.formats.profile import Environment, Profile, StaticBytes
from autoac.profiler.autocast import autocast_to, may_be_switched_off
from autoac.profiler.capture.garbage_collection import frozen_heap, no_garbage_collection
from autoac.profiler.checkpoints.own_checkpoints import checkpoints_left_alone
from autoac.profiler.distributed.ddp import buckets_of, build_replicating
from autoac.profiler.distributed.fsdp import check_sharded
from autoac.profiler.environment import describe_leaf, environment_of_datasheet, environment_of_device
from autoac.profiler.errors import CannotProfile
from autoac.profiler.model_device import check_one_device, device_of
from autoac.profiler.static_memory import optimizer_bytes, static_bytes, workspace_bytes
from autoac.profiler.steps import fake, hollow
from autoac.profiler.steps.hollow import StepRecord
from autoac.profiler.steps.training_loop import ONE_FORWARD, Loop, Loss, TrainingStep
from autoac.profiler.timing.cache import OpTime, Times, machine
from autoac.profiler.timing.on_device import OpTimesOnDevice, datasheet_of
from autoac.profiler.timing.op_timer import BETWEEN_OPS
from autoac.profiler.timing.roofline import DATASHEETS, Device
from autoac.profiler.to_profile import assemble
from autoac.profiler.torch_facts.inductor import backend_of_plans, is_called_compiled, uncompiled
from autoac.profiler.torch_facts.private import tree_leaves
from autoac.profiler.torch_facts.probes import check_torch

log = logging.getLogger("autoac.profiler")


def profile(
    model: nn.Module,
    *args: Any,
    loss: Loss | None = None,
    on: Device | torch.device | None = None,
    times: Times | str | os.PathLike[str] | None = None,
    autocast: torch.dtype | None = None,
    take_over_checkpoints: bool = True,
    **kwargs: Any,
) -> Profile:
    """Profile one training step `loss(model(*args, **kwargs)).backward()`.

    By default, run one hollow step on the model's device (see hollow.py). It needs no memory for saved
    activations, and leaves parameters, gradients, buffers and generators as they were. With `on`, run one
    fake step (see fake.py) for a device that need not be here. It allocates nothing and estimates run times
    from the datasheet, and the model and the batch may be on the meta device.

    The profile assumes that the model's output is held until the end of backward, as in
    `out = model(batch); out.loss.backward()`.

    Args:
        model: in the mode (`train()`, `eval()`) and under the autocast of training.
        args, kwargs: a batch, as the training loop passes it.
        loss: output -> scalar. By default the output's `.loss`, else every part of the output that
            requires a gradient.
        on: the datasheet of a device, such as `DATASHEETS["h100"]`; or a `torch.device` of this machine, on
            which each kind of op then runs by itself to be timed, so the step need not fit.
        times: the cache of run times, or the path of its file. By default the file named by the environment
            variable AUTOAC_TIMES, if any.
        autocast: the type that the step is cast to, as under `torch.autocast`. By default that of the
            autocast around this call. Without a GPU, torch switches `torch.autocast("cuda")` off.
        take_over_checkpoints: as for `ac_client.apply`.

    Raises:
        NothingToProfile: nothing requires a gradient.
        ProfilerBusy: torch.profiler is running on this thread.
        ShardsInUse: FSDP holds gradients that are not reduced yet.
        CannotProfile: the model is sharded in a way that docs/integrations.md excludes, has lazy layers, is
            on meta or on several devices without `on`, or uses torch.utils.checkpoint in a way that
            docs/profiling.md excludes; or the device's allocator reports nothing, as CUDA's
            `cudaMallocAsync` and pluggable ones; or a part of the step allocates on a thread that
            torch.profiler does not watch.
        CannotFake: with `on`, an op needs values that are not known, or a kernel that torch has no fake of.
        UnsupportedTorch: torch lacks a name that the step needs, or behaves in another way.
        ValueError: `on` is neither a datasheet nor a device, or that device is not here.
        TypeError: `model` is not a module, or `loss` did not return a tensor.
    """
    with nullcontext() if take_over_checkpoints else checkpoints_left_alone():
        return observe(model, args, kwargs, loss=loss, on=on, times=times, autocast=autocast)


@frozen_heap()
def observe(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    on: Device | torch.device | None = None,
    times: Times | str | os.PathLike[str] | None = None,
    autocast: torch.dtype | None = None,
    accumulates: bool | None = None,
    loop: Loop = ONE_FORWARD,
) -> Profile:
    """Profile one training step of the loop that `loop` describes, and count the memory of `optimizer`.

    Args:
        model, args, kwargs, loss, on, times, autocast: as for `profile`.
        optimizer: one or several. The state counts with its present bytes, or with those after two steps if
            these are more. The workspace is what the optimizer's step allocates for a while.
        accumulates: True if gradients exist before the step, as for every microbatch but the first. By
            default, True if a parameter of `model` has a gradient now.
        loop: how many forwards run before one backward, each on a batch like this one, and which outputs are
            held. With several forwards, `loss` gets a list of their outputs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got a {type(model).__name__}")
    check_torch()
    _check_on(on)
    _check_no_lazy_layers(model)
    if on is None:
        build_replicating(model)
    check_sharded(model, fake=on is not None)
    if buckets_of(model, None).holds_gradients:
        accumulates = True  # each gradient is copied into its bucket, and freed
    subject = TrainingStep(model, args, kwargs, loss, accumulates, loop)
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    _check_no_iterators(model, leaves)
    inputs = [describe_leaf(leaf) for leaf in leaves]
    if times is None:
        times = Times.of_environment()
    elif not isinstance(times, Times):
        times = Times(times)
    if on is None:
        device, datasheet = device_of(model, args, kwargs), None
        check_one_device(model, args, kwargs)
        if device.type == "meta":
            raise CannotProfile(
                type(model).__name__,
                "it is on the meta device, where no op runs",
                "move it to the device that it trains on (to_empty), or plan it without one: "
                "autoac.profiler.profile(model, ..., on=DATASHEETS[...])",
            )
        with autocast_to(device.type, autocast):
            environment = environment_of_device(model, device)
            step, notes = _real_step(subject, device, environment, times)
    else:
        device = fake.CPU
        datasheet = on if isinstance(on, Device) else datasheet_of(on)
        measured = None if isinstance(on, Device) else OpTimesOnDevice(on, datasheet, times)
        is_off = datasheet.device_type == "cuda" and autocast is None and may_be_switched_off()
        with autocast_to(datasheet.device_type, autocast):
            environment = environment_of_datasheet(model, datasheet)
            step, notes = fake.run(subject, datasheet, measured)
        if is_off:
            notes.append("autocast is off: without a GPU, torch.autocast('cuda') needs autocast=... here")
        if measured is None:
            notes.append(f"run times are estimated from the datasheet of {datasheet.name}")
        else:
            measured.keep()
            kinds = measured.kinds
            notes.append(f"measured: run times of {kinds} kinds of op, each by itself on {datasheet.name}")
        notes.append("what kernels allocate inside themselves is not known and counts as nothing")
    result = profile_of(subject, step, notes, inputs, environment, device, datasheet, optimizer)
    if on is None and times is not None:
        result = _with_cached_backward(result, times, machine(device, environment.device_name))
    return result


def profile_of(
    subject: TrainingStep,
    step: StepRecord,
    notes: list[str],
    inputs: Sequence[str],
    environment: Environment,
    device: torch.device,
    datasheet: Device | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    static: StaticBytes | None = None,
) -> Profile:
    """Return the Profile of `step`, the records of one step of `subject`.

    Args:
        static: as the step began, without the state of optimizers, if `subject` has changed since.
    """
    model, args, kwargs = subject.compiled, subject.args, subject.kwargs
    accumulates, loop = subject.accumulates, subject.loop
    if is_called_compiled(model) and not any(op.compiled for op in step.forward.ops):
        notes.append(
            f"nothing can be recomputed: the backend {backend_of_plans()!r} gave no graph of the model to "
            "AOTAutograd. Compile with backend='inductor' or 'aot_eager', or plan it uncompiled"
        )
        log.warning("%s: %s", type(uncompiled(model)).__name__, notes[-1])
    needs = optimizer_bytes(optimizer, device, datasheet)
    if static is None:
        static = static_bytes(model, args, kwargs, 0, device, datasheet, accumulates=accumulates)
    workspaces = sum(block.nbytes for block in step.workspaces)
    if datasheet is not None:
        workspaces = workspace_bytes((op.facts.name for op in step.forward.ops), datasheet)
    with no_garbage_collection():
        return assemble(
            step,
            model=type(uncompiled(model)).__name__,
            inputs=inputs,
            environment=environment,
            static=static.model_copy(
                update={
                    "inputs": loop.forwards * static.inputs,
                    "workspaces": workspaces,
                    "optimizer_state": needs.state,
                }
            ),
            optimizer_workspace_nbytes=needs.workspace,
            notes=[*notes, *([needs.note] if needs.note else [])],
        ).with_dropped_outputs(loop.drops)


def _check_no_lazy_layers(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CannotProfile(
                type(model).__name__,
                f"{name} is created in the first forward (a lazy layer)",
                "run one batch through the model first, under torch.no_grad() and before ac_client.apply",
            )


def _check_no_iterators(model: nn.Module, leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise CannotProfile(
                type(model).__name__,
                f"its batch has a {type(leaf).__name__}, which can be read only once, and a profile runs "
                "several forwards",
                "pass a list of its items",
            )


def _check_on(on: Device | torch.device | None) -> None:
    if on is not None and not isinstance(on, (Device, torch.device)):
        raise ValueError(
            f"on must be a torch.device or an entry of DATASHEETS, got {on!r}; pass "
            f"DATASHEETS[name] with a name of {', '.join(DATASHEETS)}"
        )
    if (
        isinstance(on, torch.device)
        and on.type != "cpu"
        and not (on.type == "cuda" and torch.cuda.is_available())
    ):
        raise ValueError(
            f"on must be a device of this machine, to run ops, got torch.device({str(on)!r}); pass "
            "DATASHEETS[...] to estimate run times"
        )


def _real_step(
    subject: TrainingStep,
    device: torch.device,
    environment: Environment,
    times: Times | None,
) -> tuple[StepRecord, list[str]]:
    """Run a hollow step. Return it with notes."""
    here = machine(device, environment.device_name)
    known: dict[Hashable, OpTime] = {}
    notes: list[str] = []

    def look_up(signatures: Set[Hashable]) -> Mapping[Hashable, OpTime]:
        known.update(times.ops(here, signatures) if times is not None else {})
        return dict(known)

    step = hollow.run(subject, device, known=look_up)
    if times is not None:
        times.keep_ops(here, {key: row for key, row in step.op_times.items() if key not in known})
    kinds = step.op_times.keys() - {BETWEEN_OPS}
    single = sum(step.op_times[key][2] == 1 for key in kinds)
    suffix = f"; {single} of them have one sample" if single else ""
    notes.append(f"measured: run times of {len(kinds)} kinds of op{suffix}")
    notes += step.unplanned
    if step.timing_note:
        notes.append(step.timing_note)
    return step, notes


def _with_cached_backward(result: Profile, times: Times, here: str) -> Profile:
    """Return the profile with the cached run times of backward. If there are none, cache the profile's."""
    cached = times.backward(here, result.fingerprint, len(result.backward))
    if cached is None:
        times.keep_backward(here, result.fingerprint, result.backward.runtime_us)
        return result
    backward = result.backward.model_copy(update={"runtime_us": tuple(cached)})
    return result.model_copy(update={"backward": backward})
