"""Count the bytes that no plan can change: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoac.planner.formats.profile import Profile, StaticBytes
from autoac.planner.units import rounded_bytes
from autoac.profiler.timing.on_device import cache_overwriter, least_s
from autoac.profiler.timing.roofline import Device
from autoac.tape.distributed.ddp import buckets_of
from autoac.tape.distributed.fsdp import local, parameters_of
from autoac.tape.distributed.wrapped_tensors import with_memory, wraps_others
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.gradients import gradient_of
from autoac.tape.torch_facts.op_signature import outputs_of
from autoac.tape.torch_facts.private import (
    DataDependentOutputException,
    FakeTensorMode,
    TorchDispatchMode,
    tree_leaves,
    tree_map,
)
from autoac.tape.torch_facts.rng import generators_restored
from autoac.tape.torch_facts.storage_table import StorageTable

ONLY_PRESENT_STATE = "only its present state is counted"


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Bytes that an optimizer needs on the device."""

    state: int  # during the whole step
    # Most bytes that its step holds in addition: temporaries, and state that is elsewhere between steps.
    workspace: int
    note: str = ""  # on estimates

    def less(self, nbytes: int) -> OptimizerBytes:
        """Return what is needed where `nbytes` of static bytes are freed before the optimizer steps."""
        return replace(self, workspace=max(0, self.workspace - nbytes)) if nbytes else self

    def counted_in(self, profile: Profile) -> Profile:
        """Return `profile` with these bytes."""
        static = profile.static.model_copy(update={"optimizer_state": self.state})
        notes = tuple(filter(None, dict.fromkeys((*profile.notes, self.note))))
        changed = {"static": static, "optimizer_workspace_nbytes": self.workspace, "notes": notes}
        return profile.model_copy(update=changed)


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
    """Count each storage on `device` once; with `on`, count every storage as if it were on that device.

    Bytes are rounded as the allocator rounds them. With `accumulates`, every parameter that requires a
    gradient counts as if it had one. The buckets of DistributedDataParallel count as gradients. Of sharded
    parameters, only this rank's shard counts.
    """
    seen: dict[int, int] = {}
    rounding = allocator_rounding(device) if on is None else on.allocator_rounding

    def count(tensors: Iterable[Any]) -> int:
        found = _storages(tensors, device.type if on is None else None)
        more = {storage: nbytes for storage, nbytes in found.items() if storage not in seen}
        seen.update(more)
        return sum(rounded_bytes(nbytes, rounding) for nbytes in more.values())

    parameters = list(parameters_of(model))
    buckets = buckets_of(model, device if on is None else None)
    missing_gradients = sum(
        rounded_bytes(local(parameter).nbytes, rounding)
        for parameter in parameters
        if parameter.requires_grad and gradient_of(parameter) is None
        if on is not None or parameter.device.type == device.type
    )
    return StaticBytes(
        parameters=count(parameters),
        buffers=count(model.buffers()),
        gradients=count(gradient_of(p) for p in parameters)
        + (missing_gradients if accumulates else 0)
        + (0 if buckets.holds_gradients else rounded_bytes(buckets.nbytes, rounding)),
        optimizer_state=optimizer_state,
        inputs=count(batch_tensors((*args, *kwargs.values()))),
        workspaces=0,
    )


# Ops that call cuBLAS. A convolution calls cuDNN.
_PRODUCTS = tuple(
    f"aten.{name}." for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
)


def workspace_bytes(ops: Iterable[str], on: Device) -> int:
    """Return the bytes of the workspaces that libraries of matrix products (cuBLAS) keep on a GPU.

    There is one for each thread: one for forward, and one for backward, which runs on another thread.
    """
    multiplies = any(op.startswith(_PRODUCTS) for op in ops)
    return 2 * rounded_bytes(on.workspace_nbytes, on.allocator_rounding) if multiplies else 0


def allocator_rounding(device: torch.device) -> int:
    """Return the bytes to a multiple of which the allocator of `device` rounds sizes: 512 on CUDA, else 1."""
    return 512 if device.type == "cuda" else 1


def optimizer_bytes(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    device: torch.device,
    on: Device | None = None,
) -> OptimizerBytes:
    """Return state and workspace of `optimizer` on `device`, also before its first step.

    Two steps of a copy run on fake tensors, which allocates nothing. If an optimizer reads a number, as
    Adafactor reads norms, the number is 1. Several optimizers step one after another. With `on`, the
    parameters count as if they were on that device. Bytes are rounded as the allocator rounds them.
    """
    needs = [bytes_of_one(one, device, on) for one in unwrapped(optimizer)]
    return OptimizerBytes(
        sum(one.state for one in needs),
        max((one.workspace for one in needs), default=0),
        "; ".join(one.note for one in needs if one.note),
    )


def bytes_of_one(
    optimizer: torch.optim.Optimizer, device: torch.device, on: Device | None = None
) -> OptimizerBytes:
    """Return what `optimizer_bytes` returns of one that is unwrapped."""
    rounding = allocator_rounding(device)
    existing = memory_nbytes(_state_of(optimizer), device.type, rounding)
    if _held_by(optimizer):
        return OptimizerBytes(existing, 0)  # its step is that of the others
    try:
        state, workspace = _fake_step(optimizer, device, on)
    except Exception as error:  # noqa: BLE001 - the optimizer is the user's code, and may run on real tensors
        if on is not None and on.device_type != "cpu":  # which it may look for
            return bytes_of_one(optimizer, device, replace(on, device_type="cpu"))
        note = f"{type(optimizer).__name__} could not be run on fake tensors ({type(error).__name__})"
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        complete = all(parameter in optimizer.state for parameter in trained)
        missing = "what its step needs besides its state is not counted" if complete else ONLY_PRESENT_STATE
        return OptimizerBytes(existing, 0, f"{note}: {missing}")
    return OptimizerBytes(max(existing, state), workspace)


def optimizer_state_nbytes(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> int:
    """Return the bytes of the state that unwrapped optimizers have on `device` now."""
    return memory_nbytes(state_tensors(optimizers), device.type, allocator_rounding(device))


def unwrapped(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a list, a container or a wrapper, as accelerate and Lightning have; each once.

    What holds others is among them only if it has a state of its own.
    """
    found: dict[int, torch.optim.Optimizer] = {}
    waiting: list[Any] = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    seen = set[int]()
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        held = _held_by(one)
        waiting += held
        state = getattr(one, "__dict__", {}).get("state")
        if not held or (state is not None and all(state is not other.state for other in held)):
            found[id(one)] = one
    return list(found.values())


def _held_by(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that `optimizer` has as attributes, or in containers there."""
    values = [
        value
        for name, value in getattr(optimizer, "__dict__", {}).items()
        if name not in ("state", "param_groups")
    ]
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.optim.Optimizer) and leaf is not optimizer
    ]


def _state_of(optimizer: Any) -> list[Any]:
    """Return the state of `optimizer`, and the tensors that it has as attributes, or in containers there."""
    groups = getattr(optimizer, "param_groups", ())  # a wrapper may have none
    parameters = [parameter for group in groups for parameter in group["params"]]
    known = {
        tensor.untyped_storage()._cdata
        for parameter in parameters
        for tensor in with_memory((parameter, gradient_of(parameter)))
    }
    values = [value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")]
    leaves = with_memory(tree_leaves(values))
    others = (leaf for leaf in leaves if leaf.untyped_storage()._cdata not in known)
    return [*optimizer.state.values(), *others]


def state_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Yield the tensors that have the memory of the present state of unwrapped optimizers."""
    yield from with_memory(tree_leaves([_state_of(one) for one in optimizers]))


def memory_nbytes(tensors: Iterable[Any], device_type: str, rounding: int) -> int:
    """Return the bytes of the tensors in `tensors`, or in containers there, on devices of a type."""
    return sum(rounded_bytes(nbytes, rounding) for nbytes in _storages(tensors, device_type).values())


def _storages(tensors: Iterable[Any], device_type: str | None) -> dict[int, int]:
    """Return the bytes of each storage behind `tensors`, on devices of a type; None: on all."""
    return {
        (storage := leaf.untyped_storage())._cdata: storage.nbytes()
        for leaf in with_memory(tree_leaves(list(tensors)))
        if device_type in (None, leaf.device.type)
    }


def _with_fakes(fakes: Mapping[int, Tensor], value: Any) -> Any:
    """Return a copy of `value` with fake tensors: the fake mode writes to a real one that meets no fake."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf, dict(fakes))
        return fakes[id(leaf)] if id(leaf) in fakes else torch.empty_like(leaf)

    return tree_map(fake, value)


def _copy_on(
    fakes: Mapping[int, Tensor], optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]
) -> Any:
    """Return a copy of `optimizer` that steps `groups`, has no state, calls no hooks, and changes no object.

    No attribute is shared that the copy could change. `copy.copy` leaves out every attribute that a subclass
    adds, and patches the class.

    Args:
        fakes: by the identity of the parameter that they stand for.
        groups: the parameters of each group, and options that differ from those of `optimizer`.
    """
    twin = object.__new__(type(optimizer))
    options = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
    vars(twin).update(
        param_groups=[_with_fakes({}, own) | one for own, one in zip(options, groups, strict=True)],
        state=defaultdict(dict),
        _optimizer_step_pre_hooks={},
        _optimizer_step_post_hooks={},
    )
    for name, value in vars(optimizer).items():
        if name not in vars(twin):
            with suppress(Exception):  # such as a lock: what cannot be copied is left out
                vars(twin)[name] = _with_fakes(fakes, value)
    return twin


_silencing = threading.Lock()


@contextmanager
def _silent_step_hooks() -> Iterator[None]:
    """Call no hook that is registered for all optimizers in the steps of this thread."""
    thread = threading.get_ident()

    def elsewhere(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: None if threading.get_ident() == thread else hook(*args)

    tables = private.STEP_HOOKS_OF_ALL_OPTIMIZERS
    with _silencing:
        before = [dict(table) for table in tables]
        for table in tables:
            table.update({key: elsewhere(hook) for key, hook in table.items()})
        try:
            yield
        finally:
            for table, hooks in zip(tables, before, strict=True):
                table.update({key: hook for key, hook in hooks.items() if key in table})


# Else dynamo would never compile the real step.
@torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
def _fake_step(optimizer: torch.optim.Optimizer, device: torch.device, on: Device | None) -> tuple[int, int]:
    """Return the bytes of state and of workspace, from two steps on fake tensors."""
    device_type = device.type if on is None else on.device_type
    rounding = allocator_rounding(device) if on is None else on.allocator_rounding
    with FakeTensorMode(allow_non_fake_inputs=True), _silent_step_hooks():
        groups = []
        counts: dict[Tensor, int] = {}  # fake parameter -> real parameters that it stands for
        stand_ins: dict[int, Tensor] = {}
        for group in optimizer.param_groups:
            has_stepped = any(parameter in optimizer.state for parameter in group["params"])
            fakes: list[nn.Parameter] = []
            equal: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                shard = local(parameter)
                # One without state got no gradient in the steps so far: an unused head, say.
                trains = parameter.requires_grad and (parameter in optimizer.state or not has_stepped)
                kind = shard.size(), shard.stride(), shard.dtype, shard.device, trains
                same = equal.setdefault(kind, [])
                if len(same) == MOST_EQUAL and _updates_one_by_one(optimizer, group, device_type):
                    counts[same[-1]] += 1
                    stand_ins[id(parameter)] = same[-1]
                    continue
                fake = nn.Parameter(
                    torch.empty_strided(
                        shard.size(),
                        shard.stride(),
                        dtype=torch.uint8 if shard.is_quantized else shard.dtype,  # which fakes cannot be
                        device=shard.device if on is None else device_type,
                    ),
                    requires_grad=parameter.requires_grad,  # integers cannot
                )
                if trains:
                    fake.grad = torch.empty_like(fake)
                fakes.append(fake)
                same.append(fake)
                counts[fake] = 1
                stand_ins[id(parameter)] = fake
            chosen = {"foreach": True} if _chooses_foreach(group, fakes) else {}
            groups.append({**chosen, "params": fakes})
        twin = _copy_on(stand_ins, optimizer, groups)
        with torch.no_grad(), _Workspace(device_type, rounding) as first:
            type(optimizer).step(twin)  # creates the state
        with torch.no_grad(), _Workspace(device_type, rounding) as second:
            type(optimizer).step(twin)
        state = memory_nbytes(_state_of(twin), device_type, rounding)
        # The state counts from the beginning, so it is not workspace of the first step.
        # State of 8 bits wraps others. One compiled kernel unpacks and updates it, without workspace.
        packed = any(map(wraps_others, map(type, tree_leaves(list(twin.state.values())))))
        workspace = 0 if packed else max(second.peak, first.peak - state)
        for one, count in counts.items():
            state += (count - 1) * memory_nbytes([twin.state.get(one)], device_type, rounding)
        return state, workspace


def optimizer_step_us(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Return the microseconds of a step of `optimizer` on `device`: the least of a few, of a copy.

    The copy has parameters, gradients and state of its own, and the caches have none of them, as after a
    backward. If it cannot step, as without room for these, the result is 0.
    """

    def own(parameter: Tensor) -> Tensor:
        copied = torch.zeros_like(local(parameter)).requires_grad_()
        copied.grad = torch.zeros_like(copied)
        return copied

    total_s = 0.0
    try:
        with generators_restored(device), torch.no_grad(), _silent_step_hooks():
            before = cache_overwriter(device, cpu_nbytes=1 << 24)
            for one in (one for one in unwrapped(optimizer) if not _held_by(one)):
                trained = [[p for p in group["params"] if p.requires_grad] for group in one.param_groups]
                twin = _copy_on({}, one, [{"params": list(map(own, group))} for group in trained])
                total_s += least_s(partial(type(one).step, twin), device, before)
    except Exception:  # noqa: BLE001 - the optimizer is the user's code
        return 0.0
    return 1e6 * total_s


MOST_EQUAL = 2
"""Equal parameters of a group that are updated on behalf of all, if parameters are updated one by one."""


def _updates_one_by_one(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device_type: str) -> bool:
    """Return True if it is certain that the parameters of `group` are updated one by one, as on a CPU."""
    return (
        f"{type(optimizer).__module__}.".startswith("torch.optim.")
        and device_type == "cpu"
        and not group.get("foreach")
        and not group.get("fused")
    )


def _chooses_foreach(group: Mapping[str, Any], fakes: Sequence[Tensor]) -> bool:
    """Return True if torch updates all real tensors of `group` at once, which it does on a GPU by default.

    Such an update holds temporary copies of all tensors. The rule of torch is repeated here because torch
    itself never chooses it for fake tensors. `fakes` stand for the real ones, and name their device.

    Source: `_default_to_fused_or_foreach` in torch/optim/optimizer.py, and `adam` in torch/optim/adam.py.
    """
    if "foreach" not in group or group["foreach"] is not None or group.get("fused") is not None:
        return False  # chosen by the user
    if group.get("differentiable") or (isinstance(group.get("lr"), Tensor) and not group.get("capturable")):
        return False
    return all(type(p) in private.foreach_supported_types for p in group["params"]) and all(
        fake.device.type in private.get_foreach_kernels_supported_devices() for fake in fakes
    )


def _one(dtype: torch.dtype) -> bool | int | float:
    return dtype is torch.bool or (1.0 if dtype.is_floating_point or dtype.is_complex else 1)


class _Workspace(TorchDispatchMode):
    """Measure the most bytes that tensors made inside take at once. A number read from a fake tensor is 1."""

    def __init__(self, device_type: str, rounding: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._rounding = rounding
        self._table: StorageTable[bool] = StorageTable()
        self._live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(wraps_others, types)):
            return NotImplemented  # the ops on the tensors inside come here
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
            weakref.finalize(storage, self._note_free, nbytes)
        return out

    def _note_free(self, nbytes: int) -> None:
        self._live -= nbytes
