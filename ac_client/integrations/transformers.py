"""Plan the model of a transformers Trainer by a callback.

    trainer = Trainer(..., callbacks=[AutoACCallback(budget_gb=40)])
    trainer.train()

To remove the plan even if training raises, and to have every reporter log its metrics, use a with-block:

    with planned(trainer, budget_gb=40):
        trainer.train()
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from ac_client import ApplyError
from ac_client.files import write_whole
from ac_client.integrations.errors import MissingLibrary
from ac_client.integrations.options import ApplyArguments
from ac_client.integrations.planned_trainings import PlannedTrainings
from ac_client.planning.options import Budget

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise MissingLibrary("transformers", "transformers accelerate") from None

log = logging.getLogger("ac_client")

POLICIES_FILE = "autoac_policies.json"  # in a checkpoint's folder


class AutoACCallback(PlannedTrainings, TrainerCallback):
    """Plan the Trainer's model for the duration of `train()`.

    The budget is applied when training begins: by then the optimizer exists, a checkpoint to resume from is
    loaded, and accelerate has prepared the model. The first training step is observed, the second planned.
    The training logs contain the report's `metrics()` in addition to the loss.

    The Trainer does not notify callbacks of an exception. If training raised, the model stays planned, which
    changes no number, until the next `train()` or `remove()`; `planned(trainer)` removes the plan at once.

    Each checkpoint has the policies in `autoac_policies.json`. A training that is resumed from it runs under
    them and plans only new shapes of batch, if budget, machine and libraries are the same.

    Args:
        budget_gb, options: as for `ac_client.apply`.
        measure: measure the peak of the third step by the allocator's own record. On CUDA, where the
            allocator counts by itself, this is unnecessary, and resets its counter.

    Raises:
        ApplyError: from the Trainer's constructor or `train()`, for arguments that leave nothing to plan.
    """

    def __init__(
        self, budget_gb: Budget = None, *, measure: bool = False, **options: Unpack[ApplyArguments]
    ) -> None:
        super().__init__("Trainer's model", budget_gb, measure, options)

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
        self.remove()  # an earlier training raised, or auto_find_batch_size starts again
        _check(args)
        assert model is not None
        folders = [_checkpoint_folder(args, state), Path(args.resume_from_checkpoint or os.devnull)]
        files = [folder / POLICIES_FILE for folder in folders if state.global_step]
        saved = next((file.read_text() for file in files if file.is_file()), "")
        self._begin(model, [optimizer] if optimizer is not None else [], saved)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._step_begins()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._step_ended()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        folder, policies = _checkpoint_folder(args, state), self.policies
        if state.is_world_process_zero and folder.is_dir() and policies is not None and policies.buckets:
            write_whole(folder / POLICIES_FILE, policies.to_json())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self._applied is None or logs is None or not ("loss" in logs or "train_loss" in logs):
            return
        metrics = self._applied.report().metrics()
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)  # an earlier copy of `logs`

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.remove()
        if state.is_world_process_zero:
            log.info("%s", self._report)


@contextmanager
def planned(
    trainer: Trainer, budget_gb: Budget = None, *, measure: bool = False, **options: Unpack[ApplyArguments]
) -> Iterator[AutoACCallback]:
    """Add the callback to `trainer` for a with-block; at its end, take callback and plan away again.

    The callback comes first, so that every reporter (TensorBoard, W&B, ...) logs the report's metrics.

    Args:
        budget_gb, measure, options: as for `AutoACCallback`.

    Raises:
        ApplyError: as `AutoACCallback`.
    """
    callback = AutoACCallback(budget_gb, measure=measure, **options)
    _check(trainer.args)
    trainer.callback_handler.callbacks.insert(0, callback)
    try:
        yield callback
    finally:
        callback.remove()
        trainer.remove_callback(callback)


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"checkpoint-{state.global_step}"


def _check(args: TrainingArguments) -> None:
    """Refuse arguments that leave nothing to plan.

    Raises:
        ApplyError: the arguments leave nothing to plan.
    """
    if args.n_gpu > 1:
        raise ApplyError(
            f"the Trainer would copy the model to {args.n_gpu} devices in every step (DataParallel), and a "
            "plan is for one: launch a process for each with torchrun, or set CUDA_VISIBLE_DEVICES to one"
        )
