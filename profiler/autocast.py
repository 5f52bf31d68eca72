"""Set the state of autocast, also for a device that is not on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def autocast_to(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enable autocast to `dtype`, as in `torch.autocast(device_type, dtype)`; None changes nothing.

    Without a GPU, `torch.autocast("cuda")` switches itself off, so this sets its flags.
    """
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def may_be_switched_off() -> bool:
    """Return True if the caller may be inside a `torch.autocast("cuda")` that is off for want of a GPU."""
    torch.autocast_increment_nesting()
    inside = torch.autocast_decrement_nesting() > 0
    types = ("cuda", "cpu")
    return inside and not torch.cuda.is_available() and not any(map(torch.is_autocast_enabled, types))
