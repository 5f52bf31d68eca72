"""The optimizers that step a model: those that `apply` was given, and those that are seen to step it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoac.profiler.sharding import parameters_of
from autoac.profiler.static import innermost, optimizer_state_nbytes


class ModelOptimizers:
    """The optimizers of one model's parameters, and how often they have stepped.

    Version counters do not show every step: a fused kernel writes and counts nothing.

    Attributes:
        steps: since they are watched.
        adopted: how many were not given, and were seen to step the model.
        after_step: a reference to what is called after each step.
    """

    def __init__(self, model: nn.Module, given: torch.optim.Optimizer | None) -> None:
        self.steps = 0
        self.adopted = 0
        self.after_step: Callable[[], Callable[[], None] | None] = _nothing
        self._model = weakref.ref(model)
        self._given = given
        self._adopted: list[weakref.ref[torch.optim.Optimizer]] = []
        self._of_others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _watch(self)

    @property
    def all(self) -> list[torch.optim.Optimizer]:
        """Those that are known, each without what wraps it."""
        adopted = [optimizer for ref in self._adopted if (optimizer := ref()) is not None]
        return [*([innermost(self._given)] if self._given is not None else []), *adopted]

    def state_nbytes(self, device: torch.device) -> int:
        """Return the bytes of their state on `device` as it is now."""
        return sum(optimizer_state_nbytes(optimizer, device) for optimizer in self.all)

    def close(self) -> None:
        """Watch no longer."""
        _watched.discard(self)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Adopt `optimizer` if it steps the model and is not known."""
        if optimizer in self._of_others or any(optimizer is one for one in self.all):
            return
        model = self._model()
        if model is None or not _steps(optimizer, model):
            self._of_others.add(optimizer)
        elif innermost(optimizer) is optimizer:  # what wraps another lets that one step
            self._adopted.append(weakref.ref(optimizer))
            self.adopted += 1

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of one that is known."""
        if any(optimizer is one for one in self.all):
            self.steps += 1
            if (after := self.after_step()) is not None:
                after()


_watched: weakref.WeakSet[ModelOptimizers] = weakref.WeakSet()


def _begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for of_model in list(_watched):
        of_model.step_begins(optimizer)


def _ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for of_model in list(_watched):
        of_model.step_ended(optimizer)


def _nothing() -> None:
    return None


@cache
def _hooks() -> list[RemovableHandle]:
    """Register both for all optimizers, once for the process: they hold no model and no optimizer."""
    return [register_optimizer_step_pre_hook(_begins), register_optimizer_step_post_hook(_ended)]


def _watch(of_model: ModelOptimizers) -> None:
    _hooks()
    _watched.add(of_model)


def _steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    mine = {id(parameter) for parameter in parameters_of(model)}
    return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])


@contextmanager
def steps_begun(model: nn.Module) -> Iterator[list[torch.optim.Optimizer]]:
    """The optimizers of any of `model`'s parameters that begin a step inside the block, as they do."""
    begun: list[torch.optim.Optimizer] = []

    def notice(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _steps(optimizer, model):
            begun.append(optimizer)

    handle = register_optimizer_step_pre_hook(notice)
    try:
        yield begun
    finally:
        handle.remove()
