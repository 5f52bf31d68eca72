"""Profile models that `fully_shard` has sharded on one rank, and find what their plans must save.

FSDP gathers the parameters of a unit before its forward and before its backward, and frees them after both.
A profiled step runs under FSDP's own hooks, so every gather, free and reduction is in the allocator's
record. But this rank communicates with no other: copies of its own shard replace the shards of the other
ranks, and its part of the gradient that it computed itself replaces the reduced gradient. So any rank may
profile at any time, and no rank waits.

NOTE [ Units ]
An op can be recomputed only while the parameters of its unit are gathered: from the moment at which
backward reaches the unit's outputs until it has reached its inputs. So these tensors are saved:

- the inputs and outputs of a unit; the runtime saves them by itself, under any policy;
- tensors that an op of another unit reads, and tensors that backward unpacks while the unit is freed. The
  profile says that the ops that write them must be saved.

FullyShardedDataParallel (FSDP1) is refused: it swaps flat parameters while a step runs on aliases of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from autoac.profiler.errors import CannotProfile, ShardsInUse
from autoac.profiler.torch_facts import private, probes
from autoac.profiler.torch_facts.gradients import free_gradient_when_accumulated
from autoac.profiler.torch_facts.inductor import hidden_from_modes, recording_modes
from autoac.profiler.torch_facts.module_paths import ROOT
from autoac.profiler.torch_facts.private import tree_leaves


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this rank: a DTensor's shard, else `tensor` itself."""
    held = getattr(tensor, "_local_tensor", None)
    return held if isinstance(held, Tensor) else tensor


def watch_sharding() -> None:
    """Hide what FSDP does around a module's forward from the modes that record, from now on.

    Raises:
        UnsupportedTorch: `fully_shard` was called, and works in another way in this torch.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():  # `fully_shard` makes them
        return
    if _watched:
        return
    probes.check(private.FSDP, fsdp_calls_what_is_watched)
    group_class = private.fsdp_param_group_class()
    for name in ("lazy_init", "unshard", "wait_for_unshard", "reshard"):
        setattr(group_class, name, hidden_from_modes(getattr(group_class, name)))
    for name in ("pre_forward", "post_forward"):
        setattr(group_class, name, _crossing(getattr(group_class, name)))
    _watched.append(group_class)


_watched: list[Any] = []  # the class of parameter groups, once its methods are watched


def fsdp_calls_what_is_watched() -> bool:
    """Return True if the code of FSDP names what this file replaces: a probe that needs no other rank."""
    group_class, state_class = private.fsdp_param_group_class(), private.fsdp_state_class()
    return all(
        set(names.split()) <= set(unwrap(getattr(owner, caller)).__code__.co_names)
        for owner, caller, names in (
            (state_class, "_lazy_init", "lazy_init"),
            (state_class, "_pre_forward", "pre_forward"),
            (state_class, "_post_forward", "post_forward"),
            (group_class, "pre_forward", "unshard wait_for_unshard"),
            (group_class, "post_forward", "reshard"),
            (group_class, "unshard", "_all_gather_comm"),
            (group_class, "post_backward", "_reduce_scatter_comm _all_reduce_hook"),
        )
    )


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
    if fsdp is None:  # not imported: nothing is sharded
        return {}
    states = {
        path or ROOT: module._get_fsdp_state()
        for path, module in model.named_modules()
        if isinstance(module, fsdp.FSDPModule)
    }
    for state in states.values():
        private.require_attributes(private.FSDP, state, _OF_STATE)
        for group in _groups_of(state):
            private.require_attributes(private.FSDP, group, _OF_GROUP)
            for param in group.fsdp_params:
                private.require_attributes(private.FSDP, param, _OF_PARAM)
    return states


_OF_STATE = ("_is_root", "_state_ctx", "_comm_ctx")
_OF_GROUP = (
    *("fsdp_params", "mesh_info", "offload_policy", "_all_gather_comm", "_reduce_scatter_comm"),
    *("_all_reduce_hook", "_partial_reduce_output", "_reshard_after_forward"),
)
_OF_PARAM = (
    *("sharded_param", "_sharded_local_tensor", "all_gather_outputs", "unsharded_accumulated_grad"),
    *("is_dtensor", "_module_info", "_setattr_on_modules", "alloc_all_gather_outputs"),
)


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
        for gradient in _unreduced(param)
    )


def _unreduced(param: Any) -> list[Tensor]:
    gradients = (  # one tensor since torch 2.15
        param.unsharded_accumulated_grad,
        getattr(getattr(param, "_unsharded_param", None), "grad", None),
    )
    return list({id(gradient): gradient for gradient in gradients if gradient is not None}.values())


def process_group_of(model: nn.Module) -> Any:
    """Return the process group over which `model` is sharded; None if it is not."""
    for state in _states_of(model).values():
        for group in _groups_of(state):
            return getattr(group.mesh_info, "shard_process_group", None)
    return None


def check_sharded(model: nn.Module, *, fake: bool) -> None:
    """Refuse a model that is sharded in a way that a profiled step does not support.

    Raises:
        CannotProfile: it is sharded by FullyShardedDataParallel; or by `fully_shard`, and the step is a fake
            one or parameters are offloaded.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for path, module in model.named_modules():
        where = f"{type(module).__name__}{f' at {path}' if path else ''}"
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise CannotProfile(
                where, "FullyShardedDataParallel swaps its parameters in every forward", _UNSHARDED
            )
        if isinstance(module, fsdp.FSDPModule):
            if fake:
                raise CannotProfile(where, "fake tensors cannot be gathered", _UNSHARDED)
            _check_not_offloaded(where, module._get_fsdp_state())


_UNSHARDED = (
    "profile an unsharded copy of the model (on the meta device with on=DATASHEETS[...] it needs no memory), "
    "plan under Constraints(fsdp_units=...), and pass the policy of that plan to the sharded model"
)


def _check_not_offloaded(where: str, state: Any) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in _groups_of(state)):
        raise CannotProfile(
            where,
            "its parameters are offloaded to the host, whose memory is not the budget's",
            "leave offload_policy=... out of fully_shard, or apply no plan",
        )


def check_rehearsed(model: nn.Module) -> None:
    """Refuse a model that this rank cannot step without the others.

    Raises:
        CannotProfile: as for `check_sharded`; or gradients are reduced over replicas, or parameters are also
            sharded in another layout.
    """
    check_sharded(model, fake=False)
    states = _states_of(model)
    if not states:
        return
    shard_class, replicate_class = private.fsdp_mesh_classes()
    for path, state in states.items():
        where = f"{type(model).__name__}{f' at {path}' if path != ROOT else ''}"
        for group in _groups_of(state):
            if isinstance(group.mesh_info, replicate_class) or not isinstance(group.mesh_info, shard_class):
                raise CannotProfile(
                    where,
                    "its gradients are also reduced over replicas, which needs the other ranks",
                    "shard over a mesh of one dimension",
                )
            for param in group.fsdp_params:
                if param.is_dtensor or hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                    raise CannotProfile(
                        where,
                        f"parameter {param._module_info.param_name} is also sharded in another layout, or "
                        "has a gather of its own",
                        _UNSHARDED,
                    )


def check_reduced(model: nn.Module) -> None:
    """Refuse a model with gradients that a later backward will reduce.

    Raises:
        ShardsInUse: it has some.
    """
    for path, state in _states_of(model).items():
        for group in _groups_of(state):
            if group._partial_reduce_output is not None or any(map(_unreduced, group.fsdp_params)):
                raise ShardsInUse(f"{type(model).__name__}{f' at {path}' if path != ROOT else ''}")


class Shards:
    """The sharded parameters of a model, while this rank runs steps of it without the others.

    Attributes:
        aliases: aliases of the shards, on which FSDP works.
    """

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states
        self.groups = list({id(g): g for state in states.values() for g in _groups_of(state)}.values())
        self._params = [param for group in self.groups for param in group.fsdp_params]
        self.aliases: list[nn.Parameter] = []

    def managed(self) -> Set[nn.Parameter]:
        """Return the parameters that FSDP itself puts into the modules, which now are the aliases."""
        return set(self.aliases)

    def reset(self) -> None:
        """Reset FSDP before a forward, since the forward before may have had no backward."""
        for state in self._states.values():
            if state._is_root:
                _reset(state)

    def leaves(self) -> list[Tensor]:
        """Return the leaves to which autograd gives gradients. They exist once a forward has run."""
        unsharded = (getattr(param, "_unsharded_param", None) for param in self._params)
        return [p for p in unsharded if p is not None and p.requires_grad]

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
        return state is None or all(group.is_unsharded for group in _groups_of(state))


def _reset(root: Any) -> None:
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
        return
    context = root._state_ctx  # up to torch 2.12
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False
    root._comm_ctx.all_gather_state = None
    root._comm_ctx.post_forward_order.clear()
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = private.fsdp_idle()
        for group in _groups_of(state):
            group._training_state = private.fsdp_idle()
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._partial_reduce_output = group._reshard_after_forward_event = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
            group._to_sharded()


def shards_of(model: nn.Module) -> Shards | None:
    """Return the sharded parameters of `model`; None if it is not sharded."""
    states = _states_of(model)
    return Shards(states) if states else None


@contextmanager
def single_rank_fsdp(model: nn.Module, *, accumulates: bool) -> Iterator[Shards]:
    """Run steps of `model` without other ranks, and leave its shards and their gradients unchanged.

    Args:
        model: accepted by `check_sharded`.
        accumulates: True if gradients are added to existing ones.

    Raises:
        CannotProfile: `model` is not the root, or its forward is running.
        ShardsInUse: it holds gradients that are not reduced yet.
    """
    states = _states_of(model)
    shards = Shards(states)
    if not states:
        yield shards
        return
    watch_sharding()
    _check_at_rest(model, states)
    with ExitStack() as undo, torch.no_grad():
        for state in states.values():
            _restore_at_end(undo, state._state_ctx, "post_optim_event")
        for group in shards.groups:
            _regather_at_end(undo, group)
            for name, value in (
                ("_all_gather_comm", _OwnShard(group._all_gather_comm)),
                ("_reduce_scatter_comm", _OwnPart(group._reduce_scatter_comm)),
                ("_all_reduce_hook", None),
            ):
                _restore_at_end(undo, group, name)
                setattr(group, name, value)
            for param in group.fsdp_params:
                shards.aliases.append(_put_alias(undo, param))
        if accumulates:
            for alias in shards.aliases:
                if alias.requires_grad:
                    free_gradient_when_accumulated(alias)
        undo.callback(_clear, shards)
        with torch.enable_grad():
            yield shards


def _check_at_rest(model: nn.Module, states: dict[str, Any]) -> None:
    within = set(map(id, states.values()))
    for path, state in states.items():
        where = f"{type(model).__name__}{f' at {path}' if path != ROOT else ''}"
        if state._state_ctx.iter_forward_root is not None:
            raise CannotProfile(
                where, "its forward is running", "call ac_client.apply after fully_shard, on the root"
            )
        if state._is_root is None:
            state._lazy_init()  # as its forward does; the states inside come after it
        if any(id(other) not in within for other in state._state_ctx.all_states):
            raise CannotProfile(where, "it is a part of a larger FSDP model", "profile or plan its root")
    check_reduced(model)


def _restore_at_end(undo: ExitStack, owner: Any, name: str) -> None:
    """Restore an attribute at the end."""
    undo.callback(setattr, owner, name, getattr(owner, name))


def _regather_at_end(undo: ExitStack, group: Any) -> None:
    """Free parameters that an evaluation has left gathered, and restore them at the end without a gather.

    Otherwise this rank would gather them in its next forward, and the other ranks would not.
    """
    if not group.is_unsharded:
        return
    outputs = [output for param in group.fsdp_params for output in param.all_gather_outputs]
    copies = [output.clone() for output in outputs]
    group._to_sharded()

    def gather() -> None:
        for param in group.fsdp_params:
            param.alloc_all_gather_outputs()
        with private.unsafe_preserve_version_counter(tuple(outputs)):
            for output, copy in zip(outputs, copies, strict=True):
                output.copy_(copy)
        group._to_unsharded()

    undo.callback(gather)


def _put_alias(undo: ExitStack, param: Any) -> nn.Parameter:
    """Have FSDP work on an alias of a shard, which gets the gradients. Hooks of the shard are not called."""
    own = param.sharded_param
    alias = nn.Parameter(own.detach(), requires_grad=own.requires_grad)

    def put(shard: nn.Parameter) -> None:
        param.sharded_param = shard
        param._setattr_on_modules(shard)

    put(alias)
    undo.callback(put, own)
    return alias


def _clear(shards: Shards) -> None:
    shards.reset()
    for leaf in shards.leaves():
        leaf.grad = None  # left by a step that raised, or under no_sync


class _OwnComm:
    """Replace a collective by what this rank does alone, in buffers that `real` allocates."""

    def __init__(self, real: Any) -> None:
        self.allocate = real.allocate


class _OwnShard(_OwnComm):
    """Replace an all-gather: every other rank's shard is a copy of this rank's."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        for part in output_tensor.view(group.size(), -1):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor.view(-1))


class _OwnPart(_OwnComm):
    """Replace a reduce-scatter: return this rank's part of its own gradient."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()].view_as(output_tensor))
