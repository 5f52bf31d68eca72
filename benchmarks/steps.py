"""Take training steps of a model, and measure their peaks and their times so that runs can be compared."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autoac.tape.capture.allocations import AllocationRecord
from benchmarks.models.batches import Batch

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
    """Return the loss of a zoo model's output: the loss itself, a dict or an output of `transformers`."""
    loss: Tensor = out if isinstance(out, Tensor) else out["loss"] if isinstance(out, dict) else out.loss
    return loss


class Trainee:
    """A model in training on one batch: each step computes the same numbers.

    Args:
        call: runs the forward; by default the model itself.
        loss: the loss of what the forward returns.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        call: Callable[..., Any] | None = None,
        loss: Callable[[Any], Tensor] = loss_of,
    ) -> None:
        self.model, self.batch, self.loss = model, batch, loss
        self.call = model if call is None else call

    def step(self) -> None:
        torch.manual_seed(1)
        self.model.zero_grad()
        for value in self.batch.values():
            if isinstance(value, Tensor):
                value.grad = None
        out = self.call(**self.batch)  # lives through backward, as in most loops
        self.loss(out).backward()

    def seconds(self) -> float:
        """Return the CPU time of a step in this thread; other processes do not add to it."""
        began = time.thread_time()
        self.step()
        return time.thread_time() - began

    def gradients(self) -> list[Tensor]:
        """Return copies of the parameters' gradients."""
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def peak(self) -> int:
        """Return the peak of a step on the CPU beyond what exists before it, in bytes."""
        self.model.zero_grad()
        gc.collect()
        with AllocationRecord(torch.device("cpu")) as record:
            self.step()
        return max(accumulate(change.nbytes for change in record.changes))


def rotated(items: Sequence[T], round_number: int) -> list[T]:
    """Return `items` in the order of a round: each round begins with another item."""
    first = round_number % len(items)
    return [*items[first:], *items[:first]]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median, estimated from the spread about it."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return float(1.858 * spread / len(values) ** 0.5)
