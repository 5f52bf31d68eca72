"""Follow models that `fully_shard` has sharded, and find what their plans must save.

FSDP gathers the parameters of a unit before its forward and before its backward, and frees them after both.
An observed step runs under FSDP's own hooks, so every gather, free and reduction is in its record.

NOTE [ Units ]
An op can be recomputed only while the parameters of its unit are gathered: from the moment at which
backward reaches the unit's outputs until it has reached its inputs. So these tensors are saved:

- the inputs and outputs of a unit; the runtime saves them by itself, under any policy;
- tensors that an op of another unit reads, and tensors that backward unpacks while the unit is freed. The
  profile says that the ops that write them must be saved.

FullyShardedDataParallel (FSDP1) is refused: it swaps flat parameters in every forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from torch import Tensor, distributed, nn

from autoac.tape.distributed.wrapped_tensors import with_memory
from autoac.tape.errors import CannotProfile, ProfilerBusy
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import hidden_from_modes, recording_modes
from autoac.tape.torch_facts.module_paths import ROOT
from autoac.tape.torch_facts.private import tree_leaves
from autoac.tape.torch_facts.storage_table import fakes_with_storages


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this rank: a DTensor's shard, else `tensor` itself."""
    held = getattr(tensor, "_local_tensor", None)
    return held if isinstance(held, Tensor) else tensor


def watch_sharding() -> None:
    """Hide what FSDP does around a module's forward from the modes that record, from now on."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():  # `fully_shard` makes them
        return
    if _watched:
        return
    group_class = private.fsdp_param_group_class()
    for name in ("lazy_init", "unshard", "wait_for_unshard", "reshard"):
        setattr(group_class, name, hidden_from_modes(getattr(group_class, name)))
    for name in ("pre_forward", "post_forward"):
        setattr(group_class, name, _crossing(getattr(group_class, name)))
    _watched.append(group_class)


_watched: list[Any] = []  # the class of parameter groups, once its methods are watched


def _crossing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def crossing(group: Any, module: Any, args: Any, other: Any) -> Any:
        # `other` is the keyword arguments before forward, and what it returned afterwards.
        if (modes := recording_modes()) and not _stays_gathered(group, module):
            tensors = [leaf for leaf in tree_leaves((args, other)) if isinstance(leaf, Tensor)]
            for mode in modes:
                mode.hold(tensors)
            del tensors
        return method(group, module, args, other)

    return crossing


def _stays_gathered(group: Any, module: Any) -> bool:
    """Return True for the root, which by default is freed only at the end of its backward."""
    state_of = getattr(module, "_get_fsdp_state", None)
    return state_of is not None and bool(state_of()._is_root) and not group._reshard_after_forward


def _states_of(model: nn.Module) -> dict[str, Any]:
    """Return FSDP's state of each sharded module by path, outer modules first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not distributed.is_initialized():  # nothing is sharded
        return {}
    return {
        path or ROOT: module._get_fsdp_state()
        for path, module in model.named_modules()
        if isinstance(module, fsdp.FSDPModule)
    }


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of a unit, of which torch 2.11 knows at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g is not None] if groups is None else groups


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that an optimizer has: the shards of a unit, also while it is gathered."""
    shards = {
        id(unsharded): param.sharded_param
        for state in _states_of(model).values()
        for group in _groups_of(state)
        for param in group.fsdp_params
        if (unsharded := getattr(param, "_unsharded_param", None)) is not None
    }
    for parameter in model.parameters():
        yield shards.get(id(parameter), parameter)


def layout_of(model: nn.Module) -> str:
    """Return how many ranks there are, and the meshes that parameters are on: "4 (mesh dp 2 x tp 2)"."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return "1"
    meshes = dict.fromkeys(
        f"mesh {' x '.join(f'{name} {size}'.strip() for name, size in zip(names, mesh.shape, strict=True))}"
        for parameter in parameters_of(model)
        if (mesh := getattr(parameter, "device_mesh", None)) is not None
        for names in [mesh.mesh_dim_names or ("",) * mesh.ndim]
    )
    return f"{dist.get_world_size()} ({', '.join(meshes)})" if meshes else str(dist.get_world_size())


def gathered_nbytes(model: nn.Module) -> int:
    """Return the bytes of gathered parameters, without the shards. An evaluation leaves the root gathered."""
    storages = {
        output.untyped_storage()._cdata: output.untyped_storage().nbytes()
        for state in _states_of(model).values()
        for group in _groups_of(state)
        for param in group.fsdp_params
        for output in param.all_gather_outputs
    }
    return sum(storages.values())


def unreduced_nbytes(model: nn.Module) -> int:
    """Return the bytes of whole gradients that wait for a reduction: `set_requires_gradient_sync(False)`."""
    return sum(
        gradient.nbytes
        for state in _states_of(model).values()
        for group in _groups_of(state)
        for param in group.fsdp_params
        for gradient in with_memory(_unreduced(param))
    )


def _unreduced(param: Any) -> list[Tensor]:
    gradients = (  # one tensor since torch 2.15
        param.unsharded_accumulated_grad,
        getattr(getattr(param, "_unsharded_param", None), "grad", None),
    )
    return list({id(gradient): gradient for gradient in gradients if gradient is not None}.values())


def mesh_groups_of(model: nn.Module) -> list[Any]:
    """Return the process group of each dimension of the mesh that `model` is on, the innermost first.

    Of several meshes take that with the most dimensions: a parameter that is tensor-parallel has one more.
    """
    meshes = [
        param.sharded_param.device_mesh
        for state in _states_of(model).values()
        for group in _groups_of(state)
        for param in group.fsdp_params
    ]
    return max(meshes, key=lambda mesh: mesh.ndim).get_all_groups()[::-1] if meshes else []


def check_sharded(model: nn.Module, *, fake: bool) -> None:
    """Refuse a model that is sharded in a way that a profiled step does not support.

    Raises:
        CannotProfile: it is sharded by FullyShardedDataParallel; or by `fully_shard`, and the step is a fake
            one, parameters are offloaded, or its forward is running.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for path, module in model.named_modules():
        where = f"{type(module).__name__}{f' at {path}' if path else ''}"
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise CannotProfile(
                where,
                "FullyShardedDataParallel swaps its parameters in every forward",
                "profile an unsharded copy of the model (on the meta device with on=DATASHEETS[...] it needs "
                "no memory), plan under Constraints(fsdp_units=...), and pass the policy of that plan to the "
                "sharded model",
            )
        if isinstance(module, fsdp.FSDPModule):
            if fake and fakes_with_storages() is None:
                raise CannotProfile(
                    where,
                    "a fake step runs on a copy, and it has none",
                    "build the model and profile it under autoac.profiler.fake_ranks(world_size), or by "
                    "`autoac profile --ranks`, where it has no memory",
                )
            state = module._get_fsdp_state()
            if any(isinstance(group.offload_policy, fsdp.CPUOffloadPolicy) for group in _groups_of(state)):
                raise CannotProfile(
                    where,
                    "its parameters are offloaded to the host, whose memory is not the budget's",
                    "leave offload_policy=... out of fully_shard, or apply no plan",
                )
            if state._state_ctx.iter_forward_root is not None:
                raise CannotProfile(
                    where, "its forward is running", "call ac_client.apply after fully_shard, on the root"
                )


def check_reduced(model: nn.Module) -> None:
    """Refuse a model with gradients that a later backward will reduce.

    Raises:
        ProfilerBusy: it has some.
    """
    for path, state in _states_of(model).items():
        for group in _groups_of(state):
            if group._partial_reduce_output is not None or any(map(_unreduced, group.fsdp_params)):
                raise ProfilerBusy(
                    f"{type(model).__name__}{f' at {path}' if path != ROOT else ''} holds gradients that are "
                    "not reduced because of set_requires_gradient_sync(False): profile the model before the "
                    "first such step, or after the last"
                )


class Shards:
    """The units of a sharded model, by the paths of their modules."""

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states
        self._early: list[Any] = []  # units that `gather` has gathered before backward has reached them

    def unit_of(self, path: str) -> Any:
        """Return the innermost unit around the module at `path`; None outside all units."""
        while path not in self._states:
            if path == ROOT:
                return None
            path = path.rpartition(".")[0] or ROOT
        return self._states[path]

    def is_gathered(self, path: str) -> bool:
        """Return True if the parameters of the unit around `path` are gathered."""
        state = self.unit_of(path)
        if state is None:
            return True
        reached = state not in self._early or state._training_state.name.endswith("BACKWARD")
        return reached and all(group.is_unsharded for group in _groups_of(state))

    def gather(self, units: Sequence[Any]) -> None:
        """Gather units whose tensors other units have kept, so that backward can recompute them at once.

        Plans save what `is_gathered` then says cannot run. Every rank gathers the same units.
        """
        self._early = list(units)
        for state in units:
            for group in _groups_of(state):
                group.unshard()
                group.wait_for_unshard()


def shards_of(model: nn.Module) -> Shards | None:
    """Return the sharded parameters of `model`; None if it is not sharded."""
    states = _states_of(model)
    return Shards(states) if states else None
