"""Observe one training step and write down what a planner needs to know about it."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoac.planner.formats.profile import Environment, Profile
from autoac.profiler.capture.garbage_collection import heap_frozen, not_collecting
from autoac.profiler.distributed.ddp import buckets_of
from autoac.profiler.distributed.fsdp import check_sharded
from autoac.profiler.errors import (
    CannotProfile,
)
from autoac.profiler.model_device import check_one_device, device_of
from autoac.profiler.static_memory import allocator_rounding, optimizer_bytes, static_bytes
from autoac.profiler.steps import fake, hollow
from autoac.profiler.steps.compare_plain import with_times_of
from autoac.profiler.steps.hollow import HollowStep
from autoac.profiler.steps.training_loop import ONE_FORWARD, Loop, Loss
from autoac.profiler.timing.cache import Measured, Times, machine
from autoac.profiler.timing.on_device import LocalTimes, datasheet_of
from autoac.profiler.timing.op_timer import BETWEEN
from autoac.profiler.timing.roofline import DATASHEETS, Device
from autoac.profiler.to_profile import assemble
from autoac.profiler.torch_facts.private import tree_leaves

Mode = Literal["hollow", "measured", "fake"]


def profile(
    model: nn.Module,
    *args: Any,
    loss: Loss | None = None,
    on: Device | torch.device | None = None,
    mode: Mode | None = None,
    times: Times | str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Profile:
    """Profile one training step `loss(model(*args, **kwargs)).backward()`.

    By default on the model's device, in one hollow step (see hollow.py): no memory for saved activations
    is needed, and parameters, gradients, buffers and generators are afterwards as before. With `on`, on a
    device that need not be here, in one fake step (see fake.py): nothing is allocated, run times are
    estimated from the datasheet, and the model and the batch may be on the meta device.

    The model's own output is taken to be held until the end of backward, as in
    `out = model(batch); out.loss.backward()`.

    Args:
        model: in the mode (`train()`, `eval()`) and under the autocast that training will have.
        args, kwargs: a batch, as the training loop passes it.
        loss: output -> scalar. By default the output's `.loss`, else all of the output that
            requires a gradient.
        on: the datasheet of the device to profile for, such as `DATASHEETS["h100"]`; or a `torch.device`
            that is here: then each kind of op runs there by itself for its time, so the step need not fit.
        mode: "hollow", "measured" or "fake" (docs/profiling.md). "measured" takes a plain step besides, and
            run times from that: it needs the memory of one. By default "fake" with `on`, else "hollow".
        times: where run times are kept, so that they are measured once; or the file's path. By default what
            the environment variable AUTOAC_TIMES names, or none.

    Raises:
        NothingToProfile: nothing requires a gradient.
        ProfilerBusy: torch.profiler is running on this thread.
        ShardsInUse: FSDP holds gradients that are not reduced yet.
        CannotProfile: the model is sharded in a way that docs/ranks.md excludes, has lazy layers, is on meta
            or on several devices without `on`, or runs torch.utils.checkpoint in a way that
            docs/profiling.md excludes; or the device's allocator reports nothing, as CUDA's
            `cudaMallocAsync` and pluggable ones; or a part of the step allocates where torch.profiler does
            not look.
        CannotFake: with `on`, an op needs values that are not known, or a kernel that torch has no fake of.
        Unsteady: with mode="measured", the model took another path the second time.
        ValueError: `mode` and `on` do not go together, or are none; or `on` names a device that is not here.
        TypeError: `model` is no module, or `loss` returned no tensor.
    """
    return observe(model, args, kwargs, loss=loss, on=on, mode=mode, times=times)


@heap_frozen()
def observe(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    on: Device | torch.device | None = None,
    mode: Mode | None = None,
    times: Times | str | os.PathLike[str] | None = None,
    accumulates: bool | None = None,
    loop: Loop = ONE_FORWARD,
) -> Profile:
    """As `profile`, with the state and workspace of `optimizer` counted, in a loop of any form.

    Args:
        model, args, kwargs, loss, on, mode, times: as for `profile`.
        optimizer: one or several; counted as they are, and as they will be after their first step.
        accumulates: gradients are there before the step, as for all microbatches but the first. By
            default what holds for `model` now; True counts them where they are not there yet.
        loop: how many forwards run before one backward, each on a batch like this one, and what becomes of
            their outputs. `loss` gets a list of the outputs where there are several.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"profile takes an nn.Module, and was given a {type(model).__name__}")
    mode = _mode(mode, on)
    _check_made(model)
    check_sharded(model, fake=on is not None)
    if buckets_of(model, None).holds_gradients:
        accumulates = True  # each gradient goes into its bucket, and goes
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    _check_batch(model, leaves)
    inputs = [describe(leaf) for leaf in leaves]
    local: LocalTimes | None = None
    if times is None:
        times = Times.of_environment()
    elif not isinstance(times, Times):
        times = Times(times)
    if isinstance(on, torch.device):
        local = LocalTimes(on, datasheet_of(on), times)
        on = local.sheet
    if on is not None:
        step, notes = fake.run(model, args, kwargs, loss, on, accumulates, local, loop)
        if local is None:
            notes.append(f"run times are estimated from the datasheet of {on.name}")
        else:
            local.keep()
            notes.append(f"measured: run times of {local.kinds} kinds of op, each by itself on {on.name}")
        notes.append("what kernels allocate inside themselves is not known and counts as nothing")
        environment = _environment_on(on, model)
        device = fake.CPU
    else:
        check_one_device(model, args, kwargs)
        device, notes = device_of(model, args, kwargs), []
        if device.type == "meta":
            raise CannotProfile(
                type(model).__name__,
                "it is on the meta device, where no op runs",
                "move it to the device that it trains on (to_empty), or profile it with on=DATASHEETS[...]",
            )
        environment = _environment(model, device)
        step = _observed(
            model, args, kwargs, loss, device, environment, accumulates, mode, times, notes, loop
        )
    needs = optimizer_bytes(optimizer, device, on)
    static = static_bytes(model, args, kwargs, needs.state, device, on, accumulates=accumulates)
    with not_collecting():
        found = assemble(
            step,
            model=type(model).__name__,
            inputs=inputs,
            environment=environment,
            static=static.model_copy(update={"inputs": loop.forwards * static.inputs}),
            optimizer_workspace_nbytes=needs.workspace,
            notes=[*notes, *([needs.note] if needs.note else [])],
        )
    if on is None and times is not None:
        found = _with_kept_backward(found, times, machine(device, environment.device_name))
    return found


def _check_made(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CannotProfile(
                type(model).__name__,
                f"{name} is made in the first forward (a lazy layer)",
                "run one batch through it first, under torch.no_grad() and before ac_client.apply",
            )


def _check_batch(model: nn.Module, leaves: Sequence[Any]) -> None:
    """What a forward reads of an iterator is gone for the next, and for the user's own."""
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise CannotProfile(
                type(model).__name__,
                f"its batch has a {type(leaf).__name__}, which can be read only once, and a profile takes "
                "several forwards",
                "pass a list of what is in it",
            )


def _mode(mode: Mode | None, on: Device | torch.device | None) -> Mode:
    if on is not None and not isinstance(on, (Device, torch.device)):
        raise ValueError(
            f"on={on!r} is no device: pass DATASHEETS[...], of {', '.join(DATASHEETS)}, or a torch.device"
        )
    if (
        isinstance(on, torch.device)
        and on.type != "cpu"
        and not (on.type == "cuda" and torch.cuda.is_available())
    ):
        raise ValueError(
            f"on=torch.device({str(on)!r}) is not here to run ops on: pass DATASHEETS[...] to estimate them"
        )
    if mode is None:
        return "hollow" if on is None else "fake"
    if mode not in ("hollow", "measured", "fake"):
        raise ValueError(f"mode={mode!r} is none of 'hollow', 'measured' and 'fake'")
    if mode == "fake" and on is None:
        raise ValueError(
            "mode='fake' is for another device, or for ops run one by one: pass on=DATASHEETS[...] or "
            "on=torch.device(...) to say for which"
        )
    if mode != "fake" and on is not None:
        raise ValueError(f"mode={mode!r} runs on the model's own device: leave out on=..., or mode=...")
    return mode


def _observed(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Loss | None,
    device: torch.device,
    environment: Environment,
    accumulates: bool | None,
    mode: Mode,
    times: Times | None,
    notes: list[str],
    loop: Loop,
) -> HollowStep:
    """A hollow step with run times of its own, of a plain step, or of the file; adds to `notes`."""
    here = machine(device, environment.device_name)
    known: dict[Hashable, Measured] = {}

    def look_up(signatures: Set[Hashable]) -> Mapping[Hashable, Measured]:
        known.update(times.ops(here, signatures) if times is not None else {})
        return dict(known)

    if mode == "measured":
        # A plain step does not show what Python holds without autograd; a hollow one before it does.
        hollow_step = hollow.run(
            model, args, kwargs, loss, device, accumulates=accumulates, time_ops=False, loop=loop
        )
        plain = hollow.run(
            model, args, kwargs, loss, device, accumulates=accumulates, keep=True, known=look_up, loop=loop
        )
        step = with_times_of(hollow_step, plain)
        above = max([0, *accumulate(change.nbytes for change in plain.allocations.changes)])
        notes.append(f"measured: a plain step held {above} bytes at most beside what was there before")
    else:
        step = hollow.run(
            model, args, kwargs, loss, device, accumulates=accumulates, known=look_up, loop=loop
        )
    fresh = {signature: row for signature, row in step.measured.items() if signature not in known}
    if times is not None:
        times.keep_ops(here, fresh)
    kinds = len(step.measured) - (BETWEEN in step.measured)
    once = sum(samples == 1 for key, (_, _, samples) in step.measured.items() if key is not BETWEEN)
    said = f"measured: run times of {kinds} kinds of op"
    notes.append(f"{said}; {once} of them were seen once" if once else said)
    return step


def _with_kept_backward(found: Profile, times: Times, here: str) -> Profile:
    """The profile with the run times that its backward was once measured with."""
    kept = times.backward(here, found.fingerprint, len(found.backward))
    if kept is None:
        times.keep_backward(here, found.fingerprint, found.backward.runtime_us)
        return found
    backward = found.backward.model_copy(update={"runtime_us": tuple(kept)})
    return found.model_copy(update={"backward": backward})


def device_name(device: torch.device) -> str:
    """What a profile calls a device that is here."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe(leaf: Any) -> str:
    """A leaf of the batch as a profile names it: `int64[4, 128]`."""
    if isinstance(leaf, Tensor):
        if leaf.is_nested:
            return "nested"
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return type(leaf).__name__


def _environment(model: nn.Module, device: torch.device) -> Environment:
    return _environment_of(
        model,
        device.type,
        device_name(device),
        allocator_rounding(device),
        torch.get_num_threads() if device.type == "cpu" else 0,
    )


def _environment_on(device: Device, model: nn.Module) -> Environment:
    found = _environment_of(
        model, device.device_type, f"{device.name} (estimated)", device.allocator_rounding, 0
    )
    # A fake step is the same on every build of one torch: "2.13.0+cpu" and "2.13.0+cu130" are no difference.
    return found.model_copy(update={"torch": found.torch.partition("+")[0]})


def _environment_of(
    model: nn.Module, device_type: str, device_name: str, rounding: int, threads: int
) -> Environment:
    parameter = next(iter(model.parameters()), None)
    autocast = torch.is_autocast_enabled(device_type)
    return Environment(
        torch=torch.__version__,
        device_type=device_type,
        device_name=device_name,
        dtype=str(parameter.dtype).removeprefix("torch.") if parameter is not None else "none",
        autocast=str(torch.get_autocast_dtype(device_type)).removeprefix("torch.") if autocast else "off",
        allocator_rounding=rounding,
        threads=threads,
    )
