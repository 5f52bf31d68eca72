"""From a batch to a policy: profile the step on it, and plan the profile within the budget.

The planner of this process makes the plan, or a planning service if there is one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ac_client.compiled.policy_file import PolicyFile
from ac_client.planning.batch_shape import Key, ModelCall
from ac_client.planning.device_share import Part, best_share, with_share
from ac_client.planning.facts.host_budget import HostBudget
from ac_client.planning.facts.models_on_device import ModelOnDevice
from ac_client.planning.facts.optimizer_steps import ModelOptimizers
from ac_client.planning.loaded_policy import (
    LoadedPolicy,
    PlannedBucket,
    ProfiledStep,
    fragments_of,
    skipped_modules,
)
from ac_client.planning.options import ApplyOptions
from ac_client.planning.ranks import others_wait
from ac_client.planning.trigger import Form, PlannedFor, Present, of_others
from ac_client.planning.warn_once import WarnOnce
from ac_client.service_client.errors import ServiceUnavailable
from ac_client.service_client.policy_requests import request_policy
from autoac.planner import (
    InfeasibleBudget,
    Plan,
    PlannerError,
    Policy,
    Profile,
    Progress,
    SolverOutOfTime,
    as_planned,
)
from autoac.planner import plan_with_host as plan_profile
from autoac.planner.formats.policy_set import Shape
from autoac.planner.plan import DEFAULT_WORK_LIMIT, FLOOR_SHARE
from autoac.planner.problem.graph import SaveSet
from autoac.planner.problem.microbatch import microbatch_of
from autoac.planner.units import format_bytes
from autoac.profiler import Loop, ProfilerBusy, device_of, observe
from autoac.profiler.model_device import device_of_step
from autoac.profiler.observed_step import ObservedStep, is_recorded_elsewhere, recorded_step
from autoac.profiler.static_memory import ONLY_PRESENT_STATE, OptimizerBytes
from autoac.tape.checkpoints.own_checkpoints import UNPLANNED
from autoac.tape.distributed.fsdp import unreduced_nbytes
from autoac.tape.runtime.saved_tensor_hooks import enter_saved_tensor_hooks, is_in_checkpoint
from autoac.tape.torch_facts.streams import is_capturing

log = logging.getLogger("ac_client")

MOST_TRIES = 3  # to leave room for a plan's fragments
MOST_DIVISIONS = 4  # of a device for one of its models
MOST_MISSED = 2  # steps that are observed in vain, since another thread calls backward
OTHER_THREAD = (
    "another thread than that of its forward calls backward, whose memory torch.profiler does not see then. "
    "Call both on one thread, or plan before with ac_client.applied(model).plan_for(...)"
)
NO_PLAN = InfeasibleBudget, SolverOutOfTime
WAIT_STEPS, WAIT_S = 20, 2.0  # a plan takes the CPU time of so many steps, or so many seconds if more
NEAR = 0.005  # of the step: a plan proven so close to the fastest is good enough for a training loop
FIRST_NOTICE_S, NEXT_NOTICE_S = 2.0, 10.0


def spare_bytes(reserved: int) -> int:
    """Return what a plan leaves of a budget for reserved bytes, for what a replay misses."""
    return min(60 << 20, reserved // 8) + reserved // 200


class PlanNotice:
    """Warn that a training step waits for its plan: after two seconds, and then every ten."""

    def __init__(self, what: str, brief: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock, self.brief = what, clock, brief
        self._began, self._next_s, self.most_s = clock(), FIRST_NOTICE_S, 0.0

    def __call__(self, now: Progress) -> None:
        waited_s = self._clock() - self._began
        if waited_s >= self._next_s:
            self._next_s = waited_s + NEXT_NOTICE_S
            gap = "no plan yet" if math.isinf(now.gap) else f"gap of the best plan {now.gap:.1%}"
            left_s = max(self.most_s - waited_s, 1)
            log.warning("%s: %s, at most about %.0f s of CPU time more", self._what, gap, left_s)


def waiting_work(profile: Profile) -> float:
    """Return the units of work for a plan that a training step waits for: NOTE [ Work ] in highs.py."""
    step_us = sum(profile.ops.runtime_us) + sum(profile.backward.runtime_us)
    return min(max(WAIT_S, WAIT_STEPS * step_us / 1e6), DEFAULT_WORK_LIMIT)


def plan(profile: Profile, *, progress: PlanNotice, **terms: Any) -> Plan:
    """Plan with the work of a few steps, and where that finds no plan, with as much as for `autoac plan`.

    If `progress` is brief, plan with a part of this work: a search that fails takes `FLOOR_SHARE` times that.
    """
    work = waiting_work(profile) / (FLOOR_SHARE if progress.brief else 1)
    progress.most_s = work * (1 + FLOOR_SHARE)
    try:
        return plan_profile(profile, work_limit=work, step_gap=NEAR, progress=progress, **terms)
    except SolverOutOfTime:
        if progress.brief:
            raise
        log.warning("no plan was found in the CPU time of %d steps: the search goes on", WAIT_STEPS)
        progress.most_s += DEFAULT_WORK_LIMIT
        return plan_profile(profile, progress=progress, **terms)


_beginning = threading.RLock()  # held while a step begins to be recorded: one at a time


class AnotherIsObserved(ProfilerBusy):
    """A step of another model is observed now."""


class InCheckpoint(ProfilerBusy):
    """The forward that begins is inside of one of torch's checkpoints."""


# Limit, extra static bytes, all ranks carry it out, share of the device, whether the search is brief.
_Terms = tuple[int, int, bool, float, bool]
PlanObserved = Callable[[Profile, ModelCall, "Observation"], PlannedBucket]
"""Plans an observed step: from its profile, and the call of the step that begins."""


@dataclass(slots=True)
class Observation:
    """An observed step whose profile will plan the batches of a shape."""

    step: ObservedStep
    shape: Shape  # of its first forward
    key: Key  # the same
    # Plans the profile when the next step begins; None: as one of a new shape of batch.
    then: PlanObserved | None = None
    meets: bool = False  # the ranks, when the next step begins
    state_nbytes: int = 0  # of the optimizers, as the step began
    batch: Sequence[weakref.ref[Tensor]] = ()  # of its first forward
    following: list[Shape] = field(default_factory=list)  # of its other forwards

    def group_of(self, profile: Profile) -> tuple[Shape, ...]:
        """Return the shapes of the forwards after the first one; () if `profile` is of one of them."""
        return tuple(self.following) if forwards_of(profile) > len(self.following) else ()

    @property
    def runs_elsewhere(self) -> bool:
        """Return True while the step runs on another thread."""
        return threading.get_ident() != self.step.thread and (self.step.recording or self.step.in_forward)


class BatchPlanner:
    """Profiles the steps of one model on its batches, plans them within the budget, and makes their buckets.

    Attributes:
        options: as passed to `apply`.
        host: what plans may use of the host's memory.
        on_device: the models on the device.
        lock: held while this model is planned; a forward on another thread waits for the plan.
        name: of the model, in messages.
        called: paths of the modules that were called since the last profile began.
        watch_calls: returns the function that has the calls of a model's modules noted.
        frees_gradients: the library frees gradients between forward and backward.
        observation: the step that is observed now, or whose profile is not planned yet.
        needs_checkpoints: the model was found to need its checkpoints: NOTE [ Needed checkpoints ].
        missed: steps without a profile, since another thread called their backward.
        warn_once: warns for the model.
    """

    def __init__(
        self, name: str, options: ApplyOptions, optimizers: ModelOptimizers, on_device: ModelOnDevice
    ) -> None:
        self.options = options
        self.host = HostBudget(name, options)
        self.lock = threading.RLock()
        self.name = name
        self.called: set[str] = set()
        self.watch_calls: Callable[[], Callable[[nn.Module], None] | None] = lambda: None
        self.frees_gradients = False
        self.warn_once = WarnOnce(name)
        self._optimizers = optimizers
        self.on_device = on_device
        on_device.planner = weakref.ref(self)
        self._thread = threading.local()
        self._dropped_nbytes = 0  # of the batch of the last profile, before the optimizer steps
        # The latest plan made here, with profile and terms: `limit_of` tries what `plan` then takes.
        self._latest: tuple[Profile, Any, tuple[Policy, Plan]] | None = None
        self.observation: Observation | None = None
        self.needs_checkpoints = False
        self.missed = 0
        self._divided = 0  # how often the device was to be divided for this model

    @property
    def profiling(self) -> bool:
        """Return True if the forward that runs on this thread is only profiled."""
        return getattr(self._thread, "profiling", False)

    def profile(self, call: ModelCall, forwards: int) -> Profile:
        """Run the step of `call` now, for real, without the optimizer, and return its profile.

        Args:
            call: of the model, on the batch.
            forwards: before its one backward.

        Raises:
            ProfilerError: the step cannot be profiled.
        """
        _check_idle()
        log.info("%s: profiling one step", self.name)
        self._dropped_nbytes = 0
        self._thread.profiling = True
        self._follow_calls(call.model)
        try:
            profile = observe(
                call.model,
                call.args,
                call.kwargs,
                loop=Loop(forwards),
                take_over_checkpoints=self.options.constraints.take_over_checkpoints,
            )
            return self._completed(profile, call)
        finally:
            self._thread.profiling = False
            if device_of(call.model).type == "cuda":
                torch.cuda.empty_cache()  # the profile's segments would get holes in the first steps

    def _completed(self, profile: Profile, call: ModelCall) -> Profile:
        """Return `profile` with what optimizers and the link add to it. Measure what others hold."""
        self.on_device.measure_uncounted(call.args, call.kwargs, self.on_device.kept_nbytes(call, profile))
        self.on_device.inputs = profile.static.inputs
        profile = self.on_device.optimizers_need(self._dropped_nbytes).counted_in(profile)
        for message in unplanned_in(profile):
            self.warn_once(message, message)
        for note in profile.notes:
            if ONLY_PRESENT_STATE in note and not self._optimizers.steps:
                self.warn_once(
                    "state",
                    f"{note} until it has stepped, so the first steps may go over the budget. Leave "
                    "Constraints(headroom_bytes=...) for the state that its first step makes",
                )
        if (link := self.host.link(device_of(call.model, call.args, call.kwargs))) is not None:
            profile = profile.model_copy(update={"link": link})
        return profile

    def _follow_calls(self, model: nn.Module) -> None:
        self.called.clear()
        if (watch := self.watch_calls()) is not None:
            watch(model)

    @property
    def observed_here(self) -> ObservedStep | None:
        """Return the step whose forward runs on this thread, if it is observed."""
        observation = self.observation
        if observation is None or not observation.step.in_forward:
            return None
        return observation.step if observation.step.thread == threading.get_ident() else None

    def observe(
        self,
        call: ModelCall,
        key: Key,
        then: PlanObserved | None = None,
        *,
        meets: bool = False,
        recorded: bool = True,
    ) -> None:
        """Run the forward of `call`, which begins, as the first one of a step without a plan.

        Args:
            call: of the model, on the batch.
            key: of the batch.
            then: plans the profile of the step; None: it is planned as one of a new shape of batch.
            meets: the ranks meet when the next step begins.
            recorded: False while torch.profiler runs: the step has no profile.

        Raises:
            ProfilerBusy: torch.profiler runs on this thread, a CUDA graph is being captured, another thread
                calls backward, or torch's checkpoint runs the forward.
            CannotProfile: the model or the batch is on meta or on several devices, or has lazy layers.
        """
        if is_in_checkpoint():
            raise InCheckpoint(
                "a checkpoint around it discards what its forward saves, and runs it in backward again. It "
                "runs without a plan. Call it outside of checkpoints: the plan recomputes what is needed"
            )
        device = device_of_step(call.model, call.args, call.kwargs)
        with _beginning:
            if recorded:
                _check_idle()
                if self.missed >= MOST_MISSED:
                    raise ProfilerBusy(OTHER_THREAD)
                if recorded_step() is not None or is_recorded_elsewhere():
                    raise AnotherIsObserved("a step of another model is observed now")
                self.on_device.forget_peaks()
            self._follow_calls(call.model)
            step = ObservedStep(
                call.model,
                call.args,
                call.kwargs,
                device,
                leave_checkpoints=not self.options.constraints.take_over_checkpoints,
                needs_checkpoints=self.needs_checkpoints,
            )
            state = self._optimizers.state_nbytes(device)
            step.begin_forward(recorded=recorded)
            if recorded:
                log.info("%s: observing one step", self.name)
        batch = [*map(weakref.ref, call.tensors)]
        self.observation = Observation(step, call.shape, key, then, meets, state, batch)

    def observed(self, call: ModelCall, observation: Observation) -> Profile:
        """Return the profile of an observed step that is over; `call` is the one that begins.

        It is of one forward if each of several has a backward of its own.

        Raises:
            ProfilerError: the step has none.
        """
        self._dropped_nbytes = observation.step.dropped_nbytes
        profile = self._completed(observation.step.profile(call.model), call)
        profile = microbatch_of(profile, counted=unreduced_nbytes(call.model))
        budget, peak = self.options.budget_bytes, observation.step.peak_nbytes + observation.state_nbytes
        peak += self.on_device.others_nbytes()
        if budget is not None and peak > budget:
            self.warn_once(
                "observed",
                f"the step before this one was observed, without a plan, and took {format_bytes(peak)}, "
                f"{format_bytes(peak - budget)} over the budget of {format_bytes(budget)}. Steps from now on "
                "run under a plan, if one fits. To observe with less memory, train on a smaller batch first",
            )
        if device_of(call.model).type == "cuda":
            torch.cuda.empty_cache()  # its segments would get holes in the first planned steps
        return profile

    def terms(self, call: ModelCall, profile: Profile) -> PlannedFor:
        """Return the terms of the first plan of a step, without its limit.

        A library may be known to free gradients in the step. Those of a pipeline's first microbatch stay.
        """
        frees = self.frees_gradients and not profile.static.gradients
        counted = profile.static.gradients or unreduced_nbytes(call.model)
        exist = frees or (self.on_device.scheduled and not counted)
        present = Present(exist, frees, optimizers_in(profile), 0, self.on_device.kept_nbytes(call, profile))
        return PlannedFor(0, form=form_of(profile, Form()), present=present)

    def limit_of(self, profile: Profile) -> int:
        """Return the most bytes that a planned peak of this step may have.

        A budget for reserved bytes has to hold the fragments of the plan, too, and they depend on the plan.
        So this plans for the whole budget first. Then it takes off the fragments of the plan before, until a
        plan fits together with its own.

        Raises:
            PlannerError, RemoteError: as `plan_within`, if no plan at all was found.
        """
        if self.options.constraints.budget_of == "allocated":
            return self.options.limit
        room = self.options.limit - spare_bytes(self.options.limit)
        others, limit = self.on_device.others_nbytes(), room
        for _ in range(MOST_TRIES):
            _, plan, infeasible = self.plan_or_tightest(profile, limit, others)
            fragments = fragments_of(plan) or 0
            if infeasible is None and plan.peak + fragments <= room:
                break
            limit = max(1, room - fragments)
        return limit

    def plan_within(
        self,
        profile: Profile,
        limit: int,
        extra_static: int = 0,
        start: SaveSet | None = None,
        *,
        together: bool = False,
    ) -> tuple[Policy, Plan]:
        """Plan `profile` for a peak of at most `limit` bytes, by the service if there is one.

        Args:
            extra_static: static bytes that are not in the profile.
            start: a save set that may fit already.
            together: all ranks will carry out this plan, over the same ops.

        Raises:
            PlannerError: no plan was found, or the service's is of other ops.
            ServiceUnavailable: the service is away, and is required.
            ServiceRefused: the service refused the request.
        """
        terms = limit, extra_static, together or not others_wait(), self.on_device.share, False
        made = self._plan_within(profile, terms, start)
        if self.host.pins(made[0], self.on_device.device()):
            return made
        return self._plan_within(profile, terms, start)

    def _plan_within(
        self, profile: Profile, terms: _Terms, start: SaveSet | None = None
    ) -> tuple[Policy, Plan]:
        limit, extra_static, together, share, brief = terms
        constraints = self.host.added_to(self.options.constraints)
        latest, key = self._latest, (terms, constraints)
        if latest is not None and latest[0] == profile and latest[1] == key:
            return latest[2]
        what = f"{self.name}: planning {len(profile.ops)} ops for {format_bytes(limit)}"
        log.info(what)
        self.on_device.forget_peaks()
        service, budget, step = self.options.service, limit + constraints.headroom_bytes, profile
        if share < 1:
            profile = with_share(step, share, limit - extra_static - constraints.extra_static_bytes)
        if extra_static:
            total = constraints.extra_static_bytes + extra_static
            constraints = constraints.model_copy(update={"extra_static_bytes": total})
        if not constraints.save_collectives and not together:
            constraints = constraints.model_copy(update={"save_collectives": True})
            self.warn_once(
                "collectives",
                "a plan saves collectives in spite of save_collectives=False: this rank makes it alone, or "
                "other ranks run other ops or shapes. Ranks that recompute them differently would wait for "
                "each other forever",
            )
        if service is not None:
            try:
                policy = request_policy(service, profile, budget, constraints=constraints)
            except ServiceUnavailable as error:
                self.warn_once("service", f"planning in-process, because {error}")
            else:
                return policy, as_planned(policy, step)
        stored = PolicyFile(profile, (budget, constraints))
        if (found := stored.read()) is not None:
            return found, as_planned(found, step)
        notice, starts = PlanNotice(what, brief=brief), () if start is None else (start,)
        made = plan(profile, budget_bytes=budget, constraints=constraints, start=starts, progress=notice)
        if not brief:
            stored.write(made.policy())
        if share < 1:  # what the others' share takes is none of this step's
            made = replace(as_planned(made.policy(), step), bound_us=made.bound_us, gained_us=made.gained_us)
        self._latest = step, key, (made.policy(), made)
        return self._latest[2]

    def plan_or_tightest(
        self, profile: Profile, limit: int, extra_static: int = 0
    ) -> tuple[Policy, Plan, PlannerError | None]:
        """Plan `profile` for a peak of at most `limit` bytes, or as tightly as possible if no plan keeps it.

        Args:
            extra_static: static bytes that are not in the profile.

        Returns:
            Policy, plan, and why the limit is not kept; None if it is.

        Raises:
            PlannerError, RemoteError: as `plan_within`, if no plan at all was found.
        """
        try:
            return *self.plan_within(profile, limit, extra_static), None
        except NO_PLAN as error:
            if (divided := self._divide_device(profile, limit, extra_static)) is not None:
                return *self.plan_within(profile, limit, divided), None
            if error.smallest_found is None:
                raise
            start = error.save_set if isinstance(error, InfeasibleBudget) else None
            tightest = self.plan_within(profile, error.smallest_found, extra_static, start)
            error.__context__ = None  # its frames, and those of the traceback, hold the running forward
            return *tightest, error.with_traceback(None)

    def _divide_device(self, profile: Profile, limit: int, extra_static: int) -> int | None:
        """Divide the device such that this profile and the plans of the neighbors fit, and recompute least.

        Returns:
            `extra_static` from then on; None if nothing has changed.
        """
        device, waiting = self.on_device, self.on_device.waiting_nbytes()
        if not device.waiting_nbytes(alone=True) or self._divided >= MOST_DIVISIONS:
            return None
        self._divided += 1
        parts = {device: Part(self._plan_for_share, profile, limit, max(0, extra_static - waiting))}
        for other in device.neighbors():
            planner, bucket = other.planner(), other.bucket
            if planner and bucket and bucket.profile and not (terms := bucket.planned_for).stays:
                static = bucket.step.rank_nbytes + other.others_nbytes() - other.waiting_nbytes()
                within = terms.limit - terms.correction.total
                counted = terms.counted_in(bucket.profile)
                parts[other] = Part(planner._plan_for_share, counted, within, static)
        if (best := best_share(parts)) is None:
            return None
        for model in parts:
            model.share, model.allowed_nbytes = best[0], best[1][model]
        if any(model.in_flight() for model in parts if model is not device):
            self.warn_once(
                "divided",
                "forwards of another planned model wait, and leave this one too little room: this step "
                f"may go over the limit of {format_bytes(self.options.limit)}. Both are planned again",
            )
        return extra_static - waiting + device.waiting_nbytes()

    def _plan_for_share(self, profile: Profile, limit: int, extra_static: int, share: float) -> Plan:
        return self._plan_within(profile, (limit, extra_static, not others_wait(), share, True))[1]

    def warn_over_budget(self, needs: int, reason: str) -> None:
        """Warn that no plan keeps the budget."""
        budget, least = format_bytes(self.options.budget_bytes or 0), format_bytes(needs)
        words = f"the budget of {budget} cannot be kept, because the step needs at least {least} ({reason})"
        log.warning("%s: %s. It runs under the plan with the smallest peak that was found", self.name, words)

    def plan(
        self, call: ModelCall, profile: Profile, observation: Observation | None = None, *, running: str = ""
    ) -> PlannedBucket:
        """Plan a step that was profiled.

        Args:
            call: of the model, on the batch.
            profile: of the step.
            observation: of the step, if the loop ran it.
            running: why a loop that runs needs another plan, in words: the tightest one, if none fits.

        Raises:
            PlannerError, RemoteError: the step could not be planned.
        """
        step, terms = profile, self.terms(call, profile)
        profile = terms.counted_in(profile)
        others, limit = self.on_device.others_nbytes(), self.limit_of(profile)
        try:
            made = self.plan_within(profile, limit, others)
        except NO_PLAN as error:
            if self._divide_device(profile, limit, others) is not None:
                step = self.on_device.optimizers_need(self._dropped_nbytes).counted_in(step)
                return self.plan(call, step, observation, running=running)
            if self._optimizers.foresees:  # state that does not exist yet may come for each step alone
                self._optimizers.foresees = False
                without = self.on_device.optimizers_need(self._dropped_nbytes)
                if without.state < profile.static.optimizer_state:
                    with suppress(*NO_PLAN):
                        return self.plan(call, without.counted_in(step), observation, running=running)
            _explain(error, profile, terms)
            smallest = error.smallest_found
            fits_alone = smallest is not None and smallest - others <= self.options.limit
            if not (running or fits_alone or self.on_device.neighbors()):
                self.on_device.name_others(error)
                raise
            policy, plan, infeasible = self.plan_or_tightest(profile, limit, others)
            made, needs = (policy, plan), policy.predicted.peak_bytes
            if infeasible is not None and needs > self.options.limit:
                reasons = [running] if running else []
                if others:
                    reasons.append(of_others(others))
                self.warn_over_budget(needs, ", and ".join(reasons))
        present = replace(terms.present, others_nbytes=others, share=self.on_device.share)
        terms = replace(terms, limit=limit, present=present)
        profiled = self.profiled_step(call, step, observation)
        return PlannedBucket(profiled.shape, LoadedPolicy(*made), profiled, terms)

    def profiled_step(
        self, call: ModelCall, profile: Profile, observation: Observation | None, rank_nbytes: int = 0
    ) -> ProfiledStep:
        """Return the step that was profiled.

        Args:
            call: of the model, on the batch of this step, or of the one after an observed step.
            profile: of the step.
            observation: of the step, if the loop ran it.
            rank_nbytes: held by the neediest rank beyond what the profile counts.
        """
        skipped = skipped_modules(call.model, self.called)
        shape, following = call.shape, tuple[Shape, ...]()
        if observation is not None:
            shape, following = observation.shape, observation.group_of(profile)
        return ProfiledStep(shape, following, profile, rank_nbytes, skipped, self._dropped_nbytes)


def optimizers_in(profile: Profile) -> OptimizerBytes:
    """Return what optimizers need, as a profile has it."""
    return OptimizerBytes(profile.static.optimizer_state, profile.optimizer_workspace_nbytes)


def forwards_of(profile: Profile) -> int:
    """Return how many forwards ran before the one backward of a profile."""
    return len(profile.forward_ends) or 1


def form_of(profile: Profile, form: Form) -> Form:
    """Return `form` with as many forwards and passes of backward as the profiled step had."""
    return replace(form, forwards=forwards_of(profile), passes=len(profile.pass_ends) + 1)


def _explain(error: PlannerError, profile: Profile, terms: PlannedFor) -> None:
    """Say what the loop, or the model, could change so that a plan fits."""
    if kept := terms.present.kept_nbytes:
        error.add_note(
            f"autoac: names of the last step hold {format_bytes(kept)} as the forward begins. A loop that "
            "drops them before, as in del output, needs less"
        )
    for message in unplanned_in(profile):
        error.add_note(f"autoac: {message}")


def unplanned_in(profile: Profile) -> list[str]:
    """Return the messages on parts of the model that decide themselves what autograd holds."""
    return [note for note in profile.notes if note.startswith(UNPLANNED)]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def _check_idle() -> None:
    """Raise what forbids a profile now, before anything has run."""
    if is_capturing():
        raise ProfilerBusy("a CUDA graph is being captured, and a profile synchronizes the device")
    check_hooks()


def check_hooks() -> None:
    """Raise what forbids saved-tensor hooks, before anything has run."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one)
    enter_saved_tensor_hooks(hooks)
    hooks.__exit__()
