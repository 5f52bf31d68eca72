"""A planned model: what is attached to it, what its steps report, and how everything is detached again."""

from __future__ import annotations

import logging
import os
import statistics
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ac_client.errors import NotApplied
from ac_client.files import write_whole
from ac_client.measure.measured_steps import MeasuredSteps
from ac_client.measure.report import RECORDED_OP_US, Report
from ac_client.planning.batch_shape import ModelCall
from ac_client.planning.loaded_policy import PlannedBucket
from ac_client.planning.model_hooks import ModelHooks
from ac_client.planning.model_planning import ModelPlanning
from ac_client.planning.options import ApplyOptions
from ac_client.planning.trigger import Measured
from autoac.planner import Plan, Policy, PolicySet, beyond_dispatch_in_words, picture
from autoac.planner.report.page import timeline_page
from autoac.profiler import device_of
from autoac.profiler.compiler.second_stage import forget_code_that_calls
from autoac.profiler.static_memory import state_tensors
from autoac.tape.runtime.moves.host_memory import host_memory
from autoac.tape.torch_facts.inductor import uncompiled

log = logging.getLogger("ac_client")

_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()


class Applied:
    """The handle of a planned model. Get it by `ac_client.applied(model)`.

    Attributes:
        budget_bytes: of the device, for the whole step; None if a policy was given without a budget.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ApplyOptions,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        policy: Policy | PolicySet | None = None,
    ) -> None:
        self.budget_bytes = options.budget_bytes
        self._model = weakref.ref(model)
        remove = weakref.WeakMethod(self.remove)
        self._planning = ModelPlanning(model, options, optimizer=optimizer, policy=policy, on_failure=remove)
        self._store = self._planning.store
        self._measured = MeasuredSteps()
        try:
            self._hooks = ModelHooks(model, self._planning, self._measured, remove)
        except BaseException:
            self._planning.watch.close()
            raise
        _applied[model] = self
        forget_code_that_calls(model)

    @property
    def policy(self) -> Policy | None:
        """The policy of the last training forward; None until the first step is over, or that given."""
        return bucket.policy if (bucket := self._latest) is not None else None

    @property
    def _latest(self) -> PlannedBucket | None:
        """Return the bucket of the last training forward, planned now if its step was observed."""
        if (model := self._model()) is not None:
            self._planning.settle(model)
        return self._store.latest

    @property
    def planning(self) -> bool:
        """True while the forward on this thread is that of `plan_for`, whose logs belong to no step."""
        return self._planning.planner.profiling

    @property
    def plan(self) -> Plan | None:
        """The decision behind `policy` with its evidence; None if it was not made in this process."""
        return bucket.plan if (bucket := self._latest) is not None else None

    @property
    def policies(self) -> PolicySet:
        """One policy for each shape of batch that was planned. A policy given alone has no shape."""
        _ = self._latest
        return self._store.policies()

    def plan_in_eval(self) -> None:
        """Plan forwards in `eval()` as training, without an optimizer that steps after one."""
        self._hooks.unplanned.plan_in_eval()

    def plan_for_freed_gradients(self) -> None:
        """Plan for a library that frees gradients between forward and backward, before a step shows it."""
        self._planning.planner.frees_gradients = True

    def plan_for(self, *args: Any, **kwargs: Any) -> Policy:
        """Plan for one more shape of batch now, from one real step on `model(*args, **kwargs)`.

        The step runs without the optimizer. Gradients, buffers and generators are then as before. What else
        the forward changes stays changed: counters, caches and logs, its batch, and parameters that it writes
        itself. Under DistributedDataParallel or `fully_shard`, every rank must call this method, since the
        step communicates.

        A loop that begins with its largest batch plans once. If its small batches should not recompute what
        only the large ones need to, plan for those too.

        Raises:
            RuntimeError: one policy serves every shape, `apply` got no budget, or the model is in `eval()`.
            InfeasibleBudget: no plan fits. What was planned before stays.
        """
        model = self._model()
        if model is None or self.budget_bytes is None or self._store.buckets.of_every_shape is not None:
            raise RuntimeError(
                "plan_for plans shapes for a budget: apply(model, budget_gb=...) first, without policy=Policy"
            )
        if not model.training:
            raise RuntimeError("plan_for plans training steps: call model.train() first")
        self._planning.end_step()  # profiling is not part of the step before
        policy = self._planning.chooser.plan_for(ModelCall(model, args, kwargs))
        self._planning.watch.peaks.start(model)
        return policy

    def report(self, html: str | os.PathLike[str] | None = None) -> Report:
        """Return predicted and measured peak and step time so far, and what is live at the peak.

        Args:
            html: also write a page there that draws memory over the step, in one file (docs/cli.md).
                It has the peak that `measure` measured under this plan.

        Raises:
            RuntimeError: with `html`, nothing is planned yet, or the policy was given without a profile.
        """
        bucket, buckets = self._latest, self._store.all
        if html is not None:
            write_whole(Path(html), self._page(bucket))
        policy = bucket.policy if bucket is not None else None
        predicted = policy.predicted if policy is not None else None
        recording_us = self._recording_us(bucket)
        shown = self._hooks.log
        gaps = [b - a for a, b in pairwise(shown.began[1:])]
        budget, allocator = self.budget_bytes, self._planning.watch.peaks.allocator
        allocated = reserved = predicted_reserved = None
        if allocator is not None:
            if policy is not None:
                predicted_reserved = self._reserved(bucket, policy.predicted.peak_bytes)
            allocated, reserved = allocator.allocated_peak(), allocator.reserved_peak()
        return Report(
            model=self._planning.planner.name,
            budget_bytes=budget,
            predicted_peak_bytes=predicted.peak_bytes if predicted else None,
            measured_peak_bytes=self._measured_peak(),
            save_all_peak_bytes=predicted.save_all_peak_bytes if predicted else None,
            predicted_step_us=(
                predicted.step_us + predicted.recompute_us + predicted.stall_us + (recording_us or 0)
                if predicted
                else None
            ),
            measured_step_us=statistics.median(gaps) * 1e6 if gaps else None,
            recompute_us=predicted.recompute_us if predicted else None,
            recording_us=recording_us,
            gap=predicted.gap if predicted else None,
            ops=len(policy.decisions) if policy else 0,
            recomputed=policy.recomputed if policy else 0,
            moved_bytes=predicted.moved_bytes if predicted else 0,
            stall_us=predicted.stall_us if predicted else 0.0,
            recorded=bucket.loaded.n_recorded if bucket is not None else 0,
            steps=shown.steps,
            off_path=shown.off_path,
            stale=bucket.stale if bucket is not None else "",
            peak_at=predicted.peak_at if predicted else "",
            live_at_peak=bucket.loaded.live_at_peak if bucket is not None else (),
            beyond_dispatch=(
                tuple(beyond_dispatch_in_words(bucket.plan.graph)) if bucket and bucket.plan else ()
            ),
            buckets=len(buckets),
            corrections=sum(bucket.statistics.corrections for bucket in buckets),
            corrected_by_bytes=policy.corrected_by_bytes if policy else 0,
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=reserved,
            predicted_reserved_bytes=predicted_reserved,
        )

    def _reserved(self, bucket: PlannedBucket | None, peak: int) -> int | None:
        """Return the bytes that the allocator reserves for steps with that peak; None if not known."""
        if bucket is None:
            return None
        fragments = bucket.statistics.fragments
        if fragments is None:
            fragments = bucket.loaded.fragments
        return peak + fragments if fragments is not None else None

    def _page(self, bucket: PlannedBucket | None) -> str:
        if bucket is None:
            raise RuntimeError("nothing is planned yet: run one training step first, then ask for the page")
        if bucket.plan is None:
            raise RuntimeError(
                "the policy was given without its profile, which has the sizes; draw the policy with "
                "`autoac explain POLICY --profile PROFILE --html PAGE`"
            )
        of_plan = self._measured.policy is bucket.policy  # not made again since
        measured_peak = self._measured.peak_bytes if of_plan else None
        drawn = picture(bucket.plan, policy=bucket.policy, measured_peak_bytes=measured_peak)
        return timeline_page(drawn.data())

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the peak of what runs inside, one or more whole steps, by the allocator's own record.

        On CUDA the allocator counts by itself and this resets its counter. On CPU torch.profiler counts,
        so none may be running, and the model must have been planned by an earlier step. The measured peak
        is then compared with the prediction: if it was over the budget, the model is planned again
        (docs/budget.md).

        Raises:
            RuntimeError: the model is not planned yet, or torch.profiler is running.
        """
        model = self._model()
        if model is None or self.policy is None:
            raise RuntimeError(
                "run one training step first, or two on several ranks: the first step makes the plan, or "
                "chooses one of the policies that were given"
            )
        store, watch = self._store, self._planning.watch
        watch.peaks.discard()  # the counter is about to be reset
        steps = {bucket: bucket.statistics.steps for bucket in store.all}
        complete = {bucket.loaded for bucket in store.all if watch.peaks.is_complete(bucket)}
        base = watch.on_device.standing_nbytes() + watch.on_device.others_standing_nbytes()
        with self._measured.record(model, state_tensors(watch.optimizers.all), base) as timeline:
            yield
        self._measured.policy = store.current.policy if store.current is not None else None
        watch.peaks.discard()
        ran = [bucket for bucket in store.all if bucket.statistics.steps > steps.get(bucket, 0)]
        if ran and not self._measured.beyond_plan:
            bucket = max(ran, key=lambda bucket: bucket.policy.predicted.peak_bytes)
            if bucket.loaded in complete:
                self._planning.judge(bucket, Measured(timeline.peak_bytes))

    def remove(self) -> None:
        """Remove the plan, so that the model is a plain model again. May be called twice."""
        self._hooks.close()
        self._planning.watch.close()
        host_memory.release()
        model = self._model()
        if model is not None and _applied.get(model) is self:
            del _applied[model]

    def _recording_us(self, bucket: PlannedBucket | None) -> float | None:
        """Return the time that recording is expected to add to a forward; None if it is not known.

        A device that runs behind its host hides as much of it as forward computes.
        """
        model = self._model()
        if bucket is None or model is None:
            return None
        if bucket.loaded.n_recorded == 0:
            return 0.0
        on_cpu = device_of(model).type == "cpu"
        if not on_cpu and bucket.profile is None:
            return None
        hidden_us = sum(bucket.profile.ops.runtime_us) if bucket.profile is not None and not on_cpu else 0.0
        return max(0.0, bucket.loaded.n_recorded * RECORDED_OP_US - hidden_us)

    def _measured_peak(self) -> int | None:
        model = self._model()
        if self._measured.peak_bytes is None and model is not None and self._hooks.log.steps:
            device = device_of(model)
            if device.type == "cuda":
                return torch.cuda.max_memory_allocated(device)
        return self._measured.peak_bytes


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
