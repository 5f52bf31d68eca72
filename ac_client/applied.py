"""A planned model: what is attached to it, when it plans, and how it all comes off again."""

from __future__ import annotations

import logging
import statistics
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ac_client.cursor import Cursor, OffPath, Route
from ac_client.errors import AlreadyApplied, CheckpointingActive, NotApplied
from ac_client.measure import AllocatorTimeline
from ac_client.remote import ServiceUnavailable, request_policy
from ac_client.report import Report
from ac_client.runtime import active, enter_hooks, save_recompute_policy
from autoac.planner import Plan, Policy, plan
from autoac.planner.units import format_bytes
from autoac.profiler import ProfilerBusy, device_of, observe
from autoac.profiler.modules import ModuleHook, watch_modules
from autoac.profiler.ops import tensors_in
from autoac.profiler.static import optimizer_state_nbytes, static_bytes

log = logging.getLogger("ac_client")

_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()

MOST_STEP_TIMES = 1000  # kept for the median


class _Call(threading.local):
    """The forward that is running on this thread."""

    planning = False
    region: save_recompute_policy | None = None
    cursor: Cursor | None = None
    unseen = 0  # modules that are being called while the mode is off
    watched: list[tuple[tuple[int, int] | None, int]]  # by module that is being called

    def __init__(self) -> None:
        self.watched = []


class Applied:
    """What `apply` did to one model. Get it by `ac_client.applied(model)`.

    Attributes:
        budget_bytes: of the device, for the whole step; None if a policy was given without a budget.
        policy: what is carried out; None until the first training forward.
        plan: the decision with its evidence; None until then, and where the policy was not made here.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int | None,
        headroom_bytes: int,
        optimizer: torch.optim.Optimizer | None,
        policy: Policy | None,
        service: str | None,
        strict: bool,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.policy: Policy | None = None
        self.plan: Plan | None = None
        self._headroom_bytes = headroom_bytes
        self._optimizer = optimizer
        self._service = service
        self._strict = strict
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._route: Route | None = None
        self._recomputes = False
        self._here = _Call()
        self._plan_lock = threading.Lock()
        self._quiet: set[tuple[int, int]] = set()  # stretches of saved ops that once wrote to nothing tracked
        self._off_path = ""
        self._told_busy = False
        self._measured_peak: int | None = None
        self._batch: list[weakref.ref[Tensor]] = []  # of the last forward
        self._steps = 0
        self._began: list[float] = []
        self._handles: list[RemovableHandle] = []
        if policy is not None:
            self._load(policy)
        _applied[model] = self
        self._attach(model)

    def report(self) -> Report:
        """Predicted and measured peak and step time, so far."""
        policy = self.policy
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
        )

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the peak of what runs inside, one or more whole steps, by the allocator's own record.

        On CUDA the allocator counts by itself and this resets its counter. On CPU torch.profiler counts,
        so none may be running, and the model must have been planned by an earlier step.

        Raises:
            RuntimeError: the model is not planned yet, or torch.profiler is running.
        """
        model = self._model()
        if model is None or self.policy is None:
            raise RuntimeError(
                "run one training step first: the model is planned in its first training forward"
            )
        timeline = AllocatorTimeline(device_of(model), base=self._standing_bytes(model))
        with timeline:
            yield
        self._measured_peak = timeline.peak_bytes

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
        return static_bytes(model, batch, {}, state, device).total

    def _peak(self) -> int | None:
        model = self._model()
        if self._measured_peak is None and model is not None and self._steps:
            device = device_of(model)
            if device.type == "cuda":
                return torch.cuda.max_memory_allocated(device)
        return self._measured_peak

    def _attach(self, model: nn.Module) -> None:
        self._handles = [
            model.register_forward_pre_hook(ModuleHook(self._before), with_kwargs=True, prepend=True),
            model.register_forward_hook(ModuleHook(self._after), always_call=True),
            *watch_modules(model, self._enter, self._leave),
        ]

    def _before(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        here = self._here
        if here.planning:
            return
        if not model.training or not torch.is_grad_enabled():
            if not model.training:
                self._after(model, None, None)  # as below; no part of a forward in training
            return
        # Left open by a forward that was interrupted (KeyboardInterrupt runs no hook), or the model calls
        # itself: then the rest of the outer call runs unplanned.
        self._after(model, None, None)
        if self._route is None:
            enter_hooks(hooks := torch.autograd.graph.saved_tensors_hooks(_same, _same))
            hooks.__exit__()
            try:
                with self._plan_lock:  # a forward on another thread waits for the plan
                    if self._route is None:
                        self._plan(model, args, kwargs)
            except ProfilerBusy:
                if not self._told_busy:
                    self._told_busy = True
                    log.warning(
                        "%s runs unplanned while torch.profiler is active, and will be planned after",
                        self._name,
                    )
                return
            except BaseException:
                self.remove()
                raise
        assert self._route is not None
        self._steps += 1
        self._batch = [weakref.ref(t) for t in tensors_in(args, kwargs)]
        if len(self._began) < MOST_STEP_TIMES:
            self._began.append(time.perf_counter())
        if not self._recomputes:
            return
        here.cursor = Cursor(self._route, strict=self._strict, report=self._off)
        here.unseen = 0
        here.watched = []
        region = save_recompute_policy(here.cursor)
        region.__enter__()
        here.region = region

    def _after(self, _model: nn.Module | None, _args: Any, _out: Any) -> None:
        here = self._here
        region, here.region, here.cursor = here.region, None, None
        if region is not None:
            region.__exit__(None, None, None)

    def _enter(self, path: str) -> None:
        here, region = self._here, active.region
        if here.cursor is None or region is None:
            return
        if here.unseen:
            here.unseen += 1  # inside a module that runs without the mode
            return
        stretch = here.cursor.enter(path)
        if stretch in self._quiet and not self._strict and region.pause(stretch[1] - stretch[0]):
            here.unseen = 1
        here.watched.append((stretch, region.tracked_writes))

    def _leave(self, path: str) -> None:
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
            self._quiet.add(stretch)
        here.cursor.leave(path)

    def _off(self, off: OffPath) -> None:
        if not self._off_path:
            self._off_path = str(off)
            log.warning("%s left its policy: %s; what is unknown is saved", self._name, off)

    def _plan(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        assert self.budget_bytes is not None
        self._here.planning = True
        try:
            profile = observe(model, args, kwargs, optimizer=self._optimizer)
        finally:
            self._here.planning = False
        if self._service is not None:
            try:
                self._load(
                    request_policy(
                        self._service, profile, self.budget_bytes, headroom_bytes=self._headroom_bytes
                    )
                )
                return
            except ServiceUnavailable as error:
                log.warning("planning in-process, because %s", error)
        self.plan = plan(profile, budget_bytes=self.budget_bytes, headroom_bytes=self._headroom_bytes)
        self._load(self.plan.policy())

    def _load(self, policy: Policy) -> None:
        self.policy = policy
        self._route = Route(policy.decisions)
        self._quiet.clear()
        self._recomputes = "recompute" in policy.decisions.values()
        log.info(
            "%s: predicted peak %s, %d of %d ops recomputed",
            self._name,
            format_bytes(policy.predicted.peak_bytes),
            sum(decision == "recompute" for decision in policy.decisions.values()),
            len(policy.decisions),
        )


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
