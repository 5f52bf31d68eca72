"""Models that `fully_shard` has sharded: how one rank profiles such a model alone, and what a plan must save.

FSDP gathers the parameters of a unit before its forward and before its backward, and frees them after both.
A profiled step runs under its hooks, so every gather, free and reduction stands in the allocator's record.
Only nobody is talked to: in place of the other ranks' shards stand copies of this rank's, and of a reduced
gradient its own part of the local one. So any rank may profile at any time, and none waits for it.

NOTE [ Units ] A value can be made again only while the parameters of its unit are there: from the moment at
which backward comes to the unit's outputs until it has come to its inputs. So what goes into a unit or comes
out of it is saved, and what an op of another unit reads, and what backward unpacks while the unit is freed.
The first of these the runtime ensures by itself, whatever a policy says; the rest is in the profile.

FullyShardedDataParallel (FSDP1) is refused: it swaps flat parameters under a step on aliases of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from autoac.planner.formats.profile import CROSSES
from autoac.profiler.capture.op_recorder import ForwardRecord
from autoac.profiler.errors import CannotProfile, ShardsInUse
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.gradients import free_gradient_when_accumulated
from autoac.profiler.torch_facts.inductor import opaque_region, recording_modes
from autoac.profiler.torch_facts.module_paths import ROOT
from autoac.profiler.torch_facts.private import tree_leaves

FREED = "its FSDP unit is freed when backward asks for it"


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`: a DTensor's shard, else `tensor` itself."""
    held = getattr(tensor, "_local_tensor", None)
    return held if isinstance(held, Tensor) else tensor


def watch_sharding() -> None:
    """From now on what FSDP does around a module's forward is opaque to the modes that record."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    group_class = private.fsdp_param_group_class()
    if getattr(group_class, _WATCHED, False):
        return
    for name in ("lazy_init", "unshard", "wait_for_unshard", "reshard"):
        setattr(group_class, name, _unseen(getattr(group_class, name)))
    for name in ("pre_forward", "post_forward"):
        setattr(group_class, name, _crossing(getattr(group_class, name)))
    setattr(group_class, _WATCHED, True)


_WATCHED = "_autoac_watched"


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with opaque_region(()):
            return method(*args, **kwargs)

    return unseen


def _crossing(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def crossing(group: Any, module: Any, args: Any, other: Any) -> Any:
        # `other` is the keyword arguments before forward, and what it returned afterwards.
        if (modes := recording_modes()) and not _stays_gathered(group, module):
            tensors = [leaf for leaf in tree_leaves((args, other)) if isinstance(leaf, Tensor)]
            for mode in modes:
                mode.cross_units(tensors)
            del tensors
        return method(group, module, args, other)

    return crossing


def _stays_gathered(group: Any, module: Any) -> bool:
    """Whether this is the root, which by default is freed only when its backward is over."""
    state_of = getattr(module, "_get_fsdp_state", None)
    return state_of is not None and bool(state_of()._is_root) and not group._reshard_after_forward


def _states_of(model: nn.Module) -> dict[str, Any]:
    """FSDP's state of each sharded module, by path; the outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nothing can have been sharded
        return {}
    return {
        path or ROOT: module._get_fsdp_state()
        for path, module in model.named_modules()
        if isinstance(module, fsdp.FSDPModule)
    }


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that an optimizer has: a unit's shards also while it is gathered."""
    shards = {
        id(unsharded): param.sharded_param
        for state in _states_of(model).values()
        for group in state._fsdp_param_groups
        for param in group.fsdp_params
        if (unsharded := getattr(param, "_unsharded_param", None)) is not None
    }
    for parameter in model.parameters():
        yield shards.get(id(parameter), parameter)


def gathered_nbytes(model: nn.Module) -> int:
    """Bytes of the parameters that are gathered now, beside the shards: an evaluation leaves the root so."""
    storages = {
        output.untyped_storage()._cdata: output.untyped_storage().nbytes()
        for state in _states_of(model).values()
        for group in state._fsdp_param_groups
        for param in group.fsdp_params
        for output in param.all_gather_outputs
    }
    return sum(storages.values())


def process_group_of(model: nn.Module) -> Any:
    """The ranks over which the parameters of `model` are sharded; None if they are not."""
    for state in _states_of(model).values():
        for group in state._fsdp_param_groups:
            return getattr(group.mesh_info, "shard_process_group", None)
    return None


def check_sharded(model: nn.Module, *, fake: bool) -> None:
    """Refuse a model whose parameters come and go in a way that a profiled step would not leave as it was.

    Raises:
        CannotProfile: it is sharded by FullyShardedDataParallel; or by `fully_shard` and the step is a fake
            one, or a setting of it is not known here, or `model` is not the root.
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
            _check(where, module._get_fsdp_state())


_UNSHARDED = (
    "profile a copy of the model that is not sharded (on the meta device with on=DATASHEETS[...] it needs no "
    "memory), under Constraints(fsdp_units=...), and pass the policy of its plan to the sharded one"
)


def _check(where: str, state: Any) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    shard_class, replicate_class = private.fsdp_mesh_classes()
    for group in state._fsdp_param_groups:
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise CannotProfile(
                where,
                "its parameters are offloaded to the host, whose memory is not the budget's",
                "leave offload_policy=... out of fully_shard, or apply no plan",
            )
        if isinstance(group.mesh_info, replicate_class) or not isinstance(group.mesh_info, shard_class):
            raise CannotProfile(
                where,
                "its gradients are also reduced over replicas, which one rank cannot do alone",
                "shard over a mesh of one dimension",
            )
        for param in group.fsdp_params:
            if param.is_dtensor or hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                raise CannotProfile(
                    where,
                    f"parameter {param._module_info.param_name} is sharded by another layout as well, or "
                    "gathers in a way of its own",
                    _UNSHARDED,
                )


class Shards:
    """The sharded parameters of a model while this rank runs steps of it alone."""

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states
        self._groups = list(
            {id(g): g for state in states.values() for g in state._fsdp_param_groups}.values()
        )
        self._params = [param for group in self._groups for param in group.fsdp_params]
        self.aliases: list[nn.Parameter] = []

    def managed(self) -> Set[nn.Parameter]:
        """Parameters that FSDP itself puts in place, now aliases of the model's."""
        return set(self.aliases)

    def reset(self) -> None:
        """To be called before each forward: the one before may have had no backward."""
        for state in self._states.values():
            if state._is_root:
                state._reset_iter_state()

    def leaves(self) -> list[Tensor]:
        """Where autograd leaves gradients, once a forward has run."""
        unsharded = (getattr(param, "_unsharded_param", None) for param in self._params)
        return [p for p in unsharded if p is not None and p.requires_grad]

    def unit_of(self, path: str) -> Any:
        """The innermost unit around the module at `path`; None if there is none."""
        at = path
        while at not in self._states:
            if at == ROOT:
                return None
            at = at.rpartition(".")[0] or ROOT
        return self._states[at]

    def is_gathered(self, path: str) -> bool:
        """Whether the parameters of the unit around `path` are gathered."""
        state = self.unit_of(path)
        return state is None or all(group.is_unsharded for group in state._fsdp_param_groups)

    def force_saves(self, record: ForwardRecord, freed: Set[int]) -> None:
        """Have saved what another unit reads, and the ops in `freed`. See NOTE [ Units ]."""
        if not self._states:
            return
        units = [self.unit_of(op.module) for op in record.ops]
        for reader, op in enumerate(record.ops):
            for version in op.reads:
                maker = record.versions[version].op
                if units[maker] is not units[reader]:
                    record.ops[maker].force_save(CROSSES)
        for maker in freed:
            record.ops[maker].force_save(FREED)


@contextmanager
def single_rank_fsdp(model: nn.Module, *, accumulates: bool) -> Iterator[Shards]:
    """Steps of `model` talk to no other rank, and leave its shards and their gradients as they are.

    Args:
        model: passed `check_sharded`.
        accumulates: gradients of shards are there before the step.

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
    with ExitStack() as back, torch.no_grad():
        for state in states.values():
            _kept(back, state._state_ctx, "post_optim_event")
        for group in shards._groups:
            _gathered_again(back, group)
            for name, value in (
                ("_all_gather_comm", _OwnShard(group._all_gather_comm)),
                ("_reduce_scatter_comm", _OwnPart(group._reduce_scatter_comm)),
                ("_all_reduce_hook", None),
            ):
                _kept(back, group, name)
                setattr(group, name, value)
            for param in group.fsdp_params:
                shards.aliases.append(_aliased(back, param))
        if accumulates:
            for alias in shards.aliases:
                if alias.requires_grad:
                    free_gradient_when_accumulated(alias)
        back.callback(_clear, shards)
        with torch.enable_grad():
            yield shards


def _check_at_rest(model: nn.Module, states: dict[str, Any]) -> None:
    within = set(map(id, states.values()))
    for path, state in states.items():
        where = f"{type(model).__name__}{f' at {path}' if path != ROOT else ''}"
        if state._state_ctx.iter_forward_root is not None:
            raise CannotProfile(
                where, "FSDP has begun its forward", "call ac_client.apply after fully_shard, on the root"
            )
        if state._is_root is None:
            state._lazy_init()  # as its forward does; the states inside come after it
        if any(id(other) not in within for other in state._state_ctx.all_states):
            raise CannotProfile(where, "it is a part of a larger FSDP model", "profile or plan its root")
        for group in state._fsdp_param_groups:
            if group._partial_reduce_output is not None or any(
                param.unsharded_accumulated_grad is not None
                or ((p := getattr(param, "_unsharded_param", None)) is not None and p.grad is not None)
                for param in group.fsdp_params
            ):
                raise ShardsInUse(where)


def _kept(back: ExitStack, owner: Any, name: str) -> None:
    """Put the attribute back at the end."""
    back.callback(setattr, owner, name, getattr(owner, name))


def _gathered_again(back: ExitStack, group: Any) -> None:
    """Free what an evaluation has left gathered, and have it there again at the end, without a gather.

    Else this rank would gather it anew in its next forward, and the others would not.
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

    back.callback(gather)


def _aliased(back: ExitStack, param: Any) -> nn.Parameter:
    """Have FSDP work on an alias of a shard: gradients go there, and hooks of the shard do not fire."""
    own = param.sharded_param
    alias = nn.Parameter(own.detach(), requires_grad=own.requires_grad)

    def put(shard: nn.Parameter) -> None:
        param.sharded_param = shard
        param._setattr_on_modules(shard)

    put(alias)
    back.callback(put, own)
    return alias


def _clear(shards: Shards) -> None:
    shards.reset()
    for leaf in shards.leaves():
        leaf.grad = None  # of a step that raised, or under no_sync


class _OwnShard:
    """In place of an all-gather: every other rank's shard is a copy of this one's."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.allocate = real.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        for part in output_tensor.view(group.size(), -1):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor.view(-1))


class _OwnPart:
    """In place of a reduce-scatter: this rank's part of what it made itself."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.allocate = real.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()].view_as(output_tensor))
