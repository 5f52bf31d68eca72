"""Ask for the versions of libraries that choose the kernels of a device, and free what they keep."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoac.profiler.torch_facts import private


def cudnn_of(device: torch.device) -> int:
    """Return the version of cuDNN on `device`, as 92000 for 9.20.0; 0 where there is none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.backends.cudnn.version() or 0


def free_workspaces(device: torch.device) -> bool:
    """Free the memory that cuBLAS keeps from step to step. Return False if `device` has none.

    torch allocates such a workspace for each stream and thread, and some versions of torch can free only
    those of the calling thread.
    """
    if device.type != "cuda":
        return False
    private.clear_cublas_workspaces()
    call_in_backward(private.clear_cublas_workspaces, device)
    return True


def call_in_backward(call: Callable[[], None], device: torch.device) -> None:
    """Call `call` on the thread on which backward runs ops of `device`: on a GPU, not this thread."""
    with torch.enable_grad():
        out = torch.zeros((), device=device, requires_grad=True).clone()
    out.register_hook(lambda _gradient: call())
    with private.compiled_autograd_off():
        out.backward()
