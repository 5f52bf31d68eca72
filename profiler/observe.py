"""Profile one training step: everything about it that a planner needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoac.planner.formats.profile import Profile
from autoac.profiler import fake_step
from autoac.profiler.autocast import autocast_to, may_be_switched_off
from autoac.profiler.environment import describe_leaf, environment_of_datasheet
from autoac.profiler.model_device import check_no_lazy_layers, device_of_step
from autoac.profiler.observed_step import ObservedStep
from autoac.profiler.step_profile import profile_of
from autoac.profiler.steps.tensor_state import tensors_restored
from autoac.profiler.steps.training_loop import ONE_FORWARD, Loop, Loss, TrainingStep
from autoac.profiler.timing.cache import Times
from autoac.profiler.timing.on_device import OpTimesOnDevice, datasheet_of
from autoac.profiler.timing.roofline import DATASHEETS, Device
from autoac.tape.capture.garbage_collection import frozen_heap
from autoac.tape.checkpoints.own_checkpoints import checkpoints_left_alone
from autoac.tape.distributed.ddp import buckets_of, build_replicating
from autoac.tape.distributed.fsdp import check_reduced, check_sharded, parameters_of
from autoac.tape.errors import CannotProfile
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.private import disable_current_modes, tree_leaves
from autoac.tape.torch_facts.rng import generators_restored


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

    By default, run one *observed* step on the model's device: forward and backward once, for real, with about
    the memory of a checkpoint around each block (observed_step.py). Gradients, buffers and generators are
    then as before. All else that a forward changes stays changed: this is one step of the model, so counters,
    caches and logs of its forward, its batch, and parameters that it writes itself see one more call. Hooks
    that run when a gradient is complete, such as an optimizer in backward, are not called. Under
    DistributedDataParallel or `fully_shard`, every rank must call this function, since the step communicates.

    With `on`, run one fake step (fake_step.py) for a device that need not be here. It allocates nothing and
    estimates run times from the datasheet, and the model and the batch may be on the meta device.

    The profile assumes that the model's output is held until the end of backward, as in
    `out = model(batch); out.loss.backward()`.

    Args:
        model: in the mode (`train()`, `eval()`) and under the autocast of training.
        args, kwargs: a batch, as the training loop passes it.
        loss: output -> scalar. By default the output's `.loss`, else every part of the output that
            requires a gradient.
        on: the datasheet of a device, such as `DATASHEETS["h100"]`, under `fake_ranks` that of one rank of
            many; or a `torch.device` of this machine, on which each kind of op then runs by itself to be
            timed, so the step need not fit.
        times: the cache of run times, or the path of its file. By default the file named by the environment
            variable AUTOAC_TIMES, if any.
        autocast: the type that the step is cast to, as under `torch.autocast`. By default that of the
            autocast around this call. Without a GPU, torch switches `torch.autocast("cuda")` off.
        take_over_checkpoints: as for `ac_client.apply`.

    Raises:
        NothingToProfile: nothing requires a gradient.
        ProfilerBusy: torch.profiler is running on this thread, or FSDP holds gradients that are not reduced.
        CannotProfile: the model is sharded in a way that docs/integrations.md excludes, has lazy layers, or
            is on meta or on several devices without `on`; or the device's allocator reports nothing, as
            CUDA's `cudaMallocAsync` and pluggable ones; or a part of the step allocates on a thread that
            torch.profiler does not watch.
        CannotFake: with `on`, an op needs values that are not known, or a kernel that torch has no fake of.
        ValueError: `on` is neither a datasheet nor a device, or that device is not here.
        TypeError: `model` is not a module, or `loss` did not return a tensor.
    """
    return observe(
        model,
        args,
        kwargs,
        loss=loss,
        on=on,
        times=times,
        autocast=autocast,
        take_over_checkpoints=take_over_checkpoints,
    )


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
    take_over_checkpoints: bool = True,
) -> Profile:
    """Profile one training step of the loop that `loop` describes, and count the memory of `optimizer`.

    Args:
        model, args, kwargs, loss, on, times, autocast, take_over_checkpoints: as for `profile`.
        optimizer: one or several, which do not step. The state counts with its present bytes, or with those
            after two steps if these are more. The workspace is what the optimizer's step allocates for a
            while.
        accumulates: True if gradients exist before the step, as for every microbatch but the first. By
            default, True if a parameter of `model` has a gradient now.
        loop: how many forwards run before one backward, each on a batch like this one, and which outputs are
            held. With several forwards, `loss` gets a list of their outputs.

    The step is put back as by `profile`. Gradients that exist are copied, and counted once.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got a {type(model).__name__}")
    _check_on(on)
    subject = TrainingStep(model, args, kwargs, loss, accumulates, loop)
    if times is None:
        times = Times.of_environment()
    elif not isinstance(times, Times):
        times = Times(times)
    with nullcontext() if take_over_checkpoints else checkpoints_left_alone(needed=on is None):
        if on is not None:
            return _fake_profile(subject, on, times, autocast, optimizer)
        device = device_of_step(model, args, kwargs)
        with autocast_to(device.type, autocast):
            step = _observed(subject, device, needs_checkpoints=False)
            if step.needs_checkpoints:
                step = _observed(subject, device, needs_checkpoints=True)
    return step.profile(model, optimizer, times).with_dropped_outputs(loop.drops)


def _observed(subject: TrainingStep, device: torch.device, *, needs_checkpoints: bool) -> ObservedStep:
    """Run a step of `subject`, and put gradients, buffers and generators back."""
    model, args, kwargs = subject.compiled, subject.args, subject.kwargs
    build_replicating(model)
    check_reduced(model)
    in_buckets = buckets_of(model, None).holds_gradients
    with (
        generators_restored(device),
        torch.enable_grad(),
        tensors_restored(
            model,
            [*parameters_of(model), *batch_tensors((*args, *kwargs.values()))],
            accumulates=in_buckets or subject.accumulates is not False,
            missing=bool(subject.accumulates) and not in_buckets,
        ) as note_leaves,
    ):
        step = ObservedStep(model, args, kwargs, device, needs_checkpoints=needs_checkpoints)
        step.run(subject, note_leaves)
    return step


def _fake_profile(
    subject: TrainingStep,
    on: Device | torch.device,
    times: Times | None,
    autocast: torch.dtype | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Profile:
    model, leaves = subject.compiled, tree_leaves((tuple(subject.args), dict(subject.kwargs)))
    check_no_lazy_layers(model)
    check_sharded(model, fake=True)
    _check_no_iterators(model, leaves)
    if buckets_of(model, None).holds_gradients:
        subject = replace(subject, accumulates=True)
    with disable_current_modes():  # which may be those of `fake_ranks`
        datasheet = on if isinstance(on, Device) else datasheet_of(on)
    measured = None if isinstance(on, Device) else OpTimesOnDevice(on, datasheet, times)
    is_off = datasheet.device_type == "cuda" and autocast is None and may_be_switched_off()
    with autocast_to(datasheet.device_type, autocast):
        environment = environment_of_datasheet(model, datasheet)
        step, notes = fake_step.run(subject, datasheet, measured)
    if is_off:
        notes.append("autocast is off: without a GPU, torch.autocast('cuda') needs autocast=... here")
    if measured is None:
        notes.append(f"run times are estimated from the datasheet of {datasheet.name}")
    else:
        measured.keep()
        kinds = measured.kinds
        notes.append(f"measured: run times of {kinds} kinds of op, each by itself on {datasheet.name}")
    notes.append("what kernels allocate inside themselves is not known and counts as nothing")
    inputs = [describe_leaf(leaf) for leaf in leaves]
    return profile_of(subject, step, notes, inputs, environment, fake_step.CPU, datasheet, optimizer)


def _check_no_iterators(model: nn.Module, leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise CannotProfile(
                type(model).__name__,
                f"its batch has a {type(leaf).__name__}, which can be read only once, and a fake step would "
                "read it",
                "pass a list of its items",
            )


def _check_on(on: Device | torch.device | None) -> None:
    is_here = isinstance(on, torch.device) and (
        on.type == "cpu" or (on.type == "cuda" and torch.cuda.is_available())
    )
    if not (on is None or isinstance(on, Device) or is_here):
        raise ValueError(
            f"on must be an entry of DATASHEETS, or a torch.device of this machine, to run ops, got {on!r}; "
            f"pass DATASHEETS[name] with a name of {', '.join(DATASHEETS)}"
        )
