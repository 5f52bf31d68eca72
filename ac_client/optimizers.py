"""Steps of optimizers. Version counters do not tell them all: a fused kernel writes and counts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoac.profiler.sharding import parameters_of
from autoac.profiler.static import innermost


class StepCount:
    """How often an optimizer has stepped since `watch`.

    Args:
        stepped: is called after each step.
    """

    def __init__(self, stepped: Callable[[], None] = lambda: None) -> None:
        self.steps = 0
        self._after_step = stepped

    def watch(self, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Count from here on, until the handle is removed. None where an optimizer has no such hooks."""
        optimizer = innermost(optimizer)
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            return []
        return [optimizer.register_step_post_hook(self._stepped)]

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        self._after_step()


@contextmanager
def steps_begun(model: nn.Module) -> Iterator[list[torch.optim.Optimizer]]:
    """The optimizers of any of `model`'s parameters that begin a step inside the block, as they do."""
    mine = {id(parameter) for parameter in parameters_of(model)}
    begun: list[torch.optim.Optimizer] = []

    def notice(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            begun.append(optimizer)

    handle = register_optimizer_step_pre_hook(notice)
    try:
        yield begun
    finally:
        handle.remove()
