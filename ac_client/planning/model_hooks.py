"""Run the forwards of a planned model under their policies: the hooks of the model, and what they count."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ac_client.measure.measured_steps import MeasuredSteps
from ac_client.planning.batch_shape import ModelCall
from ac_client.planning.captured_steps import check_capture
from ac_client.planning.facts.model_structure import module_changes
from ac_client.planning.facts.optimizer_steps import UnplannedSteps
from ac_client.planning.model_planning import ModelPlanning
from ac_client.planning.plan_batch import check_hooks
from ac_client.planning.planned_forward import EVERY, WHOLES, ForwardOfThread, Watched
from autoac.profiler.compiler.private_compiler import check_version, is_tested
from autoac.profiler.observed_step import ObservedStep, recorded_step
from autoac.tape.distributed.ddp import wrapper_paths
from autoac.tape.errors import CannotProfile
from autoac.tape.runtime.cursor import OffPath
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import compiled_parts, is_called_compiled
from autoac.tape.torch_facts.module_paths import ModuleHook, is_whole, watch_modules
from autoac.tape.torch_facts.streams import is_capturing
from autoac.tape.unseen.fingerprints import Comparison

log = logging.getLogger("ac_client")

MOST_STEP_TIMES = 1000  # kept for the median


@dataclass(slots=True)
class StepLog:
    """Counts of the forwards of a model so far."""

    forwards: int = 0  # that train, planned or not
    steps: int = 0  # planned forwards
    off_path: str = ""  # the first op at which the last forward left its policy
    began: list[float] = field(default_factory=list)  # when each planned forward began, in seconds


class ModelHooks:
    """The hooks of one planned model and of its modules.

    Args:
        remove: returns the function that removes the plan from the model.

    Attributes:
        log: of the forwards so far.
    """

    def __init__(
        self,
        model: nn.Module,
        planning: ModelPlanning,
        measured: MeasuredSteps,
        remove: Callable[[], Callable[[], None] | None],
    ) -> None:
        self.log = StepLog()
        self._name = type(model).__name__
        self._of_thread = ForwardOfThread(planning.options, self._left_policy, wrapper_paths(model))
        self._planning = planning
        self._measured = measured
        self._remove = remove
        self.unplanned = UnplannedSteps(planning.planner.warn_once)
        self._model = weakref.ref(model)
        planning.watch.optimizers.after_step = weakref.WeakMethod(self._optimizer_stepped)
        planning.planner.watch_calls = weakref.WeakMethod(self._watch_submodules)
        self._left_out: ObservedStep | None = None  # of another model, which leaves out this forward
        self._submodule_handles: ExitStack | None = None
        self._watched: Watched = EVERY
        self._has_left = False  # some forward has left its policy
        self._compiled = False  # torch.compile ran the last forward as a whole
        self._compiled_parts: list[str] = []  # that were compiled by themselves
        self._changes = -1  # to modules, when these parts were looked up
        before, after = ModuleHook(self._forward_begins), ModuleHook(self._forward_ended)
        self._handles: list[RemovableHandle] = []
        try:
            self._handles.append(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(model.register_forward_hook(after, with_kwargs=True, always_call=True))
            self._look_for_compiled(model)
            self._watch_submodules(model)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove all hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unwatch_submodules()
        if not self._planning.planner.profiling:
            self._of_thread.forward.end()  # left open by a forward that was interrupted
            self._forget_observation()

    def _forget_observation(self, error: BaseException | None = None) -> None:
        planner = self._planning.planner
        observation, planner.observation = planner.observation, None
        if observation is not None:
            observation.step.discard(error)

    def _look_for_compiled(self, model: nn.Module) -> None:
        """Look up which parts of the model torch.compile runs; their graphs know their modules."""
        self._compiled = is_called_compiled(model)
        before, self._changes = self._changes, module_changes(model)
        parts = self._compiled_parts if before == self._changes else compiled_parts(model)
        if self._compiled or parts != self._compiled_parts:
            self._unwatch_submodules()
        if (self._compiled or parts) and not is_tested():
            if (remove := self._remove()) is not None:
                remove()
            check_version()
        self._compiled_parts = parts

    def _watch_submodules(self, model: nn.Module, watched: Watched = EVERY) -> None:
        """Follow the calls of the submodules that are `watched`, except in compiled code."""
        if not (isinstance(watched, str) or isinstance(self._watched, str)):
            watched |= self._watched  # else hooks would come and go with batches
        if self._submodule_handles and self._watched != watched:
            self._unwatch_submodules()
        if watched and not (self._compiled or self._submodule_handles):
            self._watched = watched
            whole = partial(is_whole, model, self._planning.planner.called)
            wanted = whole if watched == WHOLES else None if watched == EVERY else watched.__contains__
            self._submodule_handles = watch_modules(model, self._enter, self._leave, wanted=wanted)

    def _unwatch_submodules(self) -> None:
        if self._submodule_handles is not None:
            self._submodule_handles.close()
        self._submodule_handles = None

    def _forward_begins(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        planning, options = self._planning, self._planning.options
        if planning.planner.profiling:
            return
        forward = self._of_thread.forward
        waiting = planning.watch.on_device.in_flight()
        if planning.watch.peaks.reading and not waiting:
            planning.end_step()
        if not torch.is_grad_enabled() or not self.unplanned.trains_in(model):
            if not model.training:
                forward.end()  # as below; such a forward is not part of one in training
                bucket = planning.store.current
                if bucket is not None and torch.is_grad_enabled() and options.budget_bytes is not None:
                    self.unplanned.evaluates(
                        bucket.policy.predicted.save_all_peak_bytes, options.budget_bytes
                    )
            return
        self.log.forwards += 1
        if private.is_transforming():
            check_hooks()
            forward.end()  # as below
            planning.settle(model, raises=True)
            planning.planner.warn_once(
                "transform",
                "it is called inside of torch.func.vmap, jvp or jacfwd, or of forward-mode AD. Such a "
                "forward runs without a plan, so all that its backward needs is saved, and the budget may "
                "not be kept",
            )
            return
        if torch.compiler.is_compiling() or private.get_tracing_state() is not None:
            raise CannotProfile(
                self._name,
                "torch.export or torch.jit traces the model, and would trace the plan as well",
                "call ac_client.applied(model).remove() first, or trace it in eval() under torch.no_grad()",
            )
        if (step := recorded_step()) is not None and step.model() is not model:
            step.leave_out()
            self._left_out = step
        # Left open by a forward that was interrupted (KeyboardInterrupt runs no hook), or the model calls
        # itself: then the rest of the outer call runs unplanned.
        forward.end()
        if planning.planner.observed_here is not None:
            self._forget_observation()
        self._look_for_compiled(model)
        if planning.planner.observation is not None:
            self._watch_submodules(model)
        call = ModelCall(model, args, kwargs)
        bucket = planning.policy_for(call, waiting)
        if bucket is None:
            forward.begin_observed()
            return
        route, captures = bucket.loaded.route(waiting), is_capturing()
        if captures:
            check_capture(self._name, bucket, route)
        if self._measured.timeline is not None:
            self._measured.note_batch(call.tensors)
            self._measured.beyond_plan |= not bucket.covers(args, kwargs)
        self.log.steps += 1
        asked = options.verify is not None and self.log.steps % options.verify == 0
        compares = Comparison.enabled and (asked or not route.compared) and not captures
        route.compared |= not captures
        if not waiting:
            compared_too = compares and bucket.loaded.recomputes
            planning.watch.peaks.begin_step(bucket, call, compares=compared_too)
        if len(self.log.began) < MOST_STEP_TIMES:
            self.log.began.append(time.perf_counter())
        forward.begin(
            bucket,
            call,
            waiting=waiting,
            compiled=self._compiled,
            has_compiled_parts=bool(self._compiled_parts),
            compares=compares,
        )
        if planning.planner.observation is not None:
            return  # another thread runs the step that is observed, and needs all hooks
        watched = EVERY if forward.watched == WHOLES and self._has_left else forward.watched
        if isinstance(watched, str) or not planning.store.recomputes:
            self._watch_submodules(model, watched)
        elif watched:  # hooks for other batches would come and go
            self._watch_submodules(model)

    def _forward_ended(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        call = ModelCall(model, args, kwargs)
        if self._left_out is not None:
            self._left_out.take_in()
            self._left_out = None
        profiling = self._planning.planner.profiling
        forward = self._of_thread.forward
        raised = forward.raises
        observed = self._planning.planner.observed_here
        if observed is not None and not profiling:
            if raised:
                self._forget_observation(sys.exception())
            else:
                self._planning.observed_forward_ended(observed, call, out)
            return
        bucket = None if profiling else forward.end(whole=not raised)
        if not profiling:
            self._planning.watch.peaks.read()
        if bucket is not None and not raised:
            if not forward.left:
                self.log.off_path = ""
            self._planning.forward_ended(bucket, call, out, left=forward.left, ran=forward.ran_skipped)
        elif bucket is not None:  # the step will not end
            self._planning.watch.peaks.discard()
            for route in bucket.loaded.forwards:
                route.compared = False

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._planning.optimizer_stepped()
        self.unplanned.optimizer_stepped(optimizer, self.log.forwards)

    def _enter(self, path: str) -> None:
        planner = self._planning.planner
        planner.called.add(path)
        if planner.observation is not None and (observed := planner.observed_here) is not None:
            observed.enter(path)
        self._of_thread.forward.enter(path)

    def _leave(self, path: str) -> None:
        planner = self._planning.planner
        if planner.observation is not None and (observed := planner.observed_here) is not None:
            observed.leave(path)
        self._of_thread.forward.leave(path)

    def _left_policy(self, off: OffPath) -> None:
        self.log.off_path, self._has_left = str(off), True
        self._planning.left_policy(off, self._of_thread.forward.call)
