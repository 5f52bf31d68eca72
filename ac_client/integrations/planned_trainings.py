"""The trainings of a library's callback: planned when they begin, measured once, removed when they end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ac_client import Applied, NotApplied, Report, applied, apply
from ac_client.errors import NO_TRAINING
from ac_client.integrations.options import ApplyArguments
from ac_client.integrations.saved_policies import usable
from ac_client.planning.options import Budget
from autoac.planner import PolicySet

STEPS_BEFORE_MEASURING = 2


class PlannedTrainings:
    """The base of a callback that plans trainings, one after another.

    Args:
        planned: what is planned, in an error.
        budget_gb, options: as for `ac_client.apply`.
        measure: measure the peak of the third step. By then gradients and optimizer state are as in later
            steps, and so is the plan, which the second step may replace because gradients exist.
    """

    def __init__(self, planned: str, budget_gb: Budget, measure: bool, options: ApplyArguments) -> None:
        super().__init__()
        self._planned, self._budget_gb, self._measure, self._options = planned, budget_gb, measure, options
        self._applied: Applied | None = None  # of the running training
        self._report: Report | None = None
        self._policies: PolicySet | None = None
        self._measuring: AbstractContextManager[None] | None = None
        self._to_measure = False
        self._ended = 0  # steps of the running training

    @property
    def applied(self) -> Applied:
        """The `Applied` of the model in training.

        Raises:
            NotApplied: no training is running.
        """
        if self._applied is None:
            raise NotApplied(self._planned, NO_TRAINING)
        return self._applied

    @property
    def report(self) -> Report | None:
        """The report of the running training, or of the last one; None before the first."""
        return self._applied.report() if self._applied is not None else self._report

    @property
    def policies(self) -> PolicySet | None:
        """The policies of the running training, or of the last one; None before the first."""
        return self._applied.policies if self._applied is not None else self._policies

    def remove(self) -> None:
        """Remove the plan from the model. May be called twice, and in the middle of a step."""
        measuring, self._measuring = self._measuring, None
        if self._applied is None:
            return
        self._report, self._policies = self._applied.report(), self._applied.policies
        if measuring is not None:
            interrupted = RuntimeError("the measured step was interrupted")
            measuring.__exit__(RuntimeError, interrupted, None)
        self._applied.remove()
        self._applied = None

    def _begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: str) -> None:
        """Plan `model` from now on.

        Args:
            model: the model that is trained.
            optimizers: that the library steps, in addition to those among the options.
            saved: JSON of the policies of the training that this one continues; "" if there are none.
        """
        options = self._options.copy()
        if saved and (policies := usable(saved, self._budget_gb, options, model)) is not None:
            options["policy"] = policies
        given = options.get("optimizer") or ()
        several = [*optimizers, *(given if isinstance(given, Sequence) else (given,))]
        options["optimizer"] = several[0] if len(several) == 1 else several or None
        apply(model, self._budget_gb, **options)
        self._applied = applied(model)
        self._to_measure, self._ended = self._measure, 0

    def _step_begins(self) -> None:
        """Begin a step of the optimizer, before its first forward."""
        at = self._applied
        if self._to_measure and at is not None and self._ended >= STEPS_BEFORE_MEASURING and at.policy:
            self._to_measure = False
            self._measuring = at.measure()
            self._measuring.__enter__()

    def _step_ended(self) -> None:
        """End a step, after the optimizer has stepped."""
        self._ended += 1
        measuring, self._measuring = self._measuring, None
        if measuring is not None:
            measuring.__exit__(None, None, None)
