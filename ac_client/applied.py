"""A planned model: what is attached to it, when it plans, and how it all comes off again."""

from __future__ import annotations

import gc
import logging
import os
import statistics
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ac_client.buckets import MOST_BUCKETS, Buckets, Loaded
from ac_client.cursor import Cursor, OffPath
from ac_client.errors import AlreadyApplied, CheckpointingActive, NotApplied, ShapeNotPlanned
from ac_client.measure import AllocatorTimeline
from ac_client.outofmemory import Before, is_out_of_memory
from ac_client.peaks import (
    WATCHED_STEPS,
    AllocatorPeak,
    Seen,
    allocator_peak,
    proposed_headroom,
)
from ac_client.planning import Planning
from ac_client.ranks import AUTO, Group, Need, Ranks, Terms, meet, ranks_of
from ac_client.remote import RemoteError
from ac_client.report import Report
from ac_client.runtime import active, enter_hooks, save_recompute_policy
from ac_client.shapes import Key, key_of, shape_of
from ac_client.stepmarks import StepMarks, last_step
from autoac.pages import timeline_page
from autoac.planner import (
    Constraints,
    Plan,
    PlannerError,
    Policy,
    PolicySet,
    Profile,
    as_planned,
    picture,
)
from autoac.planner.measured import MeasuredStep, op_names
from autoac.planner.policy_set import Bucket, Shape, shape_in_words
from autoac.planner.units import format_bytes
from autoac.profiler import NothingToProfile, ProfilerBusy, device_of, observe
from autoac.profiler.modules import ModuleHook, watch_modules
from autoac.profiler.ops import tensors_in
from autoac.profiler.recording import profiler_is_running
from autoac.profiler.sharding import gathered_nbytes, parameters_of, process_group_of
from autoac.profiler.static import optimizer_state_nbytes, static_bytes

log = logging.getLogger("ac_client")

_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()

PROBES = 8  # parameters that are asked whether gradients exist
MOST_STEP_TIMES = 1000  # kept for the median

Shapes = Literal["bucket", "first"]
Result = TypeVar("Result")


class _Call(threading.local):
    """The forward that is running on this thread."""

    planning = False
    region: save_recompute_policy | None = None
    cursor: Cursor | None = None
    quiet: set[tuple[int, int]]  # of the policy that the cursor walks
    unseen = 0  # modules that are being called while the mode is off
    watched: list[tuple[tuple[int, int] | None, int]]  # by module that is being called

    def __init__(self) -> None:
        self.quiet = set()
        self.watched = []


class Applied:
    """What `apply` did to one model. Get it by `ac_client.applied(model)`.

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
    ) -> None:
        self.budget_bytes = budget_bytes
        self._optimizer = optimizer
        self._strict = strict
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._planning = Planning(
            self._name, budget_bytes, headroom_bytes, constraints, optimizer, service, require_service
        )
        self._shapes = shapes
        self._group = (process_group_of(model) or AUTO) if group is None or group is AUTO else group
        self._ranks: Ranks | None = None  # that run each forward together; not known before the first
        self._to_meet = policy is None and group is not None  # in the first forward of all of them
        self._buckets = Buckets()
        self._serves_all: Loaded | None = None  # one policy, whatever the batch
        self._current: Loaded | None = None  # of the last forward
        self._unplanned: set[Key] = set()  # keys of batches with nothing to differentiate
        self._here = _Call()
        self._plan_lock = threading.RLock()
        self._off_path = ""
        self._told: set[str] = set()
        self._allocator: AllocatorPeak | None = None
        self._reading: tuple[Loaded, int, int] | None = None  # a step that is watched: policy, peak, versions
        self._retries = 0
        self._measured_peak: int | None = None
        self._marks: StepMarks | None = None  # while a step is measured
        self._drawn: tuple[Loaded, Policy, Plan | None, MeasuredStep] | None = None  # the last one measured
        self._batch: list[weakref.ref[Tensor]] = []  # of the last forward
        self._steps = 0
        self._began: list[float] = []
        self._handles: list[RemovableHandle] = []
        if isinstance(policy, Policy):
            self._serves_all = self._loaded(Loaded(None, policy))
        elif policy is not None:
            for bucket in policy.buckets:
                self._loaded(Loaded(bucket.shape, bucket.policy))
        trainable = [weakref.ref(p) for p in parameters_of(model) if p.requires_grad]
        self._probes = trainable[:: max(1, len(trainable) // PROBES)]  # to see whether gradients exist
        _applied[model] = self
        self._attach(model)

    @property
    def policy(self) -> Policy | None:
        """What the last training forward carried out; None before the first, unless one was given."""
        loaded = self._current or self._serves_all
        return loaded.policy if loaded is not None else None

    @property
    def planning(self) -> bool:
        """Whether the forward that runs on this thread is only profiled. What such a one logs or counts is no
        step's: it runs several times for one batch.
        """
        return self._here.planning

    @property
    def plan(self) -> Plan | None:
        """The decision behind `policy` with its evidence; None where that was not made in this process."""
        loaded = self._current or self._serves_all
        return loaded.plan if loaded is not None else None

    @property
    def policies(self) -> PolicySet:
        """One policy for each shape of batch that was planned. A policy given alone has no shape."""
        return PolicySet(
            buckets=tuple(
                Bucket(shape=dict(loaded.shape), policy=loaded.policy)
                for loaded in self._buckets.all
                if loaded.shape is not None
            )
        )

    def plan_for(self, *args: Any, **kwargs: Any) -> Policy:
        """Plan for one more shape of batch now: profiles `model(*args, **kwargs)` and changes nothing.

        A loop that begins with its largest batch plans once; one whose small batches are not to recompute
        what only the large ones must plans for those too.

        Raises:
            RuntimeError: one policy serves every shape, there is no budget, or the model is in `eval()`.
            InfeasibleBudget: no plan fits. What was planned before stays.
        """
        model = self._model()
        if model is None or self.budget_bytes is None or self._serves_all is not None:
            raise RuntimeError(
                'plan_for plans shapes for a budget: apply(model, budget_gb=..., shapes="bucket") first'
            )
        if not model.training:
            raise RuntimeError("plan_for plans training steps: call model.train() first")
        self._read(model)  # profiling is no part of the step before
        with self._plan_lock:
            return self._plan(model, args, kwargs, shape_of(args, kwargs)).policy

    def step(
        self, fn: Callable[[], Result], *, retry_oom: bool = False, keep_gradients: bool = False
    ) -> Result:
        """Run `fn()`, the forward and backward of one step, and see it through an out-of-memory error.

        With `retry_oom` a step that runs out of memory is undone, planned again for less memory, and run
        once more: gradients that it made are dropped, buffers and generators are put back. Else the error
        goes on, with what to do about it.

        Args:
            fn: forward and backward, the same if called again; `zero_grad` and the optimizer stay outside.
            retry_oom: run it a second time.
            keep_gradients: copy the gradients that are there before the step to the host's memory, to be
                able to undo a step that adds to them (gradient accumulation). Without, such a step is run
                again only if it has not come to add to them.

        Raises:
            torch.OutOfMemoryError: also from the second time, or it could not be undone. A note says so.
        """
        model = self._model()
        before = Before(model, keep_gradients=keep_gradients) if retry_oom and model is not None else None
        peak = self._allocator.allocated_peak() if self._allocator is not None else 0
        try:
            return fn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._abandon()
            loaded = self._current
            why = before.why_not() if before is not None else "retry_oom=True was not passed to step()"
            if before is not None and self._ranks is not None:
                why = f"the other {self._ranks.size - 1} ranks, which it talks to, would not run it again"
            if loaded is None:
                why = "it was not planned yet: the profiled step itself did not fit"
            elif not why and (loaded.profile is None or self.budget_bytes is None):
                why = "its policy was given, and cannot be planned again without budget_gb and a profile"
            if why or before is None or loaded is None:
                self._note(error, f"The step was not run again: {why}.")
                raise
            came_from = "".join(traceback.format_tb(error.__traceback__, limit=-4))
            # What its frames hold is not to be there for the second try.
            failed = error.with_traceback(None)
            failed.__context__ = failed.__cause__ = None
        assert before is not None
        assert loaded is not None
        gc.collect()
        if self._allocator is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what was freed may lie in pieces
        before.restore()
        try:
            self._planning.tighten(loaded, self._allocator, peak)
        except (PlannerError, RemoteError) as error:
            failed.add_note(f"It came from:\n{came_from}")
            self._note(failed, f"The step was not run again, for there is no tighter plan: {error}")
            raise failed from None
        self._retries += 1
        try:
            return fn()
        except Exception as error:
            if is_out_of_memory(error):
                self._abandon()
                self._note(error, "The step was planned again for less memory, and ran out again.")
            raise

    def report(self, html: str | os.PathLike[str] | None = None) -> Report:
        """Predicted and measured peak and step time, so far, and what is live at the peak.

        Args:
            html: also write a page there that draws memory over the step, in one file (docs/pictures.md).
                A step that was measured (`measure`) is drawn over the predicted one.

        Raises:
            RuntimeError: with `html`, nothing is planned yet, or the policy was given without a profile.
        """
        if html is not None:
            Path(html).write_text(self._page(), "utf-8")
        policy = self.policy
        allocated, reserved = self._allocated_and_reserved()
        budget = self.budget_bytes
        predicted = policy.predicted if policy is not None else None
        gaps = [b - a for a, b in zip(self._began[1:], self._began[2:], strict=False)]
        return Report(
            model=self._name,
            budget_bytes=self.budget_bytes,
            predicted_peak_bytes=predicted.peak_bytes if predicted else None,
            measured_peak_bytes=self._peak(),
            save_all_peak_bytes=predicted.save_all_peak_bytes if predicted else None,
            predicted_step_us=predicted.step_us + predicted.recompute_us if predicted else None,
            measured_step_us=statistics.median(gaps) * 1e6 if gaps else None,
            recompute_us=predicted.recompute_us if predicted else None,
            gap=predicted.gap if predicted else None,
            ops=len(policy.decisions) if policy else 0,
            recomputed=sum(d == "recompute" for d in policy.decisions.values()) if policy else 0,
            steps=self._steps,
            off_path=self._off_path,
            peak_at=predicted.peak_at if predicted else "",
            live_at_peak=loaded.live_at_peak if (loaded := self._current or self._serves_all) else (),
            buckets=len(self._buckets.all),
            corrections=sum(loaded.corrections for loaded in self._buckets.all),
            corrected_by_bytes=policy.corrected_by_bytes if policy else 0,
            retries=self._retries,
            allocated_peak_bytes=allocated,
            reserved_peak_bytes=reserved,
            proposed_headroom_bytes=(
                proposed_headroom(allocated, reserved, budget)
                if allocated is not None and reserved is not None and budget is not None
                else None
            ),
        )

    def _page(self) -> str:
        """What was measured last of this bucket, as it was planned then; else the plan as it is."""
        loaded = self._current or self._serves_all
        if loaded is None:
            raise RuntimeError("nothing is planned yet: run one training step first, then ask for the page")
        policy, plan, step, notes = loaded.policy, loaded.plan, None, []
        if self._drawn is not None and self._drawn[0] is loaded:
            _, policy, plan, step = self._drawn
            if policy is not loaded.policy:
                notes.append(
                    "The model was planned again since this step was measured; its predicted peak is now "
                    f"{format_bytes(loaded.policy.predicted.peak_bytes)}."
                )
        if plan is None:
            if loaded.profile is None:
                raise RuntimeError(
                    "the policy was given without its profile, which has the bytes: draw it with "
                    "`autoac explain POLICY --profile PROFILE --html PAGE`"
                )
            plan = as_planned(policy, loaded.profile)
        drawn = picture(plan, step, policy=policy, notes=notes)
        return timeline_page(drawn.data())

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the peak of what runs inside, one or more whole steps, by the allocator's own record.

        On CUDA the allocator counts by itself and this resets its counter. On CPU torch.profiler counts,
        so none may be running, and the model must have been planned by an earlier step. What was measured
        is then compared with what was predicted: where that was over the budget, or far from using it, the
        model is planned again (docs/budget.md).

        Raises:
            RuntimeError: the model is not planned yet, or torch.profiler is running.
        """
        model = self._model()
        if model is None or self.policy is None:
            raise RuntimeError(
                "run one training step first: the model is planned in its first training forward"
            )
        planned = [one.policy for one in (*self._buckets.all, self._serves_all) if one is not None]
        timeline = AllocatorTimeline(
            device_of(model),
            base=self._standing_bytes(model),
            ops=op_names([key for policy in planned for key in policy.decisions]),
        )
        self._marks = StepMarks(timeline)
        self._reading = None  # the counter is about to be reset
        steps = {loaded: loaded.steps for loaded in self._buckets.all}
        versions = _versions(model)
        try:
            with timeline:
                yield
        finally:
            self._marks = None
        self._measured_peak = timeline.peak_bytes
        if (step := last_step(timeline)) is not None and self._current is not None:
            self._drawn = self._current, self._current.policy, self._current.plan, step
        self._reading = None
        ran = [loaded for loaded in self._buckets.all if loaded.steps > steps.get(loaded, 0)]
        if ran:
            loaded = max(ran, key=lambda loaded: loaded.policy.predicted.peak_bytes)
            loaded.seen = Seen.exactly(timeline.peak_bytes)
            self._planning.judge(model, loaded, whole=_versions(model) != versions)

    def remove(self) -> None:
        """Leave the model as it was before `apply`. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._here.planning:
            self._after(None, None, None)  # left open by a forward that was interrupted
        model = self._model()
        if model is not None and _applied.get(model) is self:
            del _applied[model]

    def _standing_bytes(self, model: nn.Module) -> int:
        device = device_of(model)
        state = optimizer_state_nbytes(self._optimizer, device) if self._optimizer is not None else 0
        batch = [tensor for ref in self._batch if (tensor := ref()) is not None]
        return static_bytes(model, batch, {}, state, device).total + gathered_nbytes(model)

    def _peak(self) -> int | None:
        model = self._model()
        if self._measured_peak is None and model is not None and self._steps:
            device = device_of(model)
            if device.type == "cuda":
                return torch.cuda.max_memory_allocated(device)
        return self._measured_peak

    def _allocated_and_reserved(self) -> tuple[int | None, int | None]:
        if self._allocator is None:
            return None, None
        return self._allocator.allocated_peak(), self._allocator.reserved_peak()

    def _attach(self, model: nn.Module) -> None:
        self._handles = [
            model.register_forward_pre_hook(ModuleHook(self._before), with_kwargs=True, prepend=True),
            model.register_forward_hook(ModuleHook(self._left), always_call=True),
            *watch_modules(model, self._enter, self._leave),
        ]

    def _before(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        here = self._here
        if here.planning:
            return
        if self._reading is not None:
            self._read(model)  # the step that was watched is over
        if not model.training or not torch.is_grad_enabled():
            if not model.training:
                self._after(model, None, None)  # as below; no part of a forward in training
            return
        # Left open by a forward that was interrupted (KeyboardInterrupt runs no hook), or the model calls
        # itself: then the rest of the outer call runs unplanned.
        self._after(model, None, None)
        loaded = self._serves_all
        if self._ranks is None:
            self._ranks = ranks_of(model, self._group)
        if self._to_meet and self._ranks is not None:
            loaded = self._meet_ranks(model, args, kwargs, self._ranks)
            if loaded is None:
                return
        elif loaded is None:
            key = key_of(args, kwargs)
            loaded = self._buckets.known.get(key) or self._meet(model, args, kwargs, key)
            if loaded is None:
                return
        if loaded.knows_no_gradients and self._gradients_exist():
            loaded = self._plan_with_gradients(model, args, kwargs, loaded)
        self._current = loaded
        if self._marks is not None:
            self._marks.forward()
        loaded.steps += 1
        if self._allocator is not None and loaded.watched < WATCHED_STEPS:
            self._reading = loaded, self._allocator.allocated_peak(), _versions(model)
        self._steps += 1
        self._batch = [weakref.ref(t) for t in tensors_in(args, kwargs)]
        if len(self._began) < MOST_STEP_TIMES:
            self._began.append(time.perf_counter())
        if not loaded.recomputes:
            return
        route, here.quiet = loaded.way
        here.cursor = Cursor(route, strict=self._strict, report=self._off)
        here.unseen = 0
        here.watched = []
        region = save_recompute_policy(here.cursor)
        region.__enter__()
        here.region = region

    def _left(self, _model: nn.Module | None, _args: Any, out: Any) -> None:
        self._after(None, None, None)
        if out is None and is_out_of_memory(error := sys.exception()):
            assert error is not None
            what = "Profiling a step" if self._here.planning else "A planned forward"
            self._note(error, f"{what} ran out of memory.")

    def _after(self, _model: nn.Module | None, _args: Any, _out: Any) -> None:
        here = self._here
        region, here.region, here.cursor = here.region, None, None
        if region is not None:
            region.__exit__(None, None, None)

    def _enter(self, path: str) -> None:
        if self._marks is not None:
            self._marks.enter(path)
        here, region = self._here, active.region
        if here.cursor is None or region is None:
            return
        if here.unseen:
            here.unseen += 1  # inside a module that runs without the mode
            return
        stretch = here.cursor.enter(path)
        if stretch in here.quiet and not self._strict and region.pause(stretch[1] - stretch[0]):
            here.unseen = 1
        here.watched.append((stretch, region.tracked_writes))

    def _leave(self, path: str) -> None:
        if self._marks is not None:
            self._marks.leave(path)
        here, region = self._here, active.region
        if here.cursor is None or region is None:
            return
        if here.unseen:
            here.unseen -= 1
            if here.unseen:
                return
            region.resume()
            here.cursor.skip()
        stretch, writes = here.watched.pop() if here.watched else (None, 0)
        if stretch is not None and writes == region.tracked_writes:
            here.quiet.add(stretch)
        here.cursor.leave(path)

    def _off(self, off: OffPath) -> None:
        if not self._off_path:
            self._off_path = str(off)
            log.warning("%s left its policy: %s; what is unknown is saved", self._name, off)

    def _meet(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key
    ) -> Loaded | None:
        """The policy for a batch whose key is new, planned if no bucket covers it; None: run it unplanned.

        Raises:
            ShapeNotPlanned: strict, and beyond all buckets.
        """
        if key in self._unplanned:
            return None
        with self._plan_lock:  # a forward on another thread waits for the plan
            loaded = self._buckets.covering(key, args, kwargs)
            if loaded is None:
                shape = shape_of(args, kwargs)
                first = not self._buckets.all
                if not first:
                    if self._strict:
                        planned = [b.shape for b in self._buckets.all if b.shape is not None]
                        raise ShapeNotPlanned(shape, planned)
                    if self.budget_bytes is None or len(self._buckets.all) >= MOST_BUCKETS:
                        return self._beyond(shape, key)
                _check_hooks()
                try:
                    loaded = self._plan(model, args, kwargs, shape)
                except ProfilerBusy as busy:
                    return self._unplanned_now(busy)
                except BaseException as error:
                    if first:
                        self.remove()
                    elif isinstance(error, NothingToProfile):
                        self._unplanned.add(key)
                        return None
                    raise
            if self._serves_all is None:
                self._buckets.remember(key, loaded)
        return loaded

    def _unplanned_now(self, busy: ProfilerBusy) -> Loaded | None:
        """What runs a batch that cannot be profiled yet."""
        if self._buckets.all:
            return self._buckets.largest()
        self._tell_once("busy", "%s runs unplanned, and will be planned later: %s", self._name, busy)
        return None

    def _meet_ranks(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: Ranks
    ) -> Loaded | None:
        """The policy for the first batch, agreed on by all ranks; None: this time all run unplanned.

        See NOTE [ Where ranks meet ] in ranks.py. Each rank profiles its own batch, and some plan.
        """
        with self._plan_lock:
            if ranks.any(profiler_is_running()):
                return self._unplanned_now(ProfilerBusy())
            profile: Profile | None = None
            need: Need | Exception
            shape = shape_of(args, kwargs)
            try:
                profile = self._profiled(model, args, kwargs)
                need = Need(shape, self._planning.limit, profile.static.total)
            except Exception as error:  # noqa: BLE001 - told to all ranks, and raised on each
                need = error
            made: list[Plan | None] = [None]

            def plan(terms: Terms) -> Policy:
                assert profile is not None
                policy, made[0] = self._planning.first(profile, terms)
                return policy

            try:
                agreed = meet(ranks, need, plan)
            except BaseException as error:
                if isinstance(error, ProfilerBusy):
                    return self._unplanned_now(error)
                self.remove()
                raise
            self._to_meet = False
            assert profile is not None
            for one in agreed.made:
                loaded = Loaded(
                    one.shape,
                    one.policy,
                    made[0] if one.planner == ranks.rank else None,
                    profile if one.shape == shape else None,
                    agreed.static - profile.static.total,
                )
                self._keep(model, loaded)
                log.info("%s: planned by rank %d of %d", self._name, one.planner, ranks.size)
            covering = self._buckets.covering(key_of(args, kwargs), args, kwargs)
            assert covering is not None
            if self._shapes == "first":
                covering.shape = None
                self._serves_all = covering
            return covering

    def _gradients_exist(self) -> bool:
        return any((p := ref()) is not None and p.grad is not None for ref in self._probes)

    def _plan_with_gradients(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loaded: Loaded
    ) -> Loaded:
        """Plan again where gradients exist before a step that was planned as one that makes them.

        So it is with microbatches after the first, and with `zero_grad(set_to_none=False)`. The new plan
        then serves first microbatches too, which need less.
        """
        shape = shape_of(args, kwargs)
        if shape != loaded.planned_for:
            return loaded  # wait for a batch like the one that was profiled
        loaded.knows_no_gradients = False  # asked once, whatever comes of it
        with self._plan_lock:
            try:
                again = self._plan(model, args, kwargs, shape)
            except ProfilerBusy:
                loaded.knows_no_gradients = True
                return loaded
            except (PlannerError, RemoteError) as error:
                self._tell_once(
                    "gradients",
                    "%s: gradients exist before the step, and no plan leaves room for them (%s): it stays",
                    self._name,
                    str(error).partition("\n")[0],
                )
                return loaded
        log.info("%s: planned again, since gradients exist before the step", self._name)
        return again

    def _beyond(self, shape: Shape, key: Key) -> Loaded:
        """What runs a batch that no bucket covers and that is not planned."""
        loaded = self._buckets.largest()
        self._tell_once(
            "beyond",
            "%s: no bucket covers a batch of %s, and none is added (%s): it runs under the largest of %d, "
            "and may need more memory than that was planned for",
            self._name,
            shape_in_words(shape),
            "no budget_gb was given" if self.budget_bytes is None else f"there are {MOST_BUCKETS}",
            len(self._buckets.all),
        )
        self._buckets.remember(key, loaded)
        return loaded

    def _plan(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Shape) -> Loaded:
        profile = self._profiled(model, args, kwargs)
        policy, made = self._planning.first(profile)
        loaded = self._keep(model, Loaded(shape, policy, made, profile))
        if self._shapes == "first":
            loaded.shape = None
            self._serves_all = loaded
        return loaded

    def _profiled(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Profile:
        _check_hooks()
        self._here.planning = True
        try:
            return observe(model, args, kwargs, optimizer=self._optimizer)
        finally:
            self._here.planning = False

    def _keep(self, model: nn.Module, loaded: Loaded) -> Loaded:
        """Carry out what was planned here."""
        if self._allocator is None:
            self._allocator = allocator_peak(device_of(model))
        return self._loaded(loaded)

    def _loaded(self, loaded: Loaded) -> Loaded:
        self._buckets.add(loaded)
        policy = loaded.policy
        log.info(
            "%s: predicted peak %s, %d of %d ops recomputed",
            self._name,
            format_bytes(policy.predicted.peak_bytes),
            sum(decision == "recompute" for decision in policy.decisions.values()),
            len(policy.decisions),
        )
        return loaded

    def _read(self, model: nn.Module) -> None:
        """Compare the step that is over with what was predicted of it."""
        reading, self._reading = self._reading, None
        if reading is None or self._allocator is None:
            return
        loaded, before, versions = reading
        seen = Seen.between(before, self._allocator.allocated_peak())
        loaded.seen = seen if loaded.seen is None else loaded.seen.joined(seen)
        loaded.watched += 1
        self._planning.judge(
            model, loaded, whole=loaded.watched == WATCHED_STEPS and _versions(model) != versions
        )

    def _abandon(self) -> None:
        """The step that is running will not end."""
        self._reading = None
        self._after(None, None, None)

    def _note(self, error: BaseException, what: str) -> None:
        """Say with `error` what was done about it, and, once, what can be."""
        told = any(note.startswith("autoac:") for note in getattr(error, "__notes__", ()))
        error.add_note(f"autoac: {what}")
        if told:
            return
        if (policy := self.policy) is not None:
            peak, budget = policy.predicted.peak_bytes, self.budget_bytes
            of = f" of a budget of {format_bytes(budget)}" if budget is not None else ""
            error.add_note(f"The planned peak was {format_bytes(peak)}{of}.")
        error.add_note(
            "Pass a smaller budget_gb or more headroom_gb to ac_client.apply, use a smaller batch, or run "
            "the step as ac_client.applied(model).step(fn, retry_oom=True)."
        )

    def _tell_once(self, what: str, message: str, *args: Any) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(message, *args)


def _check_hooks() -> None:
    """Raises what stands in the way of saved-tensor hooks, before anything has run."""
    enter_hooks(hooks := torch.autograd.graph.saved_tensors_hooks(_same, _same))
    hooks.__exit__()


def _versions(model: nn.Module) -> int:
    """Rises with every step of an optimizer."""
    return sum(p._version for p in parameters_of(model) if p.requires_grad and not p.is_inference())


def _same(tensor: Tensor) -> Tensor:
    return tensor


def applied(model: nn.Module) -> Applied:
    """What `apply` did to `model`.

    Raises:
        NotApplied: nothing.
    """
    try:
        return _applied[model]
    except KeyError:
        raise NotApplied(type(model).__name__) from None


def check_untouched(model: nn.Module) -> None:
    """Refuse a model that is planned already or checkpoints itself.

    Raises:
        AlreadyApplied, CheckpointingActive.
    """
    for path, module in model.named_modules():
        where = f"{type(module).__name__}{f' at {path}' if path else ''}"
        if module in _applied:
            raise AlreadyApplied(where)
        for attribute in _SWITCHES:
            if vars(module).get(attribute) is True:
                switch = next((f"{a}_disable" for a in _SWITCHES if hasattr(model, f"{a}_disable")), None)
                raise CheckpointingActive(
                    where, f"model.{switch}()" if switch else f"{where}.{attribute} = False"
                )
        if type(module).__name__ == "CheckpointWrapper":
            raise CheckpointingActive(where, "your own code without checkpoint_wrapper")


# transformers 5.23 renamed the second to the first.
_SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
