"""Time training steps so that runs on a shared machine can be compared."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, as a GPU's caching allocator does; only glibc has this setting.

    By default glibc returns the end of the heap to the kernel when a step ends, and the kernel hands it out
    again page by page, zeroed: up to a tenth of a plain step. A planned step returns less, so recomputation
    would seem to take less time than it does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_MAX, 0)


def loss_of(out: Any) -> Tensor:
    """Return the loss of a zoo model's output, a dict or an output of `transformers`."""
    loss: Tensor = out["loss"] if isinstance(out, dict) else out.loss
    return loss


def step_s(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """Return the CPU time of a step in this thread; other processes do not add to it."""
    torch.manual_seed(0)
    began = time.thread_time()
    out = model(**batch)
    loss_of(out).backward()
    del out
    return time.thread_time() - began


def rotated(items: Sequence[T], round_number: int) -> list[T]:
    """Return `items` in the order of a round: each round begins with another item."""
    first = round_number % len(items)
    return [*items[first:], *items[:first]]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, estimated from the spread about it."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return float(1.858 * spread / len(values) ** 0.5)
