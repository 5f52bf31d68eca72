"""A planned model: what is attached to it, what a step reports, and how it all comes off again."""

from __future__ import annotations

import gc
import logging
import os
import statistics
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ac_client.errors import AlreadyApplied, CheckpointingActive, CompiledModel, NotApplied
from ac_client.files import write_whole
from ac_client.measure.measured_steps import MeasuredSteps
from ac_client.measure.recording_overhead import recording_us_of_process
from ac_client.measure.report import Report
from ac_client.planning.loop_watch import LoopWatch
from ac_client.planning.neighbors import Neighbors
from ac_client.planning.oom_retry import Before, is_out_of_memory
from ac_client.planning.optimizer_steps import ModelOptimizers, UnplannedSteps
from ac_client.planning.peak_counter import WATCHED_STEPS, Seen, proposed_headroom
from ac_client.planning.planned_forward import Forward
from ac_client.planning.policy_store import Choosing, Shapes
from ac_client.planning.ranks import AUTO, Group
from ac_client.planning.replan import Planning
from ac_client.planning.service_client import RemoteError
from ac_client.planning.shape_buckets import Loaded
from ac_client.runtime.cursor import OffPath
from ac_client.runtime.policy_context import active
from ac_client.runtime.write_guard import version_counter
from autoac.planner import Constraints, Plan, PlannerError, Policy, PolicySet, as_planned
from autoac.planner.memory.simulate import waiting_bytes
from autoac.planner.units import format_bytes
from autoac.profiler import device_of
from autoac.profiler.distributed.ddp import wrapper_paths
from autoac.profiler.distributed.fsdp import gathered_nbytes, parameters_of
from autoac.profiler.errors import CannotProfile
from autoac.profiler.static_memory import static_bytes
from autoac.profiler.steps.training_loop import Loss
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.batch_contents import batch_tensors
from autoac.profiler.torch_facts.inductor import is_compiled, is_optimized
from autoac.profiler.torch_facts.module_paths import ModuleHook, watch_modules

log = logging.getLogger("ac_client")

_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()

MOST_ASKED_FOR_ROOM = 3  # by other planned models, of one policy
MOST_STEP_TIMES = 1000  # kept for the median

Result = TypeVar("Result")


@dataclass(slots=True)
class Reading:
    """Readings of the allocator's counter in one step."""

    loaded: Loaded
    counts: list[int]  # from before forward on
    written: int  # `Applied._written` before it


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
        loss: Loss | None = None,
        forwards_in_flight: int | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._optimizers = ModelOptimizers(model, optimizer)
        self._strict = strict
        self._model = weakref.ref(model)
        self._name = type(model).__name__
        self._planning = Planning(
            self._name, budget_bytes, headroom_bytes, constraints, self._optimizers, service, require_service
        )
        self._watch = LoopWatch(self._planning, forwards_in_flight, has_loss=loss is not None)
        self._choosing = Choosing(
            model,
            self._planning,
            self._watch,
            optimizers=self._optimizers,
            loss=loss,
            loss_takes_all=forwards_in_flight is not None and forwards_in_flight > 1,
            policy=policy,
            strict=strict,
            shapes=shapes,
            group=group,
        )
        self._neighbors = Neighbors(self)
        self._planning.held_beside = self._neighbors.held_nbytes
        self._planning.ask_for_room = self._neighbors.ask_for_room
        self._told_of_neighbors = False
        self._current: Loaded | None = None  # of the last forward
        self._forward = Forward()
        self._wrappers = wrapper_paths(model)
        self._off_path = ""
        self._reading: Reading | None = None  # of the step that runs, if it is watched
        self._retries = 0
        self._measured = MeasuredSteps()
        self._steps = 0
        self._optimizers.after_step = weakref.WeakMethod(self._optimizer_stepped)
        self._written_at_first = self._written(model)
        self._forwards = 0  # that train, planned or not
        self._unplanned = UnplannedSteps(self._name)
        self._began: list[float] = []
        self._handles: list[RemovableHandle] = []
        _applied[model] = self
        self._attach(model)

    @property
    def policy(self) -> Policy | None:
        """What the last training forward carried out; None before the first, unless one was given."""
        return loaded.policy if (loaded := self._latest) is not None else None

    @property
    def planning(self) -> bool:
        """Whether the forward that runs on this thread is only profiled. What such a one logs or counts is no
        step's: it runs several times for one batch.
        """
        return self._choosing.profiling

    @property
    def plan(self) -> Plan | None:
        """The decision behind `policy` with its evidence; None where that was not made in this process."""
        return loaded.plan if (loaded := self._latest) is not None else None

    @property
    def _latest(self) -> Loaded | None:
        """What the last forward ran under, or what every one will."""
        return self._current or self._choosing.serves_all

    @property
    def policies(self) -> PolicySet:
        """One policy for each shape of batch that was planned. A policy given alone has no shape."""
        return self._choosing.policies()

    def plan_for(self, *args: Any, **kwargs: Any) -> Policy:
        """Plan for one more shape of batch now: profiles `model(*args, **kwargs)` and changes nothing.

        A loop that begins with its largest batch plans once; one whose small batches are not to recompute
        what only the large ones must plans for those too.

        Raises:
            RuntimeError: one policy serves every shape, there is no budget, or the model is in `eval()`.
            InfeasibleBudget: no plan fits. What was planned before stays.
        """
        model = self._model()
        if model is None or self.budget_bytes is None or self._choosing.serves_all is not None:
            raise RuntimeError(
                'plan_for plans shapes for a budget: apply(model, budget_gb=..., shapes="bucket") first'
            )
        if not model.training:
            raise RuntimeError("plan_for plans training steps: call model.train() first")
        self._read(model)  # profiling is no part of the step before
        return self._choosing.plan_for(model, args, kwargs)

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
        allocator = self._choosing.allocator
        peak = allocator.allocated_peak() if allocator is not None else 0
        try:
            with before.watched() if before is not None else nullcontext():
                return fn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._abandon()
            loaded = self._current
            why = before.why_not() if before is not None else "retry_oom=True was not passed to step()"
            if before is not None and (ranks := self._choosing.ranks) is not None:
                why = f"the other {ranks.size - 1} ranks, which it talks to, would not run it again"
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
        if allocator is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what was freed may lie in pieces
        before.restore()
        try:
            self._planning.tighten(loaded, allocator, peak)
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
            write_whole(Path(html), self._page())
        loaded = self._latest
        policy = loaded.policy if loaded is not None else None
        recording_us = self._recording_us(loaded)
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
            predicted_step_us=(
                predicted.step_us + predicted.recompute_us + (recording_us or 0) if predicted else None
            ),
            measured_step_us=statistics.median(gaps) * 1e6 if gaps else None,
            recompute_us=predicted.recompute_us if predicted else None,
            recording_us=recording_us,
            gap=predicted.gap if predicted else None,
            ops=len(policy.decisions) if policy else 0,
            recomputed=sum(d == "recompute" for d in policy.decisions.values()) if policy else 0,
            recorded=loaded.recorded if loaded is not None else 0,
            steps=self._steps,
            off_path=self._off_path,
            peak_at=predicted.peak_at if predicted else "",
            live_at_peak=loaded.live_at_peak if loaded is not None else (),
            buckets=len(self._choosing.all),
            corrections=sum(loaded.corrections for loaded in self._choosing.all),
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
        loaded = self._latest
        if loaded is None:
            raise RuntimeError("nothing is planned yet: run one training step first, then ask for the page")
        return self._measured.page(loaded, loaded.policy, loaded.plan, loaded.profile)

    def _recording_us(self, loaded: Loaded | None) -> float | None:
        """What recording is expected to add to a forward; None where that is not to be told.

        Not told on a device that runs behind its host, nor where measuring would be in the way: in a forward,
        and while a peak is measured.
        """
        model = self._model()
        if loaded is None or model is None or device_of(model).type != "cpu":
            return None
        if loaded.recorded == 0:
            return 0.0
        if self._measured.marks is not None or active.region is not None:
            return None
        return loaded.recorded * recording_us_of_process()

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
        self._reading = None  # the counter is about to be reset
        steps = {loaded: loaded.steps for loaded in self._choosing.all}
        complete = {loaded for loaded in self._choosing.all if self._may_be_judged(model, loaded)}
        written = self._written(model)
        policies = [loaded.policy for loaded in self._choosing.all]
        base = self._standing_bytes(model) + sum(n.standing_nbytes for n in self._neighbors.active())
        with self._measured.record(model, base, policies) as timeline:
            yield
        if self._current is not None:
            self._measured.remember(timeline, self._current, self._current.policy, self._current.plan)
        self._reading = None
        ran = [loaded for loaded in self._choosing.all if loaded.steps > steps.get(loaded, 0)]
        if ran:
            loaded = max(ran, key=lambda loaded: loaded.policy.predicted.peak_bytes)
            if loaded in complete:
                loaded.seen = Seen.exactly(timeline.peak_bytes)
                self._planning.judge(model, loaded, whole=self._written(model) != written)

    def remove(self) -> None:
        """Leave the model as it was before `apply`. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self.planning:
            self._forward.end()  # left open by a forward that was interrupted
        self._watch.close()
        self._optimizers.close()
        self._neighbors.close()
        model = self._model()
        if model is not None and _applied.get(model) is self:
            del _applied[model]

    @property
    def device(self) -> torch.device | None:
        """Where the model trains; None if it is gone."""
        model = self._model()
        return device_of(model) if model is not None else None

    @property
    def held_nbytes(self) -> int:
        """The bytes that the model and its optimizers hold between steps, and its forwards in flight now."""
        loaded = self._current
        model = self._model()
        if loaded is None or loaded.profile is None or model is None:
            return 0 if model is None else self._standing_bytes(model)
        static = loaded.profile.static
        held = static.total - static.inputs + (0 if static.gradients else loaded.profile.gradient_nbytes)
        if waiting := self._watch.waiting():
            plan = loaded.plan or as_planned(loaded.policy, loaded.profile)
            held += waiting * waiting_bytes(plan.graph, plan.save_set) // len(loaded.ways)
        return held

    @property
    def standing_nbytes(self) -> int:
        """The bytes that the model and its optimizers hold now, forwards in flight aside."""
        model = self._model()
        return self._standing_bytes(model) if model is not None else 0

    def make_room(self, nbytes: int) -> None:
        """Plan the next step with so many bytes less, if that was not asked for often before."""
        loaded = self._current
        if loaded is not None and loaded.profile is not None and loaded.asked_for_room < MOST_ASKED_FOR_ROOM:
            loaded.asked_for_room += 1
            loaded.makes_room = True
            loaded.withheld += nbytes

    def meet(self) -> None:
        """Warn if what others hold takes the step that is running over the budget."""
        loaded = self._current
        if loaded is None or self._told_of_neighbors or not self._watch.waiting():
            return  # between steps: the next forward counts it
        if self._planning.lacks_room(loaded, self._neighbors.held_nbytes() - loaded.beside):
            self._told_of_neighbors = True
            log.warning(
                "%s: another planned model trains on the same device, and what it holds is not in this plan: "
                "this step may go over the budget of %s. The plan is made again at the next step",
                self._name,
                format_bytes(self.budget_bytes or 0),
            )

    def _standing_bytes(self, model: nn.Module) -> int:
        device = device_of(model)
        state = self._optimizers.state_nbytes(device)
        return static_bytes(model, (), {}, state, device).total + gathered_nbytes(model)

    def _peak(self) -> int | None:
        model = self._model()
        if self._measured.peak_bytes is None and model is not None and self._steps:
            device = device_of(model)
            if device.type == "cuda":
                return torch.cuda.max_memory_allocated(device)
        return self._measured.peak_bytes

    def _allocated_and_reserved(self) -> tuple[int | None, int | None]:
        allocator = self._choosing.allocator
        return (
            (allocator.allocated_peak(), allocator.reserved_peak()) if allocator is not None else (None, None)
        )

    def _attach(self, model: nn.Module) -> None:
        self._handles = [
            model.register_forward_pre_hook(
                ModuleHook(self._before, before=True), with_kwargs=True, prepend=True
            ),
            model.register_forward_hook(ModuleHook(self._left), always_call=True),
            *watch_modules(model, self._enter, self._leave),
        ]

    def _before(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.planning:
            return
        waiting = self._watch.waiting()
        if self._reading is not None and not waiting:
            self._read(model)  # the step that was watched is over
        if not torch.is_grad_enabled() or not self._unplanned.trains_in(model):
            if not model.training:
                self._forward.end()  # as below; no part of a forward in training
            return
        self._forwards += 1
        if torch.compiler.is_compiling() or private.get_tracing_state() is not None:
            raise CannotProfile(
                self._name,
                "torch.export or torch.jit traces it, and would trace the plan as well",
                "call ac_client.applied(model).remove() first, or trace it in eval() under torch.no_grad()",
            )
        # Left open by a forward that was interrupted (KeyboardInterrupt runs no hook), or the model calls
        # itself: then the rest of the outer call runs unplanned.
        self._forward.end()
        loaded = self._choosing.for_batch(model, args, kwargs, self.remove, waiting)
        if loaded is None:
            return
        self._current = loaded
        self._neighbors.took_turn()
        for neighbor in self._neighbors.active():
            neighbor.meet()
        if self._measured.marks is not None and not waiting:
            self._measured.marks.begin_forward()
        loaded.steps += 1
        allocator = self._choosing.allocator
        watched = allocator is not None and not waiting and loaded.watched < WATCHED_STEPS
        if watched and self._may_be_judged(model, loaded):
            assert allocator is not None
            self._reading = Reading(loaded, [allocator.allocated_peak()], self._written(model))
        self._steps += 1
        if self._measured.marks is not None:
            self._measured.note_batch(batch_tensors((*args, *kwargs.values())))
        if len(self._began) < MOST_STEP_TIMES:
            self._began.append(time.perf_counter())
        self._forward.begin(
            loaded, model, waiting=waiting, strict=self._strict, report=self._off, beside=self._wrappers
        )

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._read_counter()
        self._unplanned.optimizer_stepped(optimizer, self._forwards)

    def _left(self, _model: nn.Module | None, _args: Any, out: Any) -> None:
        error = sys.exception()
        loaded = self._forward.end(whole=error is None)
        self._read_counter()
        if loaded is not None and error is None:
            self._watch.forward_ended(loaded, out)
        if out is None and is_out_of_memory(error):
            assert error is not None
            what = "Profiling a step" if self.planning else "A planned forward"
            self._note(error, f"{what} ran out of memory.")

    def _enter(self, path: str) -> None:
        if self._measured.marks is not None:
            self._measured.marks.enter_module(path)
        self._forward.enter(path)

    def _leave(self, path: str) -> None:
        if self._measured.marks is not None:
            self._measured.marks.leave_module(path)
        self._forward.leave(path)

    def _off(self, off: OffPath) -> None:
        if not self._off_path:
            self._off_path = str(off)
            log.warning("%s left its policy: %s; what is unknown is saved", self._name, off)

    def _read_counter(self) -> None:
        """Add what the allocator's counter says now to the readings of the step that runs."""
        if self._reading is not None and not self.planning and (allocator := self._choosing.allocator):
            self._reading.counts.append(allocator.allocated_peak())

    def _read(self, model: nn.Module) -> None:
        """Compare the step that is over with what was predicted of it."""
        self._read_counter()
        reading, self._reading = self._reading, None
        if reading is None:
            return
        loaded, seen = reading.loaded, Seen.of(reading.counts)
        loaded.seen = seen if loaded.seen is None else loaded.seen.joined(seen)
        loaded.watched += 1
        self._planning.judge(
            model, loaded, whole=loaded.watched == WATCHED_STEPS and self._written(model) != reading.written
        )

    def _may_be_judged(self, model: nn.Module, loaded: Loaded) -> bool:
        """Return True if a step that begins now has all that later steps have.

        Before the optimizer's first step its state is missing, so a correction would be too small, and one
        of few would be used up.
        """
        profile = loaded.profile
        return (
            profile is None
            or self._written(model) != self._written_at_first
            or self._planning.state_exists(model, profile)
        )

    def _written(self, model: nn.Module) -> int:
        """Rises with every step of the optimizer; one that is not known has to count what it writes."""
        versions = sum(version_counter(p) for p in parameters_of(model) if p.requires_grad)
        return versions + self._optimizers.steps

    def _abandon(self) -> None:
        """The step that is running will not end."""
        self._reading = None
        self._forward.end()

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


def applied(model: nn.Module) -> Applied:
    """What `apply` did to `model`.

    Raises:
        NotApplied: nothing.
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"applied takes the nn.Module that was planned, got {type(model).__name__}")
    try:
        return _applied[model]
    except KeyError:
        raise NotApplied(type(model).__name__) from None


def check_not_compiled(model: nn.Module, how: str = "compile its blocks instead") -> None:
    """Refuse a model that torch.compile was called on.

    Args:
        how: what to do instead.

    Raises:
        CompiledModel.
    """
    if is_compiled(model):
        name = type(getattr(model, "_orig_mod", model)).__name__
        raise CompiledModel(f"torch.compile({name})" if is_optimized(model) else f"{name}.compile()", how)


def check_untouched(model: nn.Module) -> None:
    """Refuse a model that is planned already, with others in it or as a part of one, or checkpoints itself,
    or is compiled as a whole.

    Raises:
        AlreadyApplied, CheckpointingActive, CompiledModel.
    """
    check_not_compiled(model)
    for whole in list(_applied):
        for path, module in whole.named_modules():
            if module is model and path:
                raise AlreadyApplied(f"{type(whole).__name__}, of which this is {path},")
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
