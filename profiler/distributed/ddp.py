"""Profile models in DistributedDataParallel on one rank, and count its buckets.

DistributedDataParallel reduces gradients in hooks of the parameters, which a profiled step does not call.
The preparations of its forward for that, and the buffers that its forward sends, are switched off too, so
that one rank can profile without the others. Its buckets occupy the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoac.profiler.torch_facts.module_paths import ROOT


@dataclass(frozen=True, slots=True)
class Buckets:
    """The memory through which DistributedDataParallel reduces gradients."""

    nbytes: int = 0
    holds_gradients: bool = False  # gradients are views of the buckets (gradient_as_bucket_view=True)


def buckets_of(model: nn.Module, device: torch.device | None) -> Buckets:
    """Return the buckets of the wrappers in `model`, and of a wrapper whose forward is running.

    Buckets are as large as the parameters, also with a single rank. Count parameters on `device`; None stands
    for any device.
    """
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
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
    return Buckets(sum(counted.values()), views)


def wrapper_paths(model: nn.Module) -> frozenset[str]:
    """Return the paths of the wrappers in `model`. Ops that a wrapper itself runs are in no step.

    It rebuilds its buckets after the first backward, and sends buffers before each forward.
    """
    return frozenset(
        path or ROOT for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)
    )


@contextmanager
def without_ddp_sync(model: nn.Module) -> Iterator[None]:
    """Keep forwards of `model` from communicating with other ranks and from preparing a reduction.

    `modules_restored` must be active around this: it restores the attributes that are set here, and those
    that DistributedDataParallel itself changes.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = False  # as no_sync() does
            module.require_forward_param_sync = False  # or forward sends buffers
            module._static_graph_delay_allreduce_enqueued = True  # or backward reduces everything at its end
    yield
