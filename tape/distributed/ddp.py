"""Profile models in DistributedDataParallel, and count its buckets.

DistributedDataParallel reduces gradients in hooks of the parameters. Its forward also prepares the reduction,
and sends buffers to other ranks. Both are switched off in a fake step, so that one rank can profile without
the others. Its buckets occupy the device, and count.

`torch.distributed._composable.replicate` builds a DistributedDataParallel over the parameters of a module in
the first forward. A real step builds the wrapper before its record. A fake one, whose parameters are copies,
refuses a model that builds one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoac.tape.errors import CannotProfile
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import hidden_from_modes
from autoac.tape.torch_facts.module_paths import ROOT


@dataclass(frozen=True, slots=True)
class GradientBuckets:
    """The memory through which DistributedDataParallel reduces gradients."""

    nbytes: int = 0
    holds_gradients: bool = False  # gradients are views of the buckets (gradient_as_bucket_view=True)


def buckets_of(model: nn.Module, device: torch.device | None) -> GradientBuckets:
    """Return the buckets of the wrappers in `model`, and of a wrapper whose forward is running.

    Buckets are as large as the parameters, also with a single rank. Count parameters on `device`; None stands
    for any device.
    """
    wrappers = _wrappers_in(model)
    active = DistributedDataParallel._get_active_ddp_module()
    if active is not None and active not in wrappers:
        inside = set(active.modules())
        if any(module in inside for module in model.modules()):
            wrappers.append(active)
    mine = {id(parameter) for parameter in model.parameters()}
    counted: dict[int, int] = {}
    for wrapper in wrappers:
        for parameter in wrapper._module_parameters:
            if device is None or parameter.device.type == device.type:
                counted[id(parameter)] = parameter.nbytes
    views = any(w.gradient_as_bucket_view for w in wrappers) and mine <= counted.keys()
    return GradientBuckets(sum(counted.values()), views)


def _wrappers_in(model: nn.Module) -> list[DistributedDataParallel]:
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return [*wrappers, *replicating(model).values()]


def build_replicating(model: nn.Module) -> None:
    """Build what `replicate` would build in the first forward, but over the real parameters.

    All ranks must take part, and they do: each of them builds at the start of its first forward. What the
    wrapper runs before a forward is hidden from modes that record, since it is more in the second forward
    than in the first.
    """
    for _module, state in private.replicate_states(model):
        if state._init_args or state._init_kwargs:
            state.lazy_init()
        if "_pre_forward" not in state._ddp.__dict__:
            state._ddp._pre_forward = hidden_from_modes(state._ddp._pre_forward)


def replicating(model: nn.Module) -> dict[nn.Module, DistributedDataParallel]:
    """Return the DistributedDataParallel that `replicate` has built for each module of `model`."""
    states = private.replicate_states(model)
    return {module: state._ddp for module, state in states if hasattr(state, "_ddp")}


def wrapper_paths(model: nn.Module) -> frozenset[str]:
    """Return the paths of the wrappers in `model`. No profiled step has the ops that a wrapper itself runs.

    A wrapper rebuilds its buckets after the first backward, and sends buffers before each forward.
    """
    return frozenset(
        path or ROOT for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)
    )


def copy_wrappers(model: nn.Module, memo: dict[int, Any]) -> None:
    """Have `copy.deepcopy(model, memo)` copy wrappers without what reduces gradients, which has no copy."""
    wrappers = _wrappers_in(model)
    for wrapper in wrappers:
        memo[id(wrapper)] = type(wrapper).__new__(type(wrapper))
    for wrapper in wrappers:
        attributes = {k: dict(v) if isinstance(v, dict) else v for k, v in vars(wrapper).items()}
        attributes.pop("_pre_forward", None)  # see `build_replicating`
        vars(memo[id(wrapper)]).update(attributes, _modules=copy.deepcopy(wrapper._modules, memo))


@contextmanager
def without_ddp_sync(model: nn.Module) -> Iterator[None]:
    """Keep forwards of `model`, a copy, from communicating with other ranks and from preparing a reduction.

    Raises:
        CannotProfile: forward builds another wrapper.
    """
    states = [state for _module, state in private.replicate_states(model) if hasattr(state, "_ddp")]
    for wrapper in (*model.modules(), *(state._ddp for state in states)):
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.require_backward_grad_sync = False  # as no_sync() does
            wrapper.require_forward_param_sync = False  # or forward sends buffers
            wrapper._static_graph_delay_allreduce_enqueued = True  # or backward reduces everything at its end
    for state in states:
        state._no_sync = True  # its hook sets require_backward_grad_sync

    def refuse(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        raise CannotProfile(
            type(model).__name__,
            "its forward builds a DistributedDataParallel, which waits for the other ranks",
            "run one batch through the model before, so that it is built",
        )

    init = DistributedDataParallel.__init__
    DistributedDataParallel.__init__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
