"""Ask how much memory a device has for this process."""

from __future__ import annotations

import os

import torch


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
