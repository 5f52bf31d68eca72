"""One training run of a library's own loop: planned when it begins, measured once, taken off when it ends."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch
from torch import nn

from ac_client import Applied, applied, apply
from ac_client.integrations.options import Options

log = logging.getLogger("ac_client")

STEPS_BEFORE_MEASURING = 2


class Session:
    """A model that is planned from here until `close`.

    Args:
        model, budget_gb, optimizer, options: as for `ac_client.apply`.
        measure: measure the peak of the third step. Gradients and optimizer state are then as in later ones,
            and a plan that the second step makes for gradients that it finds is there.
    """

    def __init__(
        self,
        model: nn.Module,
        budget_gb: float | None,
        optimizer: torch.optim.Optimizer | None,
        measure: bool,
        options: Options,
    ) -> None:
        apply(model, budget_gb, optimizer=optimizer, **options)
        self.at: Applied = applied(model)
        self._name = type(model).__name__
        self._to_measure = measure
        self._measuring: AbstractContextManager[None] | None = None
        self._ended = 0

    def step_begins(self) -> None:
        """A step of the optimizer begins: its first forward is next."""
        if self._to_measure and self._ended >= STEPS_BEFORE_MEASURING and self.at.policy is not None:
            self._to_measure = False
            self._measuring = self.at.measure()
            self._measuring.__enter__()

    def step_ended(self) -> None:
        """The optimizer has stepped, and gradients were dropped or will be."""
        self._ended += 1
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            measuring.__exit__(None, None, None)
        if self._ended == 1 and self.at.policy is None:
            log.warning(
                "%s was not called in the first step, so nothing is planned: it has to be called itself, "
                "as model(batch), and not a part or a copy of it",
                self._name,
            )

    def close(self) -> None:
        """Leave the model as it was. May be called twice, and in the middle of a step."""
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            broken_off = RuntimeError("the step that was measured was broken off")
            measuring.__exit__(RuntimeError, broken_off, None)
        self.at.remove()
