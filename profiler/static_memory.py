"""What occupies the device whatever is planned: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoac.planner.formats.profile import StaticBytes
from autoac.planner.units import rounded_bytes
from autoac.profiler.distributed.ddp import buckets_of
from autoac.profiler.distributed.fsdp import local, parameters_of
from autoac.profiler.timing.roofline import Device
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.batch_contents import batch_tensors
from autoac.profiler.torch_facts.gradients import gradient_of
from autoac.profiler.torch_facts.op_signature import outputs_of
from autoac.profiler.torch_facts.private import (
    DataDependentOutputException,
    FakeTensorMode,
    TorchDispatchMode,
    tree_leaves,
)
from autoac.profiler.torch_facts.storage_table import StorageTable, has_storage_or_fake


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """What an optimizer needs on the device."""

    state: int
    workspace: int  # most that a step holds beside state, parameters and gradients
    note: str = ""  # what had to be guessed


def static_bytes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer_state: int,
    device: torch.device,
    on: Device | None = None,
    *,
    accumulates: bool | None = None,
) -> StaticBytes:
    """Count each storage on `device` once, or each storage at all as if it were on `on`.

    In bytes, as the allocator rounds them. With `accumulates` every parameter that wants a gradient is
    taken to have one. The buckets of DistributedDataParallel count as gradients, and of what FSDP
    shards what this rank holds.
    """
    seen: set[int] = set()
    rounding = allocator_rounding(device) if on is None else on.allocator_rounding

    def count(tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not has_storage_or_fake(tensor := local(tensor)):
                continue
            if on is None and tensor.device.type != device.type:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += rounded_bytes(storage.nbytes(), rounding)
        return total

    parameters = list(parameters_of(model))
    buckets = buckets_of(model, device if on is None else None)
    to_come = sum(
        rounded_bytes(local(parameter).nbytes, rounding)
        for parameter in parameters
        if parameter.requires_grad and gradient_of(parameter) is None
        if on is not None or parameter.device.type == device.type
    )
    return StaticBytes(
        parameters=count(parameters),
        buffers=count(model.buffers()),
        gradients=count(gradient_of(p) for p in parameters)
        + (to_come if accumulates else 0)
        + (0 if buckets.holds_gradients else buckets.nbytes),
        optimizer_state=optimizer_state,
        inputs=count(batch_tensors((*args, *kwargs.values()))),
    )


def allocator_rounding(device: torch.device) -> int:
    """Sizes on `device` are multiples of this: 512 bytes on CUDA."""
    return 512 if device.type == "cuda" else 1


def optimizer_bytes(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    device: torch.device,
    on: Device | None = None,
) -> OptimizerBytes:
    """State and workspace of `optimizer` on `device`, also before its first step.

    In bytes, as the allocator rounds them. Several optimizers step one after the other.
    Runs two steps of a copy of each on fake tensors, which allocates nothing. Where one looks at a number
    (Adafactor at norms), it finds a one. With `on`, its parameters are taken to be there, wherever they are.
    """
    if optimizer is None:
        return OptimizerBytes(0, 0)
    if isinstance(optimizer, Sequence):
        several = [optimizer_bytes(one, device, on) for one in optimizer]
        return OptimizerBytes(
            sum(one.state for one in several),
            max((one.workspace for one in several), default=0),
            "; ".join(one.note for one in several if one.note),
        )
    optimizer = innermost(optimizer)
    existing = optimizer_state_nbytes(optimizer, device)
    try:
        state, workspace = _fake_step(optimizer, device, on)
    except Exception as error:  # noqa: BLE001 - the optimizer is the user's code; its own step is the judge
        note = f"{type(optimizer).__name__} could not be run on fake tensors ({type(error).__name__})"
        return OptimizerBytes(existing, 0, f"{note}: only its state so far is counted")
    return OptimizerBytes(max(existing, state), workspace)


def optimizer_state_nbytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of the state that `optimizer` has now, as the allocator rounds them."""
    states = innermost(optimizer).state.values()
    return _state_nbytes(states, device.type, allocator_rounding(device))


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What an optimizer of accelerate or Lightning wraps.

    Their `param_groups` and `state` are those of the wrapped one, also when they are set: a copy of the
    wrapper that is given others would give them to the wrapped one.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _state_nbytes(states: Iterable[Any], device_type: str, rounding: int) -> int:
    return sum(
        rounded_bytes(leaf.untyped_storage().nbytes(), rounding)
        for leaf in map(local, filter(torch.is_tensor, tree_leaves(list(states))))
        if leaf.device.type == device_type and leaf.layout is torch.strided
    )


def _fake_step(optimizer: torch.optim.Optimizer, device: torch.device, on: Device | None) -> tuple[int, int]:
    """Bytes of state and of workspace. Fake tensors may be on a device that is not here."""
    device_type = device.type if on is None else on.device_type
    rounding = allocator_rounding(device) if on is None else on.allocator_rounding
    twin = copy.copy(optimizer)
    with FakeTensorMode(allow_non_fake_inputs=True):
        groups = []
        stands_for: dict[Tensor, int] = {}  # fake parameter -> how many real ones
        for group in optimizer.param_groups:
            fakes: list[nn.Parameter] = []
            alike: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                held = local(parameter)
                kind = held.size(), held.stride(), held.dtype, held.device, parameter.requires_grad
                same = alike.setdefault(kind, [])
                if len(same) == ALIKE and _updates_one_by_one(optimizer, group, device_type):
                    stands_for[same[-1]] += 1
                    continue
                fake = nn.Parameter(
                    torch.empty_strided(
                        held.size(),
                        held.stride(),
                        dtype=held.dtype,
                        device=held.device if on is None else device_type,
                    )
                )
                if parameter.requires_grad:
                    fake.grad = torch.empty_like(fake)
                fakes.append(fake)
                same.append(fake)
                stands_for[fake] = 1
            chosen = {"foreach": True} if _chooses_foreach(group, fakes) else {}
            groups.append({**group, **chosen, "params": fakes})
        twin.param_groups = groups
        twin.state = defaultdict(dict)
        twin._optimizer_step_pre_hooks = {}
        twin._optimizer_step_post_hooks = {}
        with torch.no_grad(), _Workspace(device_type, rounding) as first:
            type(optimizer).step(twin)  # makes the state
        with torch.no_grad(), _Workspace(device_type, rounding) as second:
            type(optimizer).step(twin)
        made = {fake: _state_nbytes([state], device_type, rounding) for fake, state in twin.state.items()}
        # The state is counted as there from the beginning, so of the first step what is more than that.
        workspace = max(second.peak, first.peak - sum(made.values()))
        return sum(nbytes * stands_for.get(fake, 1) for fake, nbytes in made.items()), workspace


ALIKE = 2  # equal parameters of a group that are updated for all of them, where one comes after the other


def _updates_one_by_one(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device_type: str) -> bool:
    """Return True if each parameter of `group` is surely updated by itself, as torch does on a CPU."""
    return (
        f"{type(optimizer).__module__}.".startswith("torch.optim.")
        and device_type == "cpu"
        and not group.get("foreach")
        and not group.get("fused")
    )


def _chooses_foreach(group: Mapping[str, Any], fakes: Sequence[Tensor]) -> bool:
    """Whether torch, where it has the choice, updates all tensors of `group` at once, as it does on a GPU.

    That needs copies of them all. For fake tensors it never chooses so, whatever it does for those that
    they stand for. `fakes` are on the device that is meant.

    Source: `_default_to_fused_or_foreach` in torch/optim/optimizer.py, and `adam` in torch/optim/adam.py.
    """
    if "foreach" not in group or group["foreach"] is not None or group.get("fused") is not None:
        return False  # it has no choice
    if group.get("differentiable") or (isinstance(group.get("lr"), Tensor) and not group.get("capturable")):
        return False
    return all(type(p) in private.foreach_supported_types for p in group["params"]) and all(
        fake.device.type in private.get_foreach_kernels_supported_devices() for fake in fakes
    )


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point or dtype.is_complex else 1


class _Workspace(TorchDispatchMode):
    """The most bytes of tensors made inside it that are live at once. A number that is not known is one."""

    def __init__(self, device_type: str, rounding: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._rounding = rounding
        self._table: StorageTable[bool] = StorageTable()
        self._live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return _one(args[0].dtype)
        inputs = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor) and t.layout is torch.strided
        }
        for tensor in outputs_of(out):
            if tensor.layout is not torch.strided or tensor.device.type != self._device_type:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in inputs or self._table.get(tensor):
                continue
            self._table.set(tensor, True)
            nbytes = rounded_bytes(storage.nbytes(), self._rounding)
            self._live += nbytes
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._freed, nbytes)
        return out

    def _freed(self, nbytes: int) -> None:
        self._live -= nbytes
