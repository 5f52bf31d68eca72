"""Models in DistributedDataParallel: what it adds to a step, and how to profile under it.

DistributedDataParallel reduces gradients from hooks of the parameters, which a profiled step does not
touch; what its forward prepares for that, and the buffers that it sends around, are left out as well, so
that one rank alone may profile. Its buckets stand on the device.
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
    """The memory through which DistributedDataParallel reduces gradients. Bytes."""

    nbytes: int = 0
    holds_gradients: bool = False  # gradients are views of it (gradient_as_bucket_view=True)


def buckets_of(model: nn.Module, device: torch.device | None) -> Buckets:
    """The buckets of the wrappers in `model`, and of the one whose forward it is called in.

    Counts parameters on `device`, or on any if it is None. Buckets are as large as the parameters; a rank
    of one process has them too.
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
    """The wrappers in `model`: what each of them runs itself, around the module in it, is no op of a step.

    It rebuilds its buckets after the first backward, and sends buffers before each forward.
    """
    return frozenset(
        path or ROOT for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)
    )


@contextmanager
def without_ddp_sync(model: nn.Module) -> Iterator[None]:
    """Forwards of `model` talk to no other rank and prepare no reduction.

    What this sets, `modules_restored` puts back: it also is what DistributedDataParallel itself changes.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = False  # as no_sync() does
            module.require_forward_param_sync = False  # or forward sends buffers
            module._static_graph_delay_allreduce_enqueued = True  # or backward reduces everything at its end
    yield
