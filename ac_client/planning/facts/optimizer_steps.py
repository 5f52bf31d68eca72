"""Watch the optimizers that step a model: those passed to `apply`, and those that are seen to step it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ac_client.planning.facts.model_structure import device_of
from ac_client.planning.warn_once import WarnOnce
from autoac.planner.units import format_bytes
from autoac.profiler.observed_step import ObservedStep, recorded_step
from autoac.profiler.static_memory import OptimizerBytes, bytes_of_one, optimizer_state_nbytes, unwrapped
from autoac.tape.distributed.fsdp import parameters_of

STEPS_THAT_MAKE_STATE = 8  # of all optimizers of a model: an average of the weights may come late


class ModelOptimizers:
    """The optimizers of one model's parameters, and how often they have stepped.

    Hooks count the steps, since version counters miss some: a fused kernel writes and counts nothing. The
    optimizer that was passed to `apply` is kept alive until the first step of any of them. If the user then
    drops or replaces an optimizer, its state is freed and counts no longer.

    State counts where it is: what is on the device as a forward begins, and what more there is as a step of
    an optimizer ends, before the user's hooks move it. Before its first step, both are foreseen.

    Attributes:
        steps: number of their steps since the model was planned.
        foresees: state that does not exist yet counts from the beginning, and not for the step alone.
        after_step: returns the function to call with the optimizer after each step, if there is one.
    """

    def __init__(
        self, model: nn.Module, given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    ) -> None:
        self.steps = 0
        self.foresees = True
        self.after_step: Callable[[], Callable[[torch.optim.Optimizer], None] | None] = lambda: None
        self._model = weakref.ref(model)
        self._not_stepped = given  # kept alive until then, since the first plan counts its state
        self._given = [weakref.ref(one) for one in unwrapped(given)]
        self._adopted: list[weakref.ref[torch.optim.Optimizer]] = []
        self._progress: tuple[int, ...] = ()  # when state was last looked at as a step ended
        self._needs: tuple[Any, OptimizerBytes] | None = None  # as last counted, and when
        self._foreseen: weakref.WeakKeyDictionary[Any, tuple[int, OptimizerBytes]] = (
            weakref.WeakKeyDictionary()
        )
        # Most bytes of its own state as a forward began, and of all state as a step of it ended.
        self._between: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._in_step: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._of_others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._of_model: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._left_out: ObservedStep | None = None  # of another model, which leaves out the optimizer's step
        _hook()
        _watched.add(self)

    @property
    def all(self) -> list[torch.optim.Optimizer]:
        """Return the known optimizers, each without its wrappers."""
        return [one for ref in (*self._given, *self._adopted) if (one := ref()) is not None]

    def state_nbytes(self, device: torch.device) -> int:
        """Return the bytes of optimizer state on `device` now."""
        return optimizer_state_nbytes(self.all, device)

    @property
    def progress(self) -> tuple[int, ...]:
        """Return numbers that change with steps that may make state: the first ones, or of new parameters."""
        n_states = sum(len(one.state) for one in self.all)
        return min(self.steps, STEPS_THAT_MAKE_STATE), n_states, len(self._adopted)

    def needs(self) -> OptimizerBytes:
        """Return what all optimizers need in the step of the forward that begins."""
        if (model := self._model()) is None:
            return OptimizerBytes(0, 0)
        when = self.progress, self.foresees
        if self._needs is not None and self._needs[0] == when:
            return self._needs[1]
        device = device_of(model)
        found: list[tuple[torch.optim.Optimizer, int, OptimizerBytes]] = []
        for one in self.all:
            if one not in self._foreseen or self._foreseen[one][0] != len(one.state):
                self._foreseen[one] = len(one.state), bytes_of_one(one, device)
            foreseen = self._foreseen[one][1]
            counted = max(optimizer_state_nbytes([one], device), self._between.get(one, 0))
            self._between[one] = counted
            if self.foresees and one not in self._in_step:
                counted = max(counted, foreseen.state)
            found.append((one, counted, foreseen))
        state = sum(counted for _, counted, _ in found)
        workspace = 0
        for one, counted, foreseen in found:
            in_step = self._in_step.get(one, state - counted + foreseen.state)
            workspace = max(workspace, max(0, in_step - state) + foreseen.workspace)
        notes = "; ".join(filter(None, (f.note for _, _, f in found)))
        self._needs = when, OptimizerBytes(state, workspace, notes)
        return self._needs[1]

    def has_state(self, counted: OptimizerBytes) -> bool:
        """Return True if all the optimizer state that a plan counts exists by now."""
        return (model := self._model()) is not None and self.state_nbytes(device_of(model)) >= counted.state

    def close(self) -> None:
        """Stop watching."""
        _watched.discard(self)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Adopt `optimizer` if it steps the model and is not known yet."""
        if optimizer in self._of_others:
            return
        model = self._model()
        if model is None or not (optimizer in self._of_model or steps(optimizer, model)):
            self._of_others.add(optimizer)
            return
        self._of_model.add(optimizer)
        if optimizer not in _end_watched:
            _end_watched.add(optimizer)
            handle, hooks = optimizer.register_step_post_hook(_ended), optimizer._optimizer_step_post_hooks
            cast(OrderedDict[int, Any], hooks).move_to_end(handle.id, last=False)
        if (observed := recorded_step()) is not None and observed.model() is not model:
            observed.leave_out()  # until it has stepped: its state counts as this model's
            self._left_out = observed
        if any(optimizer is one for one in self.all):
            return
        if unwrapped(optimizer) == [optimizer]:  # others make those inside step
            self._adopted.append(weakref.ref(optimizer))
            self._not_stepped = None

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of a known optimizer."""
        observed, self._left_out = self._left_out, None
        if observed is not None:
            observed.take_in()
        if any(optimizer is one for one in self.all):
            self.steps += 1
            self._not_stepped = None
            self._look_at_state(optimizer)
            if (after := self.after_step()) is not None:
                after(optimizer)

    def _look_at_state(self, stepped: torch.optim.Optimizer) -> None:
        before, self._progress = self._progress, self.progress
        if before != self._progress and (model := self._model()) is not None:
            present = self.state_nbytes(device_of(model))
            self._in_step[stepped] = max(present, self._in_step.get(stepped, 0))


_watched: weakref.WeakSet[ModelOptimizers] = weakref.WeakSet()
_end_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for of_model in list(_watched):
        of_model.step_begins(optimizer)


def _ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for of_model in list(_watched):
        of_model.step_ended(optimizer)


@cache
def _hook() -> RemovableHandle:
    """Register a hook for all optimizers, once per process. It holds neither model nor optimizer."""
    return register_optimizer_step_pre_hook(_begins)


def steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Return True if `optimizer` steps a parameter of `model`."""
    mine = {id(parameter) for parameter in parameters_of(model)}
    return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])


class UnplannedSteps:
    """Notice training that runs without a plan: in `eval()`, or not through the call of the model.

    A forward in `eval()` that could be differentiated is usually an evaluation, and is not planned. But if an
    optimizer steps after it, and no forward in `train()` ran since the optimizer's last step, the forward was
    training: loops freeze BatchNorm in this way. Then forwards in `eval()` are planned, until the model is
    called in `train()`.
    """

    def __init__(self, warn_once: WarnOnce) -> None:
        self._warn_once = warn_once
        self._forwards_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._in_eval = False  # a forward that could be differentiated ran in eval() since the last step
        self._trains_in_eval = False
        self._in_a_row = 0  # steps without a forward that trains

    def plan_in_eval(self) -> None:
        """Take forwards in `eval()` for training from now on."""
        self._trains_in_eval = True

    def trains_in(self, model: nn.Module) -> bool:
        """Return True if a forward of `model` in its present mode counts as training."""
        if model.training:
            self._trains_in_eval = self._in_eval = False
            return True
        self._in_eval = True
        return self._trains_in_eval

    def evaluates(self, needs: int, limit: int) -> None:
        """Warn of an evaluation with gradients, which saves everything, if that may be over the budget.

        Args:
            needs: the peak of a training step in which nothing is recomputed.
            limit: of the planned peaks.
        """
        if needs > limit:
            self._warn_once(
                "evaluation",
                "a forward in eval() runs with gradients enabled. It is not planned, so all that backward "
                f"needs is saved: a batch of the size that was planned may take {format_bytes(needs)}, over "
                f"the budget of {format_bytes(limit)}. Evaluate under torch.no_grad()",
            )

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, forwards: int) -> None:
        """Take note of a step after a total of `forwards` training forwards."""
        before = self._forwards_at.get(optimizer, 0)
        self._forwards_at[optimizer] = forwards
        in_eval, self._in_eval = self._in_eval, False
        if forwards != before:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if in_eval:
            self._trains_in_eval = True
            self._warn_once(
                "eval",
                "it is trained in eval(): this step ran unplanned, and the next forwards are planned, "
                "evaluations too unless they run under torch.no_grad()",
            )
        elif self._in_a_row > 1:  # one alone may be a step that only makes the optimizer's state
            self._warn_once(
                "unseen",
                f"the optimizer has stepped {self._in_a_row} times without a training forward of the model, "
                "so nothing is planned and the budget is not kept. Call the model itself, not model.forward "
                "or parts of it; apply to the module that is called, which an nn.ModuleList never is",
            )
