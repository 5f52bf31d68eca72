"""One training run of a library's loop: planned when it begins, measured once, removed when it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ac_client import Applied, applied, apply
from ac_client.integrations.options import ApplyArguments
from ac_client.integrations.saved_policies import usable
from ac_client.planning.options import Budget

log = logging.getLogger("ac_client")

STEPS_BEFORE_MEASURING = 2


class Session:
    """A model that is planned until `close`.

    Args:
        model, budget_gb, options: as for `ac_client.apply`.
        optimizers: that the library steps, in addition to those among the options.
        saved: JSON of the policies of the training that this one continues; "" if there are none.
        measure: measure the peak of the third step. By then gradients and optimizer state are as in later
            steps, and so is the plan, which the second step may replace because gradients exist.
    """

    def __init__(
        self,
        model: nn.Module,
        budget_gb: Budget,
        optimizers: Sequence[torch.optim.Optimizer],
        measure: bool,
        options: ApplyArguments,
        saved: str = "",
    ) -> None:
        options = options.copy()
        if saved and (policies := usable(saved, budget_gb, options, model)) is not None:
            options["policy"] = policies
        given = options.get("optimizer") or ()
        several = [*optimizers, *(given if isinstance(given, Sequence) else (given,))]
        options["optimizer"] = several[0] if len(several) == 1 else several or None
        apply(model, budget_gb, **options)
        self.at: Applied = applied(model)
        self._name = type(model).__name__
        self._to_measure = measure
        self._measuring: AbstractContextManager[None] | None = None
        self._ended = 0

    def step_begins(self) -> None:
        """Begin a step of the optimizer, before its first forward."""
        if self._to_measure and self._ended >= STEPS_BEFORE_MEASURING and self.at.policy is not None:
            self._to_measure = False
            self._measuring = self.at.measure()
            self._measuring.__enter__()

    def step_ended(self) -> None:
        """End a step, after the optimizer has stepped."""
        self._ended += 1
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            measuring.__exit__(None, None, None)
        if self._ended == 1 and self.at.policy is None:
            log.warning(
                "%s was not called in the first step, so nothing is planned: call the model itself, as "
                "model(batch), not a part or a copy of it",
                self._name,
            )

    def close(self) -> None:
        """Remove the plan from the model. May be called twice, and in the middle of a step."""
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            interrupted = RuntimeError("the measured step was interrupted")
            measuring.__exit__(RuntimeError, interrupted, None)
        self.at.remove()
