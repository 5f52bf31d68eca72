"""A planned model: what is attached to it, what its steps report, and how everything is detached again."""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ac_client.errors import NotApplied
from ac_client.files import write_whole
from ac_client.measure.measured_steps import MeasuredSteps
from ac_client.measure.recording_overhead import recording_us_of_process
from ac_client.measure.report import Report
from ac_client.planning.batch_shape import ModelCall
from ac_client.planning.loaded_policy import PlannedBucket
from ac_client.planning.loop_watch import LoopWatch
from ac_client.planning.models_on_device import ModelOnDevice
from ac_client.planning.oom_retry import OomRetry, is_out_of_memory
from ac_client.planning.optimizer_steps import ModelOptimizers, UnplannedSteps
from ac_client.planning.peak_counter import proposed_headroom
from ac_client.planning.plan_batch import BatchProfiler, BucketPlanner, BudgetPlanner
from ac_client.planning.planned_forward import PlannedForward
from ac_client.planning.policy_store import PolicyStore, Shapes
from ac_client.planning.ranks import AUTO, Group
from ac_client.planning.replan import PeakWatch, Replanner
from ac_client.runtime.cursor import OffPath
from ac_client.runtime.policy_context import active
from ac_client.runtime.replay import recording_off
from autoac.planner import Constraints, Plan, Policy, PolicySet
from autoac.profiler import Loss, device_of
from autoac.profiler.compiler.private_compiler import check_version, is_tested
from autoac.profiler.compiler.second_stage import forget_code_that_calls
from autoac.profiler.distributed.ddp import wrapper_paths
from autoac.profiler.errors import CannotProfile
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.batch_contents import batch_tensors
from autoac.profiler.torch_facts.inductor import compiled_parts, is_called_compiled, uncompiled
from autoac.profiler.torch_facts.module_paths import ModuleHook, Watch, watch_calls
from autoac.profiler.torch_facts.streams import is_capturing
from autoac.profiler.unseen.fingerprints import Comparison

log = logging.getLogger("ac_client")

_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()

MOST_STEP_TIMES = 1000  # kept for the median

Result = TypeVar("Result")


class Applied:
    """The handle of a planned model. Get it by `ac_client.applied(model)`.

    Attributes:
        budget_bytes: of the device, for the whole step; None if a policy was given without a budget.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int | None,
        headroom_bytes: int,
        constraints: Constraints | None,
        optimizer: torch.optim.Optimizer | None,
        policy: Policy | PolicySet | None,
        service: str | None,
        require_service: bool = False,
        strict: bool,
        shapes: Shapes = "bucket",
        group: Group = AUTO,
        loss: Loss | None = None,
        forwards_in_flight: int | None = None,
        verify: int | None = None,
        take_over_checkpoints: bool = True,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._verify = verify
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._strict = strict
        self._takes_over_checkpoints = take_over_checkpoints
        self._optimizers = ModelOptimizers(model, optimizer)
        planner = BudgetPlanner(
            self._name, budget_bytes, headroom_bytes, constraints, service, require_service
        )
        self._watch = LoopWatch(planner, forwards_in_flight, has_loss=loss is not None)
        self._on_device = ModelOnDevice(
            model,
            self._name,
            self._optimizers,
            budget_bytes=budget_bytes,
            limit=planner.limit if budget_bytes is not None else 0,
            waiting=self._watch.waiting,
        )
        takes_all = forwards_in_flight is not None and forwards_in_flight > 1
        self._profiler = BatchProfiler(
            planner,
            self._optimizers,
            loss,
            loss_takes_all=takes_all,
            takes_over_checkpoints=take_over_checkpoints,
        )
        buckets = BucketPlanner(planner, self._profiler, self._on_device)
        self._replanner = replanner = Replanner(buckets, self._optimizers)
        self._peaks = PeakWatch(model, self._optimizers, replanner)
        self._store = PolicyStore(
            model,
            buckets,
            replanner,
            self._watch,
            self._peaks,
            policy=policy,
            strict=strict,
            shapes=shapes,
            group=group,
        )
        self._forward = PlannedForward()
        self._retry = OomRetry(model, planner, replanner, self._store, self._peaks, self._forward)
        self._wrappers = wrapper_paths(model)
        self._off_path = ""
        self._measured = MeasuredSteps()
        self._steps = 0
        self._optimizers.after_step = weakref.WeakMethod(self._optimizer_stepped)
        self._forwards = 0  # that train, planned or not
        self._unplanned = UnplannedSteps(self._name)
        self._began: list[float] = []
        self._handles: list[RemovableHandle] = []
        _applied[model] = self
        self._submodule_handles: list[Watch] = []
        self._compiled = False  # torch.compile ran the last forward as a whole
        self._compiled_parts: list[str] = []  # that were compiled by themselves
        forget_code_that_calls(model)
        self._attach(model)

    @property
    def policy(self) -> Policy | None:
        """The policy of the last training forward; None before the first, unless one was given."""
        return bucket.policy if (bucket := self._store.latest) is not None else None

    @property
    def planning(self) -> bool:
        """True while the forward on this thread is only profiled.

        Such a forward runs several times for one batch, so what it logs or counts belongs to no step.
        """
        return self._profiler.profiling

    @property
    def plan(self) -> Plan | None:
        """The decision behind `policy` with its evidence; None if it was not made in this process."""
        return bucket.plan if (bucket := self._store.latest) is not None else None

    @property
    def policies(self) -> PolicySet:
        """One policy for each shape of batch that was planned. A policy given alone has no shape."""
        return self._store.policies()

    def plan_for(self, *args: Any, **kwargs: Any) -> Policy:
        """Plan for one more shape of batch now: profiles `model(*args, **kwargs)` and changes nothing.

        A loop that begins with its largest batch plans once. If its small batches should not recompute what
        only the large ones need to, plan for those too.

        Raises:
            RuntimeError: one policy serves every shape, `apply` got no budget, or the model is in `eval()`.
            InfeasibleBudget: no plan fits. What was planned before stays.
        """
        model = self._model()
        if model is None or self.budget_bytes is None or self._store.single_policy is not None:
            raise RuntimeError(
                'plan_for plans shapes for a budget: apply(model, budget_gb=..., shapes="bucket") first'
            )
        if not model.training:
            raise RuntimeError("plan_for plans training steps: call model.train() first")
        self._peaks.end_step()  # profiling is not part of the step before
        return self._store.plan_for(ModelCall(model, args, kwargs))

    def step(
        self, fn: Callable[[], Result], *, retry_oom: bool = False, keep_gradients: bool = False
    ) -> Result:
        """Run `fn()`, the forward and backward of one step, and handle an out-of-memory error.

        With `retry_oom` a step that runs out of memory is undone, planned again for less memory, and run
        once more: gradients that it made are dropped, buffers and generators are put back. Otherwise the
        error is raised with advice.

        Args:
            fn: forward and backward, the same if called again; `zero_grad` and the optimizer stay outside.
            retry_oom: run the step a second time.
            keep_gradients: copy the gradients that exist before the step to the host's memory, to be able to
                undo a step that adds to them (gradient accumulation). Without it, such a step runs again
                only if it ran out of memory before it added to them.

        Raises:
            torch.OutOfMemoryError: also from the second run, or the step could not be undone. A note says so.
        """
        return self._retry.run(fn, retry_oom=retry_oom, keep_gradients=keep_gradients)

    def report(self, html: str | os.PathLike[str] | None = None) -> Report:
        """Return predicted and measured peak and step time so far, and what is live at the peak.

        Args:
            html: also write a page there that draws memory over the step, in one file (docs/cli.md).
                A step that was measured (`measure`) is drawn over the predicted one.

        Raises:
            RuntimeError: with `html`, nothing is planned yet, or the policy was given without a profile.
        """
        bucket, buckets = self._store.latest, self._store.all
        if html is not None:
            write_whole(Path(html), self._page(bucket))
        policy = bucket.policy if bucket is not None else None
        predicted = policy.predicted if policy is not None else None
        recording_us = self._recording_us(bucket)
        gaps = [b - a for a, b in zip(self._began[1:], self._began[2:], strict=False)]
        budget, allocator = self.budget_bytes, self._peaks.allocator
        allocated = reserved = headroom = None
        if allocator is not None:
            allocated, reserved = allocator.allocated_peak(), allocator.reserved_peak()
            headroom = proposed_headroom(allocated, reserved, budget) if budget is not None else None
        return Report(
            model=self._name,
            budget_bytes=budget,
            predicted_peak_bytes=predicted.peak_bytes if predicted else None,
            measured_peak_bytes=self._measured_peak(),
            save_all_peak_bytes=predicted.save_all_peak_bytes if predicted else None,
            predicted_step_us=(
                predicted.step_us + predicted.recompute_us + (recording_us or 0) if predicted else None
            ),
            measured_step_us=statistics.median(gaps) * 1e6 if gaps else None,
            recompute_us=predicted.recompute_us if predicted else None,
            recording_us=recording_us,
            gap=predicted.gap if predicted else None,
            ops=len(policy.decisions) if policy else 0,
            recomputed=policy.recomputed if policy else 0,
            recorded=bucket.loaded.n_recorded if bucket is not None else 0,
            steps=self._steps,
            off_path=self._off_path,
            peak_at=predicted.peak_at if predicted else "",
            live_at_peak=bucket.loaded.live_at_peak if bucket is not None else (),
            buckets=len(buckets),
            corrections=sum(bucket.correction.times for bucket in buckets),
            corrected_by_bytes=policy.corrected_by_bytes if policy else 0,
            retries=self._retry.retries,
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=reserved,
            proposed_headroom_bytes=headroom,
        )

    def _page(self, bucket: PlannedBucket | None) -> str:
        if bucket is None:
            raise RuntimeError("nothing is planned yet: run one training step first, then ask for the page")
        return self._measured.page(bucket, bucket.policy, bucket.plan)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the peak of what runs inside, one or more whole steps, by the allocator's own record.

        On CUDA the allocator counts by itself and this resets its counter. On CPU torch.profiler counts,
        so none may be running, and the model must have been planned by an earlier step. The measured peak
        is then compared with the prediction: if it was over the budget, or far from using it, the model is
        planned again (docs/budget.md).

        Raises:
            RuntimeError: the model is not planned yet, or torch.profiler is running.
        """
        model = self._model()
        if model is None or self.policy is None:
            raise RuntimeError(
                "run one training step first: the model is planned in its first training forward"
            )
        self._peaks.discard()  # the counter is about to be reset
        buckets = self._store.all
        steps = {bucket: bucket.statistics.steps for bucket in buckets}
        complete = {bucket for bucket in buckets if self._peaks.is_complete(bucket)}
        written = self._peaks.written()
        base = self._on_device.standing_nbytes() + self._on_device.others_standing_nbytes()
        with self._measured.record(model, base, [bucket.policy for bucket in buckets]) as timeline:
            yield
        if (current := self._store.current) is not None:
            self._measured.remember(timeline, current, current.policy, current.plan)
        self._peaks.discard()
        ran = [bucket for bucket in self._store.all if bucket.statistics.steps > steps.get(bucket, 0)]
        if ran:
            bucket = max(ran, key=lambda bucket: bucket.policy.predicted.peak_bytes)
            if bucket in complete:
                self._peaks.judge_exact(bucket, timeline.peak_bytes, written=written)

    def remove(self) -> None:
        """Remove the plan, so that the model is a plain model again. May be called twice."""
        for handle in (*self._handles, *self._submodule_handles):
            handle.remove()
        self._handles.clear()
        self._submodule_handles.clear()
        if not self.planning:
            self._forward.end()  # left open by a forward that was interrupted
        self._watch.close()
        self._optimizers.close()
        self._on_device.close()
        model = self._model()
        if model is not None and _applied.get(model) is self:
            del _applied[model]

    def _recording_us(self, bucket: PlannedBucket | None) -> float | None:
        """Return the time that recording is expected to add to a forward; None if it is not known.

        A device that runs behind its host hides as much of it as forward computes. The time is unknown while
        measuring it would disturb: in a forward, and while a peak is measured.
        """
        model = self._model()
        if bucket is None or model is None:
            return None
        if bucket.loaded.n_recorded == 0:
            return 0.0
        on_cpu = device_of(model).type == "cpu"
        if self._measured.marks is not None or active.region is not None or not (on_cpu or bucket.profile):
            return None
        hidden_us = sum(bucket.profile.ops.runtime_us) if bucket.profile is not None and not on_cpu else 0.0
        return max(0.0, bucket.loaded.n_recorded * recording_us_of_process() - hidden_us)

    def _measured_peak(self) -> int | None:
        model = self._model()
        if self._measured.peak_bytes is None and model is not None and self._steps:
            device = device_of(model)
            if device.type == "cuda":
                return torch.cuda.max_memory_allocated(device)
        return self._measured.peak_bytes

    def _attach(self, model: nn.Module) -> None:
        self._handles = [
            model.register_forward_pre_hook(ModuleHook(self._forward_begins), with_kwargs=True, prepend=True),
            model.register_forward_hook(ModuleHook(self._forward_ended), always_call=True),
        ]
        self._watch_submodules(model)

    def _watch_submodules(self, model: nn.Module) -> None:
        """Follow the calls of submodules, except in compiled code, whose graphs know their modules."""
        self._compiled = is_called_compiled(model)
        parts = compiled_parts(model)
        if self._compiled or parts != self._compiled_parts:
            for handle in self._submodule_handles:
                handle.remove()
            self._submodule_handles = []
        if (self._compiled or parts) and not is_tested():
            self.remove()
            check_version()
        if parts != self._compiled_parts:
            self._compiled_parts = parts
        if not (self._compiled or self._submodule_handles):
            self._submodule_handles = watch_calls(model, self._enter, self._leave)

    def _forward_begins(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.planning:
            return
        waiting = self._watch.waiting()
        if self._peaks.reading and not waiting:
            self._peaks.end_step()
        if not torch.is_grad_enabled() or not self._unplanned.trains_in(model):
            if not model.training:
                self._forward.end()  # as below; such a forward is not part of one in training
                bucket = self._store.current
                if bucket is not None and torch.is_grad_enabled() and self.budget_bytes is not None:
                    self._unplanned.evaluates(bucket.policy.predicted.save_all_peak_bytes, self.budget_bytes)
            return
        self._forwards += 1
        if torch.compiler.is_compiling() or private.get_tracing_state() is not None:
            raise CannotProfile(
                self._name,
                "torch.export or torch.jit traces the model, and would trace the plan as well",
                "call ac_client.applied(model).remove() first, or trace it in eval() under torch.no_grad()",
            )
        if self._store.latest is None and is_capturing():
            raise CannotProfile(
                self._name,
                "the stream is being captured into a CUDA graph, and a profile synchronizes the device",
                "run one training step before the capture, which makes the plan",
            )
        # Left open by a forward that was interrupted (KeyboardInterrupt runs no hook), or the model calls
        # itself: then the rest of the outer call runs unplanned.
        self._forward.end()
        self._watch_submodules(model)
        bucket = self._store.for_batch(model, args, kwargs, waiting, self.remove)
        if bucket is None:
            return
        self._on_device.forward_begins(bucket)
        marks = self._measured.marks
        if marks is not None and not waiting:
            marks.begin_forward()
        bucket.statistics.steps += 1
        self._steps += 1
        route = bucket.loaded.route(waiting)
        asked = self._verify is not None and self._steps % self._verify == 0
        compares = Comparison.enabled and (asked or not route.compared)
        route.compared = True
        if not waiting:
            self._peaks.begin_step(bucket, compares=compares and bucket.loaded.recomputes)
        if marks is not None:
            self._measured.note_batch(batch_tensors((*args, *kwargs.values())))
        if len(self._began) < MOST_STEP_TIMES:
            self._began.append(time.perf_counter())
        self._forward.begin(
            bucket,
            model,
            waiting=waiting,
            compiled=self._compiled,
            has_compiled_parts=bool(self._compiled_parts),
            strict=self._strict,
            compares=compares,
            report=self._left_policy,
            wrappers=self._wrappers,
            takes_over_checkpoints=self._takes_over_checkpoints,
        )

    def _forward_ended(self, _model: nn.Module | None, _args: Any, out: Any) -> None:
        error = sys.exception()
        raised = self._forward.raises
        bucket = None if self.planning else self._forward.end(whole=not raised)
        self._read_counter()
        if bucket is not None and not raised:
            self._watch.forward_ended(bucket, out)
        elif bucket is not None:  # the step will not end
            self._peaks.discard()
            for route in bucket.loaded.forwards:
                route.compared = False
        if out is None and is_out_of_memory(error):
            assert error is not None
            subject = "Profiling a step" if self.planning else "A planned forward"
            self._retry.note(error, f"{subject} ran out of memory.")

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._read_counter()
        model, bucket = self._model(), self._store.current
        self._unplanned.optimizer_stepped(optimizer, self._forwards)
        if model is not None and bucket is not None:
            self._replanner.warn_of_uncounted_state(model, bucket)

    def _read_counter(self) -> None:
        if not self.planning:
            self._peaks.read()

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._measured.marks is not None and not recording_off.reruns:
            self._measured.marks.enter_module(path)
        self._forward.enter(path, module, args, kwargs)

    def _leave(self, path: str, _module: nn.Module, output: Any) -> None:
        if self._measured.marks is not None and not recording_off.reruns:
            self._measured.marks.leave_module(path)
        self._forward.leave(path, output)

    def _left_policy(self, off: OffPath) -> None:
        if not self._off_path:
            self._off_path = str(off)
            log.warning(
                "%s left its policy: %s. Ops that the policy does not contain are saved", self._name, off
            )


def applied(model: nn.Module) -> Applied:
    """Return the handle of a model that `apply` has planned.

    Raises:
        NotApplied: the model is not planned.
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be the nn.Module that was planned, got {type(model).__name__}")
    try:
        return _applied[uncompiled(model)]
    except KeyError:
        raise NotApplied(type(model).__name__) from None


def planned_models() -> list[nn.Module]:
    """Return all models that are planned now."""
    return list(_applied)
