"""The callback in a real Lightning Trainer: the same weights and metrics, less memory, nothing left."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as lp
import pytest
import pytorch_lightning
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from stepping import ThirdStep
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ac_client
from ac_client.integrations.lightning import AutoACCallback
from benchmarks.models.modules import Transformer

# Lightning's own, about torch and about small data.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`.*"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`.*"),
]

BUDGET_GB = 0.0026
WIDTH = 32


class Lit(lp.LightningModule):
    """Loss outside of the model, a metric, a list and a logged value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Transformer(layers=2, width=WIDTH)
        self.mean = torchmetrics.MeanMetric()
        self.losses: list[float] = []
        self.validating = nn.Dropout(0.5)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch)["logits"]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.argmax(-1).flatten())
        self.mean(loss.detach())
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.model(batch)["logits"].mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.model(batch)["logits"].square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())


def loader(rows: int = 14) -> DataLoader[Any]:
    data = torch.randn(rows, 64, WIDTH, generator=torch.Generator().manual_seed(3))
    return DataLoader(list(data), batch_size=4)  # type: ignore[arg-type]


class Watch(lp.Callback, ThirdStep):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.begin(batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.end()


def trainer_of(folder: Path, callbacks: list[Any], library: Any = lp, **arguments: Any) -> Any:
    chosen = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **arguments}
    return library.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        **chosen,
    )


def fitted(folder: Path, model: lp.LightningModule, callbacks: list[Any], **arguments: Any) -> lp.Trainer:
    torch.manual_seed(1)
    trainer = trainer_of(folder, callbacks, **arguments)
    trainer.fit(model, loader(), loader(4))
    return trainer


def assert_same(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


def assert_untouched(model: nn.Module) -> None:
    assert "training_step" not in vars(model)
    assert "log" not in vars(model)
    own = [module for module in model.modules() if not isinstance(module, torchmetrics.Metric)]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in own)


@pytest.mark.parametrize(
    ("kind", "module", "arguments"),
    [
        pytest.param(Lit, None, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}, id="accumulation"),
        pytest.param(Lit, None, {"precision": "bf16-mixed", "val_check_interval": 1}, id="bf16, validation"),
        pytest.param(Manual, "model", {}, id="manual optimization of the module that is named"),
    ],
)
def test_weights_and_metrics_equal_those_of_an_unplanned_training(
    tmp_path: Path, kind: type[Lit], module: str | None, arguments: dict[str, Any], calls_of: Any
) -> None:
    plain_watch, watch, callback = Watch(), Watch(), AutoACCallback(BUDGET_GB, module=module)
    plain, ours = kind(), kind()
    calls_of(kind, "training_step", "validation_step")
    plain_trainer = fitted(tmp_path, plain, [plain_watch], **arguments)
    plain_calls = calls_of()
    trainer = fitted(tmp_path, ours, [callback, watch], **arguments)
    assert_same(ours, plain)
    assert calls_of() == plain_calls
    assert plain_calls["training_step"] == 4
    assert ours.losses == plain.losses
    logged = {name: value for name, value in trainer.callback_metrics.items() if "autoac" not in name}
    assert logged == plain_trainer.callback_metrics
    assert logged.keys() >= ({"loss", "mean"} if kind is Lit else {"val"})
    assert callback.report.predicted_peak_bytes < callback.report.save_all_peak_bytes
    assert not callback.report.off_path
    assert 0 < watch.peak < 0.9 * plain_watch.peak
    assert_untouched(ours)


def test_gradients_that_lightning_frees_before_backward_count_in_the_only_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ac_client")
    callback = AutoACCallback(BUDGET_GB, measure=True)
    fitted(tmp_path, Lit(), [callback])
    assert len(plans_in(caplog)) == 1
    assert callback.report.steps == 3
    measured, predicted = callback.report.measured_peak_bytes, callback.report.predicted_peak_bytes
    assert measured == pytest.approx(predicted, rel=0.01)


def test_gradients_that_a_module_zeroes_in_place_are_planned_for_in_backward(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Zeroes(Lit):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)

    caplog.set_level(logging.INFO, "ac_client")
    fitted(tmp_path, Zeroes(), [AutoACCallback(BUDGET_GB)])
    assert len(plans_in(caplog)) == 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def plans_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged messages on plans that were made."""
    return [record.getMessage() for record in caplog.records if ": planning " in record.getMessage()]


def test_manual_optimization_without_a_name_is_refused(tmp_path: Path) -> None:
    model = Manual()
    with pytest.raises(ac_client.ApplyError, match=r"module=\.\.\..*model"):
        fitted(tmp_path, model, [AutoACCallback(BUDGET_GB)])
    assert_untouched(model)
    with pytest.raises(ac_client.ApplyError, match=r"no module 'modle'.*model"):
        fitted(tmp_path, model, [AutoACCallback(BUDGET_GB, module="modle")])


class Stop(Exception):
    """Ends a training in the middle."""


class Raise(lp.Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at - 1:
            raise Stop


def test_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    callback, model = AutoACCallback(BUDGET_GB, measure=True), Lit()
    with pytest.raises(Stop):  # within the step that is measured
        fitted(tmp_path, model, [callback, Raise(at=3)])
    assert callback.report.predicted_peak_bytes < callback.report.save_all_peak_bytes
    assert callback.report.steps == 2  # the third was interrupted, and the first observed
    assert_untouched(model)
    assert not torch._C._autograd._profiler_enabled()
    with pytest.raises(ac_client.NotApplied, match="`report` has"):
        _ = callback.applied


def test_resumed_training_ends_with_the_same_weights_and_plain_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, first, ours = Lit(), Lit(), Lit()
    trainer = fitted(tmp_path, plain, [], max_epochs=2)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    fitted(tmp_path, first, [AutoACCallback(BUDGET_GB)]).save_checkpoint(tmp_path / "half.ckpt")
    callback = AutoACCallback(BUDGET_GB)
    trainer = trainer_of(tmp_path, [callback], max_epochs=2)
    with caplog.at_level(logging.INFO, "ac_client"):
        trainer.fit(ours, loader(), loader(4), ckpt_path=tmp_path / "half.ckpt")
    assert "profiling" not in caplog.text, "its policies were saved with the checkpoint"
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    assert callback.report.steps == 4
    assert callback.report.predicted_peak_bytes < callback.report.save_all_peak_bytes
    assert_same(ours, plain)
    assert b"ac_client" not in (tmp_path / "ours.ckpt").read_bytes().replace(b"integrations.lightning", b"")


def test_loggers_receive_the_metrics(tmp_path: Path) -> None:
    callback = AutoACCallback(BUDGET_GB, measure=True)
    fitted(tmp_path, Lit(), [callback], logger=CSVLogger(tmp_path, name="log"))
    (path,) = tmp_path.rglob("metrics.csv")
    header, *_ = path.read_text().splitlines()
    names = ("budget_gb", "predicted_peak_gb", "measured_peak_gb", "recompute_overhead")
    assert {f"autoac/{name}" for name in names} <= set(header.split(","))
    report = callback.report
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.05)
    assert report.measured_peak_bytes <= report.budget_bytes


def test_compiled_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ac_client.CompiledModel, match="modules that it calls"):
        fitted(tmp_path, torch.compile(Lit(), backend="eager"), [AutoACCallback(BUDGET_GB)])  # type: ignore[arg-type]


def _step(self: Any, batch: Tensor) -> dict[str, Tensor]:
    return {"loss": self.model(batch)["logits"].square().mean()}


def test_callback_works_with_pytorch_lightning_too(tmp_path: Path) -> None:
    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = Transformer(layers=2, width=WIDTH)

        training_step = _step
        configure_optimizers = Lit.configure_optimizers

    plain, ours, callback = Other(), Other(), AutoACCallback(BUDGET_GB)
    fitted(tmp_path, plain, [], library=pytorch_lightning, max_steps=2)
    fitted(tmp_path, ours, [callback], library=pytorch_lightning, max_steps=2)
    assert_same(ours, plain)
    assert callback.report.predicted_peak_bytes < callback.report.save_all_peak_bytes
    assert_untouched(ours)
