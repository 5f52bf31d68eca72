"""The optimizers that step a model: those that `apply` was given, and those that are seen to step it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoac.planner import Profile
from autoac.profiler import device_of
from autoac.profiler.distributed.fsdp import parameters_of
from autoac.profiler.static_memory import innermost, optimizer_state_nbytes

log = logging.getLogger("ac_client")


class ModelOptimizers:
    """The optimizers of one model's parameters, and how often they have stepped.

    Version counters do not show every step: a fused kernel writes and counts nothing.

    Attributes:
        steps: since they are watched.
        adopted: how many were not given, and were seen to step the model.
        after_step: a reference to what is called with the optimizer after each step.
    """

    def __init__(self, model: nn.Module, given: torch.optim.Optimizer | None) -> None:
        self.steps = 0
        self.adopted = 0
        self.after_step: Callable[[], Callable[[torch.optim.Optimizer], None] | None] = _nothing
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

    def has_state_of(self, model: nn.Module, profile: Profile) -> bool:
        """Return True if all the optimizer state that `profile` counts exists by now."""
        return self.state_nbytes(device_of(model)) >= profile.static.optimizer_state

    def close(self) -> None:
        """Stop to watch."""
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
                after(optimizer)


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


class UnplannedSteps:
    """Notices training that no plan runs in: in `eval()`, or past the model's own call.

    A forward in `eval()` that could be differentiated is an evaluation as a rule, and not planned. If an
    optimizer steps after it, with no forward in `train()` since its last step, it was training (BatchNorm is
    frozen so): forwards in `eval()` are planned from then on, until the model is called in `train()`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._forwards_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._in_eval = False  # a forward that could be differentiated ran in eval() since the last step
        self._trains_in_eval = False
        self._in_a_row = 0  # steps without a forward that trains
        self._told: set[str] = set()

    def trains_in(self, model: nn.Module) -> bool:
        """Return True if a forward of `model` now, in its mode, is one that trains."""
        if model.training:
            self._trains_in_eval = self._in_eval = False
            return True
        self._in_eval = True
        return self._trains_in_eval

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, forwards: int) -> None:
        """Take note of a step, after so many forwards that train."""
        before = self._forwards_at.get(optimizer, 0)
        self._forwards_at[optimizer] = forwards
        in_eval, self._in_eval = self._in_eval, False
        if forwards != before:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if in_eval:
            self._trains_in_eval = True
            self._tell(
                "eval",
                "%s is trained in eval(): this step ran unplanned, and the next forwards are planned, "
                "evaluations too unless they run under torch.no_grad()",
                self._name,
            )
        elif self._in_a_row > 1:  # one alone may be a step that only makes the optimizer's state
            self._tell(
                "unseen",
                "%s: the optimizer has stepped %d times without a training forward of the model, so nothing "
                "is planned and the budget is not kept. Call the model itself, not model.forward or "
                "parts of it; apply to the module that is called, which an nn.ModuleList never is",
                self._name,
                self._in_a_row,
            )

    def _tell(self, what: str, message: str, *args: Any) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(message, *args)


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
