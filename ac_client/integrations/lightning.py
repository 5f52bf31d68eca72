"""Plan the `training_step` of Lightning's Trainer, or one module that it calls, by a callback.

    trainer = L.Trainer(..., callbacks=[AutoACCallback(budget_gb=40)])
    trainer.fit(model)

NOTE [ The step as a module ] A plan is carried out around the call of a module, but Lightning calls the
method `training_step`. So during `fit` that method calls a module whose forward is the original method: then
the loss, computed outside of any module, is planned too. Log calls of the step are collected and made right
after it; those of a step that `plan_for` runs are dropped.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn

from ac_client import ApplyError, CompiledModel, applied
from ac_client.integrations.errors import MissingLibrary
from ac_client.integrations.options import ApplyArguments
from ac_client.integrations.planned_trainings import PlannedTrainings
from ac_client.planning.facts.optimizer_steps import steps
from ac_client.planning.options import Budget

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError as error:
        if error.name not in ("lightning", "lightning.pytorch"):
            raise
        try:
            from pytorch_lightning import Callback
        except ModuleNotFoundError as error:
            if error.name != "pytorch_lightning":
                raise
            raise MissingLibrary("lightning", "lightning") from None

log = logging.getLogger("ac_client")

_LOG_METHODS = ("log", "log_dict")


class AutoACCallback(PlannedTrainings, Callback):
    """Plan the training steps of one `fit`.

    The budget is applied when training starts, after the sanity check and after a checkpoint was loaded, and
    removed when training ends or raises. The report's `metrics()` go to the module's loggers.

    Checkpoints have the policies in the state of this callback. A training that is resumed from one runs
    under them and plans only new shapes of batch, if budget, machine and libraries are the same.

    Args:
        budget_gb, options: as for `ac_client.apply`.
        module: path of the module to plan instead of the whole `training_step`, such as "model". For manual
            optimization, where a step contains its backward, it is required.
        measure: measure the peak of the third step by the allocator's own record. On CUDA, where the
            allocator counts by itself, this is unnecessary, and resets its counter.

    Raises:
        ApplyError, CompiledModel: from `fit`, if the step cannot be planned.
    """

    def __init__(
        self,
        budget_gb: Budget = None,
        *,
        module: str | None = None,
        measure: bool = False,
        **options: Unpack[ApplyArguments],
    ) -> None:
        super().__init__("LightningModule", budget_gb, measure, options)
        self._module = module
        self._saved = ""  # JSON of the policies in the checkpoint that is resumed from
        self._undo: Callable[[], None] | None = None
        self._steps_before = 0
        self._between_steps = True

    def state_dict(self) -> dict[str, Any]:
        policies = self.policies
        return {"policies": policies.to_json()} if policies is not None and policies.buckets else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("policies", "")

    def remove(self) -> None:
        """Remove the plan from the module. May be called twice."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        super().remove()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.remove()
        if vars(pl_module).get("_compiler_ctx") is not None:
            raise CompiledModel(
                "torch.compile(LightningModule)",
                "pass the LightningModule itself to fit, and compile the modules that it calls",
            )
        model = self._to_plan(pl_module)
        saved, self._saved = self._saved, ""
        self._begin(model, [one for one in trainer.optimizers if steps(one, model)], saved)
        if _frees_gradients(trainer, pl_module):
            self.applied.plan_for_freed_gradients()
        if isinstance(model, TrainingStepModule):
            self._undo = model.replace_method()
        self._steps_before = trainer.global_step
        self._between_steps = True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._between_steps:
            self._between_steps = False
            self._step_begins()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._applied is None:
            return
        if trainer.global_step != self._steps_before:
            self._steps_before = trainer.global_step
            self._between_steps = True
            self._step_ended()
        pl_module.log_dict(self._applied.report().metrics())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.remove()
        if trainer.is_global_zero:
            log.info("%s", self._report)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.remove()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.remove()

    def _to_plan(self, pl_module: LightningModule) -> nn.Module:
        """Return the named module, or the step as a module: NOTE [ The step as a module ]."""
        if self._module is not None:
            try:
                model: nn.Module = pl_module.get_submodule(self._module)
            except AttributeError as error:
                raise ApplyError(
                    f"{type(pl_module).__name__} has no module {self._module!r} ({error}): pass "
                    f"the path of one of its modules, such as {_children(pl_module)}"
                ) from None
            return model
        if not pl_module.automatic_optimization:
            raise ApplyError(
                f"{type(pl_module).__name__} optimizes manually, so its training_step contains backward and "
                "cannot be planned as one forward: name the module that it calls, "
                f"AutoACCallback(module=...), such as {_children(pl_module)}"
            )
        return TrainingStepModule(pl_module)


class TrainingStepModule(nn.Module):
    """A LightningModule's `training_step` as the forward of a module."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self._method = module.training_step
        self._logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def replace_method(self) -> Callable[[], None]:
        """Have `module.training_step` call this module, and return a function that undoes it."""
        module, attributes = self.module, vars(self.module)
        before = attributes.get("training_step")

        @functools.wraps(self._method)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self.training = module.training
            out = self(*args, **kwargs)
            logged, self._logged = self._logged, []
            for name, given, named in logged:
                getattr(module, name)(*given, **named)
            return out

        attributes["training_step"] = training_step

        def undo() -> None:
            if before is None:
                del attributes["training_step"]
            else:
                attributes["training_step"] = before

        return undo

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _collected(self.module) as logged:
            out = self._method(*args, **kwargs)
        if not applied(self).planning:
            self._logged = logged
        return out


@contextmanager
def _collected(module: nn.Module) -> Iterator[list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """Collect the log calls of `module` in the block, to make them after it, outside of the plan."""
    logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    attributes = vars(module)
    kept = {name: attributes[name] for name in _LOG_METHODS if name in attributes}
    for name in _LOG_METHODS:
        attributes[name] = functools.partial(_collect, logged, name)
    try:
        yield logged
    finally:
        for name in _LOG_METHODS:
            del attributes[name]
        attributes.update(kept)


def _collect(
    logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]], name: str, /, *args: Any, **kwargs: Any
) -> None:
    logged.append((name, args, kwargs))


def _frees_gradients(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Return True if Lightning frees gradients in each step, which it does between forward and backward."""
    is_own = pl_module.optimizer_zero_grad.__qualname__ != "LightningModule.optimizer_zero_grad"
    return pl_module.automatic_optimization and trainer.accumulate_grad_batches == 1 and not is_own


def _children(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_children())
