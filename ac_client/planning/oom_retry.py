"""A step that ran out of memory: whether it did, and what has to be put back before it can run again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ac_client.planning.optimizer_steps import steps_begun
from ac_client.runtime.write_guard import version_counter
from autoac.profiler import device_of
from autoac.profiler.restore.module_state import ModuleState
from autoac.profiler.torch_facts.rng import DefaultGenerators

_IN_WORDS_ONLY = (
    "DefaultCPUAllocator: can't allocate memory",
    # Where CUDA and its libraries take memory themselves, beside the caching allocator that has the rest.
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",  # a handle, as at the first product on backward's thread
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocator had nothing left: that of CUDA's tensors, or one that says so in words only."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _IN_WORDS_ONLY)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A parameter before a step. What it does not hold is free to go in the step."""

    parameter: nn.Parameter
    version: int
    gradient: weakref.ref[Tensor] | None
    gradient_version: int
    copy: Tensor | None  # of the gradient, in the host's memory

    def written(self) -> bool:
        return _version(self.parameter) != self.version

    def kept(self) -> bool:
        """Whether the gradient that was there is there still, as it was."""
        gradient = self.parameter.grad
        return (
            self.gradient is None
            or self.copy is not None
            or (gradient is self.gradient() and _version(gradient) == self.gradient_version)
        )

    def restore(self) -> None:
        gradient = self.parameter.grad
        if self.gradient is None:
            self.parameter.grad = None
        elif self.copy is not None:
            if gradient is not None and gradient is self.gradient():
                gradient.copy_(self.copy)
            else:
                self.parameter.grad = self.copy.to(self.parameter.device)


class Before:
    """What a step may change that it must find again: gradients, buffers, what modules keep, generators.

    Copies are in the host's memory. On a CPU that is the memory of the budget.

    Args:
        keep_gradients: copy the gradients that are there, so that a step that has added to them can be
            undone. Else only those that are not there yet are dropped again.
    """

    def __init__(self, model: nn.Module, *, keep_gradients: bool) -> None:
        self._generators = DefaultGenerators(device_of(model))
        self._leaves = []
        for parameter in model.parameters():
            gradient = parameter.grad
            self._leaves.append(
                _Leaf(
                    parameter,
                    _version(parameter),
                    weakref.ref(gradient) if gradient is not None else None,
                    _version(gradient),
                    _copied(gradient) if keep_gradients and gradient is not None else None,
                )
            )
        self._model = model
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._modules = ModuleState(model, _copied)
        self._buffers = [(buffer, _copied(buffer)) for buffer in model.buffers()]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The step runs inside."""
        with steps_begun(self._model) as self._optimizers:
            yield

    def why_not(self) -> str:
        """What keeps the step from running again as if it had not run; "" if nothing does."""
        if self._optimizers or any(leaf.written() for leaf in self._leaves):
            return "it has written to parameters (an optimizer in backward?)"
        if not all(leaf.kept() for leaf in self._leaves):
            return (
                "it has changed gradients of earlier steps; step(fn, keep_gradients=True) keeps copies of "
                "them, and zero_grad belongs before the step"
            )
        return ""

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for leaf in self._leaves:
                leaf.restore()
            self._modules.restore()
            for buffer, copy in self._buffers:
                if not torch.equal(buffer.cpu(), copy):
                    buffer.copy_(copy)
        self._generators.restore()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else version_counter(tensor)
