"""The callback in a real Trainer: the same weights, less memory, nothing left."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from stepping import ThirdStep, needs_compiled_plans
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ac_client
from ac_client.integrations.transformers import POLICIES_FILE as FILE
from ac_client.integrations.transformers import AutoACCallback, planned
from autoac.planner import PolicySet
from benchmarks.models.gpt2 import gpt2

BUDGET_GB = 0.0026
ROWS = 14  # with batches of 4 the last is short


def rows(count: int = ROWS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (count, 64), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return gpt2(layers=2, width=32, heads=4, vocabulary=64, positions=64, use_cache=True)


def trainer_of(
    folder: Path,
    callbacks: Sequence[TrainerCallback] = (),
    *,
    kind: type[Trainer] = Trainer,
    model: nn.Module | None = None,
    **arguments: Any,
) -> Trainer:
    chosen = {"num_train_epochs": 1, "save_strategy": "no", "logging_steps": 1, **arguments}
    return kind(
        model=new_model() if model is None else model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            learning_rate=1e-2,
            seed=1,
            **chosen,
        ),
        train_dataset=rows(),
        eval_dataset=rows(4),
        callbacks=list(callbacks),
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_untouched(model: nn.Module) -> None:
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ac_client.NotApplied):
        ac_client.applied(model)


class Watch(TrainerCallback, ThirdStep):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin(state.global_step)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.end()


def trained(folder: Path, callbacks: Sequence[TrainerCallback], **arguments: Any) -> Trainer:
    trainer = trainer_of(folder, callbacks, **arguments)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"gradient_accumulation_steps": 2, "num_train_epochs": 2}, id="accumulation"),
        pytest.param({"bf16": True, "eval_strategy": "steps", "eval_steps": 1}, id="bf16, evaluation"),
    ],
)
def test_weights_equal_those_of_an_unplanned_training_at_a_lower_peak(
    tmp_path: Path, arguments: dict[str, Any], calls_of: Any
) -> None:
    plain_watch, watch, callback = Watch(), Watch(), AutoACCallback(BUDGET_GB)
    calls_of(type(new_model()), "forward")
    plain = trained(tmp_path / "plain", [plain_watch], **arguments)
    plain_calls = calls_of()
    ours = trained(tmp_path / "ours", [callback, watch], **arguments)
    assert_same(weights(ours.model), weights(plain.model))
    assert calls_of() == plain_calls
    assert plain_calls["forward"] >= 8
    losses = [[entry.get("loss") for entry in one.state.log_history] for one in (ours, plain)]
    assert losses[0] == losses[1]
    assert callback.report.predicted_peak_bytes < callback.report.save_all_peak_bytes
    assert not callback.report.off_path
    assert 0 < watch.peak < 0.9 * plain_watch.peak
    assert_untouched(ours.model)


def test_resumed_training_ends_with_the_same_weights_and_plain_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    plain = trained(tmp_path / "plain", [], **saved)
    first = trainer_of(tmp_path / "ours", [AutoACCallback(BUDGET_GB), Raise(at=3)], **saved)
    with pytest.raises(Stop):
        first.train()
    callback = AutoACCallback(BUDGET_GB)
    ours = trainer_of(tmp_path / "ours", [callback], **saved)
    with caplog.at_level(logging.INFO, "ac_client"):
        ours.train(resume_from_checkpoint=True)
    assert "observing" not in caplog.text, "its policies were saved with the checkpoint"
    assert callback.policies == PolicySet.from_json((tmp_path / "ours/checkpoint-4" / FILE).read_text())
    assert callback.report.steps == 2
    assert callback.report.predicted_peak_bytes < callback.report.save_all_peak_bytes
    assert_same(weights(ours.model), weights(plain.model))
    folders = [tmp_path / name / "checkpoint-4" for name in ("plain", "ours")]
    names = [sorted(path.name for path in folder.iterdir() if path.name != FILE) for folder in folders]
    assert names[0] == names[1]
    for name in names[0]:
        content = [(folder / name).read_bytes() for folder in folders]
        assert b"ac_client" not in content[1]
        if name in ("model.safetensors", "config.json", "optimizer.pt", "scheduler.pt"):
            assert content[0] == content[1]
    loaded = GPT2LMHeadModel.from_pretrained(folders[1])
    assert_same(weights(loaded), weights(plain.model))


@pytest.mark.parametrize(
    "again",
    [{"budget_gb": 1.1 * BUDGET_GB}, {"budget_gb": BUDGET_GB, "constraints": ac_client.Constraints()}],
)
def test_training_resumed_under_other_terms_is_planned_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, again: dict[str, Any]
) -> None:
    trained(tmp_path, [AutoACCallback(BUDGET_GB)], save_strategy="steps", save_steps=1, max_steps=1)
    ours = trainer_of(tmp_path, [AutoACCallback(**again)], max_steps=2)
    with caplog.at_level(logging.INFO, "ac_client"):
        ours.train(resume_from_checkpoint=True)
    assert "observing" in caplog.text


def test_loss_outside_of_the_model_is_planned(tmp_path: Path) -> None:
    smooth = {"label_smoothing_factor": 0.1, "max_steps": 2}
    callback = AutoACCallback(BUDGET_GB, verify=1)
    ours = trained(tmp_path / "ours", [callback], **smooth)
    assert_same(weights(ours.model), weights(trained(tmp_path / "plain", [], **smooth).model))
    assert callback.report.recomputed > 0


class Stop(Exception):
    """Ends a training in the middle."""


class Raise(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at - 1:
            raise Stop


def test_exception_leaves_nothing_of_planned_behind(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [Raise(at=3)])
    callbacks = list(trainer.callback_handler.callbacks)
    with pytest.raises(Stop), planned(trainer, BUDGET_GB, measure=True) as callback:
        trainer.train()  # stops within what is measured
    assert callback.report.predicted_peak_bytes < callback.report.save_all_peak_bytes
    assert callback.report.steps == 2
    assert_untouched(trainer.model)
    assert trainer.callback_handler.callbacks == callbacks
    assert not torch._C._autograd._profiler_enabled()


def test_callback_starts_again_after_an_exception_or_is_removed(tmp_path: Path) -> None:
    callback = AutoACCallback(BUDGET_GB)
    trainer = trainer_of(tmp_path, [callback, Raise(at=2)], max_steps=2)
    for _ in range(2):
        with pytest.raises(Stop):
            trainer.train()
        assert callback.applied is ac_client.applied(trainer.model)
        assert callback.applied.report().steps == 1
    callback.remove()
    callback.remove()
    assert_untouched(trainer.model)
    with pytest.raises(ac_client.NotApplied):
        _ = callback.applied


class Reporter(TrainerCallback):
    """Stands where TensorBoard's callback would: before those of the user."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


FIGURES = {
    f"autoac/{name}"
    for name in ("budget_gb", "predicted_peak_gb", "save_all_peak_gb", "recompute_ms", "recompute_overhead")
}


def test_reporters_and_history_receive_the_metrics(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [reporter := Reporter()], eval_strategy="epoch")
    with planned(trainer, BUDGET_GB, measure=True):
        done = trainer.train()
    steps = [logs for logs in reporter.logs if "loss" in logs]
    assert len(steps) == 4
    assert all(logs.keys() >= FIGURES for logs in steps)
    assert ["autoac/measured_peak_gb" in logs for logs in steps] == [False, False, True, True]
    measured, predicted = (steps[-1][f"autoac/{name}_peak_gb"] for name in ("measured", "predicted"))
    assert measured == pytest.approx(predicted, rel=0.05)
    assert measured <= BUDGET_GB < steps[-1]["autoac/save_all_peak_gb"]
    assert steps[-1]["autoac/recompute_overhead"] > 0
    assert done.metrics.keys() >= FIGURES
    assert all(entry.keys() >= FIGURES for entry in trainer.state.log_history if "loss" in entry)
    (evaluated,) = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert not any(name.startswith("autoac") for name in evaluated)
    json.dumps(trainer.state.log_history)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointing_of_its_own_is_taken_over(tmp_path: Path, name: str) -> None:
    if name not in TrainingArguments.__dataclass_fields__:
        pytest.skip(f"this transformers has no {name}")
    callback = AutoACCallback(BUDGET_GB)
    ours = trained(tmp_path / "ours", [callback], **{name: True})
    assert_same(weights(ours.model), weights(trained(tmp_path / "plain", []).model))
    assert callback.report.recomputed > 0
    assert not callback.report.off_path


def test_checkpointing_that_must_not_be_taken_over_is_refused_by_train(tmp_path: Path) -> None:
    rules = ac_client.Constraints(take_over_checkpoints=False)
    trainer = trainer_of(tmp_path, [AutoACCallback(BUDGET_GB, constraints=rules)])
    trainer.model.activation_checkpointing_enable()
    with pytest.raises(ac_client.CheckpointingActive, match="activation_checkpointing_disable"):
        trainer.train()


class Words(nn.Module):
    """A model that is quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x).tanh().exp()
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@needs_compiled_plans
@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_trainer_that_compiles_has_the_weights_of_one_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(callbacks: Sequence[TrainerCallback]) -> dict[str, Tensor]:
        torch.compiler.reset()
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = trainer_of(tmp_path, callbacks, model=Words(), torch_compile_backend="aot_eager")
        trainer.train()
        return weights(trainer.model)

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the Trainer sets it for the process
    callback = AutoACCallback(0.0005, measure=True)
    plain = train([])
    assert_same(train([callback]), plain)
    report = callback.report
    assert report.predicted_peak_bytes < report.save_all_peak_bytes
    assert not report.off_path
    assert report.measured_peak_bytes - report.predicted_peak_bytes <= 64  # scalars of the Trainer's own
    assert report.recorded == 0


def test_several_devices_in_one_process_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(ac_client.ApplyError, match="torchrun"), planned(trainer, BUDGET_GB):
        pass


class OutOnce(Trainer):
    """Runs out of memory in the second step, once."""

    left = 2

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(*args, **kwargs)


def test_smaller_batch_after_running_out_of_memory_is_planned_again(tmp_path: Path) -> None:
    arguments = {"kind": OutOnce, "auto_find_batch_size": True, "max_steps": 3}
    callback = AutoACCallback(0.0023)
    plain = trained(tmp_path, [], **arguments)
    ours = trained(tmp_path, [callback], **arguments)
    assert ours._train_batch_size == plain._train_batch_size < 4
    assert callback.report.predicted_peak_bytes < callback.report.save_all_peak_bytes
    assert_same(weights(ours.model), weights(plain.model))
    assert_untouched(ours.model)


def test_model_that_is_called_is_not_warned_of_while_torchs_profiler_watches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.profiler.profile():
        trained(tmp_path, [AutoACCallback(BUDGET_GB)], max_steps=2)
    assert "nothing is planned" not in caplog.text
