"""Plan the steps of one model: choose the policy of each batch, and carry out what next_action.py says."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ac_client.errors import OtherRanks
from ac_client.planning.batch_shape import ModelCall, key_of
from ac_client.planning.choose_policy import PolicyChooser
from ac_client.planning.facts.forwards_in_flight import BackwardFacts
from ac_client.planning.facts.step_watch import StepWatch
from ac_client.planning.loaded_policy import (
    LoadedPolicy,
    PlannedBucket,
    ProfiledStep,
    corrected,
    skipped_modules,
)
from ac_client.planning.next_action import (
    GRADIENTS,
    MOST_TRIES,
    Action,
    PlanAgain,
    StepFacts,
    next_action,
)
from ac_client.planning.options import ApplyOptions
from ac_client.planning.plan_batch import (
    BatchPlanner,
    Observation,
    first_line,
    for_terms,
    forwards_of,
    optimizers_in,
    passes_of,
)
from ac_client.planning.policy_store import PolicyStore
from ac_client.service_client.errors import RemoteError
from autoac.planner import PlannerError, Policy, PolicySet, Profile
from autoac.planner.units import format_bytes
from autoac.profiler import ProfilerBusy, device_of
from autoac.profiler.observed_step import BackwardListener, ObservedStep, recorded_step
from autoac.profiler.static_memory import static_bytes
from autoac.tape.distributed.fsdp import layout_of
from autoac.tape.errors import CannotCapture
from autoac.tape.runtime.split_backward import UNCOUNTED, current_split
from autoac.tape.torch_facts.streams import is_capturing

log = logging.getLogger("ac_client")

_LOUD = ("over the limit", "fragments", "stalls")  # measured


class ModelPlanning:
    """Plans the steps of one model.

    Args:
        optimizer, policy: as passed to `apply`.
        on_failure: returns the function to call before an error that leaves the model without any plan.

    Attributes:
        options: as passed to `apply`.
        store: the policies.
        watch: the facts about the steps.
        planner: profiles batches and plans them.
        chooser: finds or makes the policy of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ApplyOptions,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        policy: Policy | PolicySet | None,
        on_failure: Callable[[], Callable[[], None] | None],
    ) -> None:
        self.options = options
        self.store = PolicyStore(model, options, policy)
        self.watch = StepWatch(model, options, optimizer)
        self._name = type(model).__name__
        self.planner = BatchPlanner(self._name, options, self.watch.optimizers, self.watch.on_device)
        self.chooser = PolicyChooser(
            model, self.store, self.planner, given=policy is not None, on_failure=on_failure
        )
        self.watch.on_device.settle = weakref.WeakMethod(self.chooser.settle_ended)

    def policy_for(self, call: ModelCall, waiting: int) -> PlannedBucket | None:
        """Return the bucket that runs this batch, planned if necessary; None if the batch runs unplanned.

        Args:
            call: of the model, on the batch.
            waiting: how many forwards wait for their backward.

        Raises:
            ShapeNotPlanned: strict, and no bucket covers the batch.
            PlannerError, RemoteError, ProfilerError: planning failed.
        """
        self.watch.on_device.note_moment(forward=True)
        captures = is_capturing()
        if captures and self.chooser.plans_first:
            raise CannotCapture(self._name, "its plan is not made yet")
        bucket = self.chooser.for_batch(call, waiting)
        if bucket is None:
            return None
        bucket.forwards += 1
        planned, buckets = bucket.planned_for, self.store.buckets
        looks = not planned.gradients or planned.frees_gradients is not False
        gradients = looks and self.store.parameters.gradients_exist()
        facts = self.watch.before_forward(call, bucket, buckets, waiting, gradients=gradients)
        while isinstance(action := self._next(bucket, facts), PlanAgain):
            facts = facts._replace(can_profile=facts.can_profile and not action.profiles)
            if (loop := action.terms.loop) != bucket.planned_for.loop:
                facts, bucket.observed, buckets.forwards = facts._replace(loop=loop), loop, loop.forwards
            # Any other batch waits for one like the batch that was profiled.
            if action.profiles and call.shape != bucket.step.shape:
                continue
            if captures and action.profiles and not waiting and _form_of(action) not in bucket.observed_for:
                raise CannotCapture(
                    self._name, f"a plan is to be made for another form of step: {action.reason}"
                )
            if action.profiles:
                if _form_of(action) in bucket.observed_for:
                    self._warn_of_turns(bucket, action, waiting)
                elif not waiting and self._observe_again(bucket, action, call):
                    return None
                continue  # more forwards in flight are observed from the next step's first one on
            self._plan_again(bucket, action)
            on_device = self.watch.on_device  # which may have been divided
            facts = facts._replace(share=on_device.share, others_nbytes=on_device.others_nbytes())
        if bucket.profile is None and not bucket.statistics.steps and not self._fits_here(call, bucket):
            self.store.discard(bucket)
            return self.policy_for(call, waiting)
        self.watch.peaks.start(call.model)
        self.store.current = bucket
        return bucket

    def settle(self, model: nn.Module, *, raises: bool = False) -> None:
        """Plan the observed step now, if it is over; raise what goes wrong if `raises`."""
        self.chooser.settle(model, raises=raises)
        if self.store.current is not None and self.store.current.profile is not None:
            self.watch.peaks.start(model)

    def _fits_here(self, call: ModelCall, bucket: PlannedBucket) -> bool:
        """Return False if the policy, which was planned elsewhere, is to be planned again for this model.

        It is if the model holds more than the policy counts, and there is a budget. Without a budget, the
        policy stays, with a warning if the peak goes over its limit.

        Raises:
            OtherRanks: the peak goes over the limit, the policy is for other ranks, and there is no budget.
        """
        planned, counted = bucket.planned_for, bucket.policy.predicted.static_bytes
        device = device_of(call.model, call.args, call.kwargs)
        state = self.watch.optimizers.needs().state
        static = static_bytes(call.model, call.args, call.kwargs, state, device).total
        peak = planned.peak + static - counted
        made_for, here = bucket.policy.tools.get("ranks", ""), layout_of(call.model)
        is_other, has_budget = made_for not in ("", here), self.options.budget_bytes is not None
        over = peak > planned.limit
        if static <= counted or not (over or (is_other and has_budget)):
            return True
        if is_other and not has_budget:
            raise OtherRanks(made_for, here, peak, planned.limit)
        self.planner.warn_once(
            "static",
            f"parameters, gradients, optimizer state and batch take {format_bytes(static)}, and the "
            f"policy was planned for {format_bytes(counted)}, as of more ranks or of another optimizer "
            f"or batch: the peak may be {format_bytes(peak)}, where the limit is "
            f"{format_bytes(planned.limit)}. "
            + ("It is planned again" if has_budget else "Pass budget_gb=... to have it planned again"),
        )
        return not has_budget

    def forward_ended(self, bucket: PlannedBucket, out: Any) -> None:
        """Watch the forward that returned `out`, until its backward begins."""
        if bucket.ran_skipped:
            self._next(bucket, StepFacts(ran_skipped=bucket.ran_skipped, can_profile=False))
        self.watch.after_forward(out, partial(self._backward_begins, bucket, bucket.loaded))

    def observed_forward_ended(self, step: ObservedStep, out: Any) -> None:
        """Follow a forward of an observed step, which returned `out`, until its backward begins."""
        step.end_forward(out)
        if step.needs_checkpoints:
            self.planner.needs_checkpoints = True  # the next step is observed in place of this one
        else:
            self.watch.after_forward(out, BackwardListener(step))

    def optimizer_stepped(self) -> None:
        """End an observed step: what follows is not part of it."""
        observation = self.planner.observation
        if observation is not None and observation.step.has_backward and not observation.runs_elsewhere:
            observation.step.end()

    def end_step(self) -> None:
        """Compare the step that is over with its prediction."""
        if (judged := self.watch.peaks.end_step()) is not None:
            self.judge(*judged)

    def judge(self, bucket: PlannedBucket, facts: StepFacts) -> None:
        """Plan `bucket` again if its steps went over the limit, or waited for copies."""
        action = self._next(bucket, facts)
        bucket.statistics.corrections += isinstance(action, PlanAgain)
        if isinstance(action, PlanAgain):
            self._plan_again(bucket, action)
            if action.row == "fragments" and not is_capturing():
                torch.cuda.empty_cache()  # of the plan before

    def _next(self, bucket: PlannedBucket, facts: StepFacts) -> Action:
        """Return the next action, after its warning if it has one."""
        action = next_action(bucket.planned_for, facts)
        bucket.warn(self._name, action)
        return action

    def _backward_begins(self, bucket: PlannedBucket, loaded: LoadedPolicy, backward: BackwardFacts) -> None:
        """Warn if the running step is not the planned one, and note the loop's form for the next plan."""
        if (step := recorded_step()) is not None:
            step.leave_out()  # until backward ends: it is of another model
        if bucket.loaded is not loaded:
            return
        if current_split() is not None and not bucket.planned_for.fits(1):
            self.planner.warn_once("split", UNCOUNTED)
        facts = self.watch.in_backward(bucket, backward, self.store.parameters.gradients_exist)
        planned = bucket.planned_for
        while isinstance(action := next_action(planned, facts), PlanAgain):
            bucket.warn(self._name, action)
            planned = action.terms
        bucket.warn(self._name, action)
        if planned is not bucket.planned_for:
            bucket.observed, bucket.outside_nbytes = planned.loop, planned.outside_nbytes
            found = bucket.planned_for.expects_gradients and planned.gradients
            if found and planned.peak > self.options.limit:
                self.planner.warn_over_budget(planned.peak, GRADIENTS)
            bucket.planned_for = replace(
                bucket.planned_for, gradients=planned.gradients, frees_gradients=planned.frees_gradients
            )

    def _observe_again(self, bucket: PlannedBucket, action: PlanAgain, call: ModelCall) -> bool:
        """Observe the step that begins in place of a profile for `action`; False: torch.profiler runs."""
        shape = call.shape

        def plan(found: Profile, following: ModelCall, observation: Observation) -> PlannedBucket:
            loop = replace(action.terms.loop, forwards=forwards_of(found), passes=passes_of(found))
            terms = replace(action.terms, loop=loop)
            found = found.with_dropped_outputs(loop.drops)
            again = replace(action, terms=terms)
            bucket.observed_for |= {_form_of(action), _form_of(again)}
            planned = bucket.planned_for.loop
            as_planned = (
                terms.loop == planned and found.waiting_microbatches < bucket.planned_for.microbatches
            )
            fewer = loop.forwards < planned.forwards or loop.passes < planned.passes
            if fewer or (action.row == "loop" and as_planned):
                return bucket  # the steps that have more forwards take turns with these
            group = ProfiledStep(shape, observation.group_of(found), found)
            self._plan_observed(bucket, again, following, group)
            return bucket

        try:
            self.planner.observe(call, key_of(call.args, call.kwargs), plan)
        except ProfilerBusy:
            return False
        return True

    def _warn_of_turns(self, bucket: PlannedBucket, action: PlanAgain, waiting: int) -> None:
        """Warn of steps of two forms that take turns, of which only one is planned for."""
        planned = bucket.planned_for
        limit = planned.limit
        if planned.peak + waiting * planned.forward_nbytes > limit:
            self.planner.warn_once(
                action.row,
                f"in some steps {action.reason}, and in others not. The plan is for the others, so these "
                f"steps may go over the limit of {format_bytes(limit)}",
            )

    def _plan_again(self, bucket: PlannedBucket, action: PlanAgain) -> None:
        """Plan `bucket` from the profile that it has, as `action` says."""
        if not action.terms.link_share:
            self.planner.host.stop(action.reason)
        with self._present_stays(bucket, action):
            self._load(bucket, bucket.step, action)

    def _plan_observed(
        self, bucket: PlannedBucket, action: PlanAgain, call: ModelCall, observed: ProfiledStep
    ) -> None:
        """Plan `bucket` from the profile of a step that was observed for `action`.

        If steps of two forms take turns, the plan of the one with more ops stays.

        Args:
            call: of the step after the one that was observed.
            observed: the step.
        """
        terms, present, found = action.terms, bucket.profile, observed.profile
        assert present is not None
        assert found is not None
        skipped = skipped_modules(call.model, self.planner.called)
        fewer = action.row == "other ops" and len(found.ops) <= len(present.ops)
        if fewer and (terms.tries == MOST_TRIES or skipped != bucket.step.skipped):
            bucket.planned_for = replace(bucket.planned_for, tries=MOST_TRIES)
            return
        terms = replace(terms, optimizers=optimizers_in(found))
        with self._present_stays(bucket, action):
            others = self.watch.on_device.others_nbytes()
            limit = self.planner.limit_of(for_terms(found, terms))
            action = replace(action, terms=replace(terms, others_nbytes=others, limit=limit))
            self._load(bucket, replace(observed, profile=found), action, call)

    @contextmanager
    def _present_stays(self, bucket: PlannedBucket, action: PlanAgain) -> Iterator[None]:
        """Plan inside. If no plan can be made, the present one stays, for the terms of `action`."""
        try:
            with self.planner.lock:
                yield
        except (PlannerError, RemoteError) as error:
            correction = replace(bucket.planned_for.correction, times=action.terms.correction.times)
            bucket.planned_for = replace(action.terms, correction=correction)  # once
            bucket.stale = action.reason
            log.warning(
                "%s: %s, and no plan could be made for that (%s). The present plan stays",
                self._name,
                action.reason,
                first_line(error),
            )

    def _load(
        self, bucket: PlannedBucket, step: ProfiledStep, action: PlanAgain, call: ModelCall | None = None
    ) -> None:
        """Load the plan of `step` for the terms of `action`, or the tightest plan if none fits.

        Raises:
            PlannerError, RemoteError: no plan was found; the bucket is as it was.
        """
        terms, correction = action.terms, action.terms.correction
        assert step.profile is not None
        limit = max(1, terms.limit - correction.total)
        within = for_terms(step.profile, terms), limit, step.rank_nbytes + terms.others_nbytes
        policy, plan, infeasible = self.planner.plan_or_tightest(*within)
        peak = policy.predicted.peak_bytes + correction.nbytes
        policy = policy.model_copy(update={"budget_bytes": self.options.budget_bytes})
        loaded = LoadedPolicy(corrected(policy, correction.nbytes, correction.total), plan)
        if call is not None:
            made = self.planner.profiled_step(call, step.profile)
            step = replace(made, shape=step.shape, following=step.following)
        if (share := self.watch.on_device.share) != terms.share:
            terms = replace(terms, share=share, others_nbytes=self.watch.on_device.others_nbytes())
        bucket.load(loaded, step, terms)
        if infeasible is not None and peak > self.options.limit and not terms.expects_gradients:
            bucket.warned.add(action.row)
            self.planner.warn_over_budget(peak, action.reason)
            return
        self._log_plan(bucket, action)

    def _log_plan(self, bucket: PlannedBucket, action: PlanAgain) -> None:
        policy, planned = bucket.policy, bucket.planned_for
        log.log(
            logging.WARNING if action.row in _LOUD else logging.INFO,
            "%s: planned again, since %s: %d of %d ops are recomputed, and the predicted peak is %s of %s",
            self._name,
            action.reason,
            policy.recomputed,
            len(policy.decisions),
            format_bytes(planned.peak),
            format_bytes(planned.limit),
        )


def _form_of(action: PlanAgain) -> tuple[object, ...]:
    """Return what tells the step that `action` needs a profile of from others of its bucket."""
    return action.row, action.terms.loop, action.terms.outside_nbytes, action.terms.tries
