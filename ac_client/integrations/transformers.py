"""transformers' Trainer: a callback that plans its model.

    trainer = Trainer(..., callbacks=[AutoACCallback(budget_gb=40)])
    trainer.train()

or, taken off also where training raises, and before the reporters so that all of them are told:

    with planned(trainer, budget_gb=40):
        trainer.train()
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import nn

from ac_client import Applied, ApplyError, CheckpointingActive, CompiledModel, NotApplied, Report
from ac_client.arguments import CHECKPOINTING_SWITCHES, check_not_compiled
from ac_client.integrations.errors import MissingLibrary
from ac_client.integrations.options import Options
from ac_client.integrations.session import Session

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingLibrary("transformers", "transformers accelerate") from None

log = logging.getLogger("ac_client")


class AutoACCallback(TrainerCallback):
    """Plans the Trainer's model for the time of `train()`.

    Applied when training begins: then the optimizer exists, a checkpoint to resume from is loaded, and
    accelerate has prepared the model. The first training forward is profiled and planned. What is logged
    of training has the report's `metrics()` beside the loss.

    The Trainer tells its callbacks nothing of an exception. Where training raised, the model stays planned,
    which changes no number, until the next `train()` begins anew or `remove()` is called; `planned(trainer)`
    takes it off at once.

    Args:
        budget_gb, options: as for `ac_client.apply`.
        measure: measure the peak of the third step by the allocator's own record. On CUDA, where the
            allocator counts by itself, this is not needed, and resets its counter.

    Raises:
        CheckpointingActive, CompiledModel, ApplyError: from the Trainer's constructor or `train()`, for
            arguments that leave nothing to plan.
    """

    def __init__(
        self, budget_gb: float | None = None, *, measure: bool = False, **options: Unpack[Options]
    ) -> None:
        self._budget_gb = budget_gb
        self._measure = measure
        self._options = options
        self._session: Session | None = None
        self._report: Report | None = None

    @property
    def applied(self) -> Applied:
        """What was applied to the model that is being trained.

        Raises:
            NotApplied: no training is running.
        """
        if self._session is None:
            raise NotApplied("Trainer's model")
        return self._session.at

    @property
    def report(self) -> Report | None:
        """Of the training that is running, or of the last one; None before the first."""
        return self._session.at.report() if self._session is not None else self._report

    def remove(self) -> None:
        """Leave the model as it was. May be called twice."""
        session, self._session = self._session, None
        if session is not None:
            self._report = session.at.report()
            session.close()

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        _check(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **_: Any,
    ) -> None:
        from ac_client.integrations.accelerate import check_not_compiled_by_accelerate

        self.remove()  # training has raised before, or auto_find_batch_size begins again
        _check(args)
        check_not_compiled_by_accelerate("accelerate")
        assert model is not None
        check_not_compiled(model, "leave the torch.compile of the whole model out")
        self._session = Session(model, self._budget_gb, optimizer, self._measure, self._options)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._session is not None:
            self._session.step_begins()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._session is not None:
            self._session.step_ended()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self._session is None or logs is None or not ("loss" in logs or "train_loss" in logs):
            return
        found = self._session.at.report().metrics()
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)  # a copy of `logs` that was made before

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.remove()
        if state.is_world_process_zero:
            log.info("%s", self._report)


@contextmanager
def planned(
    trainer: Trainer, budget_gb: float | None = None, *, measure: bool = False, **options: Unpack[Options]
) -> Iterator[AutoACCallback]:
    """Put the callback into `trainer` for a with-block: however that ends, both are left as they were.

    The callback comes first, so that every reporter (TensorBoard, W&B, ...) finds the report's metrics
    among what it is given to log.

    Args:
        budget_gb, measure, options: as for `AutoACCallback`.

    Raises:
        As `AutoACCallback`.
    """
    callback = AutoACCallback(budget_gb, measure=measure, **options)
    _check(trainer.args)
    trainer.callback_handler.callbacks.insert(0, callback)
    try:
        yield callback
    finally:
        callback.remove()
        trainer.remove_callback(callback)


def _check(args: TrainingArguments) -> None:
    """Refuse arguments that leave nothing to plan.

    Raises:
        CheckpointingActive, CompiledModel, ApplyError.
    """
    for name in CHECKPOINTING_SWITCHES:
        if getattr(args, name, False):
            raise CheckpointingActive("TrainingArguments", f"{name}=False")
    if args.torch_compile:
        raise CompiledModel("TrainingArguments(torch_compile=True)", "pass torch_compile=False")
    if args.n_gpu > 1:
        raise ApplyError(
            f"the Trainer would copy the model to {args.n_gpu} devices in every step (DataParallel), and a "
            "plan is for one: launch a process for each with torchrun, or set CUDA_VISIBLE_DEVICES to one"
        )
