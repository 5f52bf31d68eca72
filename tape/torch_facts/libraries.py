"""Ask for the versions of the libraries of a device, and handle what they allocate at first use and keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoac.tape.torch_facts import private


def cudnn_of(device: torch.device) -> int:
    """Return the version of cuDNN on `device`, as 92000 for 9.20.0; 0 where there is none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.backends.cudnn.version() or 0


def free_workspaces(device: torch.device) -> bool:
    """Free the memory that cuBLAS keeps from step to step; return False where that cannot be done.

    torch allocates such a workspace for each stream and thread, and some versions of torch can free only
    those of the calling thread. A captured CUDA graph holds the address of a workspace
    (pytorch/pytorch#193402), so nothing is freed while the allocator has a graph's pool of memory.
    """
    if device.type != "cuda" or has_pools():
        return False
    private.clear_cublas_workspaces()
    call_in_backward(private.clear_cublas_workspaces, device)
    return True


def has_pools() -> bool:
    """Return True if CUDA's allocator has pools besides its own, such as those of captured graphs.

    Other allocators than torch's own cannot say, and may have some.
    """
    native = torch.cuda.get_allocator_backend() == "native"
    return not native or any(any(one["segment_pool_id"]) for one in _segments())


def pool_nbytes(device: torch.device) -> int:
    """Return the bytes of `device` in pools of captured graphs that no tensor has: nothing else gets them."""
    if torch.cuda.get_allocator_backend() != "native":
        return 0
    index = device.index if device.index is not None else torch.cuda.current_device()
    pools = (one for one in _segments() if any(one["segment_pool_id"]) and one["device"] == index)
    return sum(one["total_size"] - one["allocated_size"] for one in pools)


def has_expandable_segments() -> bool:
    """Return True if CUDA's allocator has segments that grow (PYTORCH_CUDA_ALLOC_CONF)."""
    return torch.cuda.is_initialized() and any(one.get("is_expandable") for one in _segments())


def _segments() -> list[dict[str, Any]]:
    return list(torch.cuda.memory_snapshot(include_traces=False))


def call_in_backward(call: Callable[[], None], device: torch.device) -> None:
    """Call `call` on the thread on which backward runs ops of `device`: on a GPU, not this thread."""
    with torch.enable_grad():
        leaf = torch.zeros(0, device=device, requires_grad=True)  # the engine may hold it for a while
        out = leaf.clone()
    out.register_hook(lambda _gradient: call())
    with private.compiled_autograd_off():
        # Inside of vmap, as of `is_grads_batched`, backward() is an error.
        torch.autograd.grad(out, leaf, torch.zeros_like(out))
