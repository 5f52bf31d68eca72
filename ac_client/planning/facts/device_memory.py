"""Ask how much memory a device has for this process, and how much of it is taken."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from autoac.tape.torch_facts.gradients import gradient_of
from autoac.tape.torch_facts.storage_table import has_storage


def free_nbytes(device: torch.device) -> int | None:
    """Return the memory of `device` that this process has or can still get; None if it is not known.

    That is what `budget_gb="device"` plans for. On a GPU, other processes and what torch holds outside of its
    allocator (the context, NCCL) are taken off, and a limit of `set_per_process_memory_fraction` counts.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = round(total * torch.cuda.get_per_process_memory_fraction(device))
        return min(free + torch.cuda.memory_reserved(device), allowed)
    if device.type == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def taken_nbytes(device: torch.device) -> int:
    """Return the bytes of `device` that this process's tensors take now.

    CUDA's allocator knows them. No other allocator counts: there, the storages of all tensors that Python
    knows are added up, without those that only autograd holds. That is one pass over all objects.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    kinds = set(_kinds_of(Tensor))
    known = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]  # an object refers to its type
    known += [gradient for one in known if (gradient := gradient_of(one)) is not None]
    storages = (one.untyped_storage() for one in known if one.device.type == device.type and has_storage(one))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _kinds_of(kind: type[Tensor]) -> Iterator[type[Tensor]]:
    yield kind
    for subclass in type.__subclasses__(kind):
        yield from _kinds_of(subclass)
