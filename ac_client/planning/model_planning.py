"""Plan the steps of one model: choose the policy of each batch, and carry out what trigger.py says."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
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
from ac_client.planning.options import ApplyOptions
from ac_client.planning.plan_batch import BatchPlanner, Observation, first_line, form_of, optimizers_in
from ac_client.planning.policy_store import PolicyStore
from ac_client.planning.trigger import (
    GRADIENTS,
    MOST_CORRECTIONS,
    MOST_TRIES,
    Correction,
    Form,
    Measured,
    PlanAgain,
    Warned,
    backward_rule,
    form_rule,
    may_go_over,
    measured_rule,
    present_rule,
)
from ac_client.service_client.errors import RemoteError
from autoac.planner import PlannerError, Policy, PolicySet, Profile
from autoac.planner.units import format_bytes
from autoac.profiler import ProfilerBusy, device_of
from autoac.profiler.observed_step import BackwardListener, ObservedStep, recorded_step
from autoac.profiler.static_memory import static_bytes
from autoac.tape.distributed.fsdp import layout_of
from autoac.tape.errors import CannotCapture
from autoac.tape.runtime.cursor import OffPath
from autoac.tape.runtime.split_backward import UNCOUNTED, current_split
from autoac.tape.torch_facts.streams import is_capturing

log = logging.getLogger("ac_client")

LEFT = "the forward left its policy"


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
        self.watch.on_device.note_moment(call)
        captures = is_capturing()
        if captures and self.chooser.plans_first:
            raise CannotCapture(self._name, "its plan is not made yet")
        bucket = self.chooser.for_batch(call, waiting)
        if bucket is None:
            return None
        bucket.forwards += 1
        planned = bucket.planned_for
        alike = 0 if self.watch.on_device.scheduled else self.watch.waiting_for(bucket)
        form, warning = form_rule(planned, bucket.shown, alike, left=bucket.left)
        if warning is not None:
            bucket.warn(self._name, warning)
        if not planned.stays and form != planned.form:
            bucket.shown = replace(form, tries=planned.form.tries)
            if call.shape == bucket.step.shape and self._observes(bucket, form, call, waiting):
                return None
        looks = not planned.present.gradients or bucket.frees_gradients is not False
        gradients = looks and self.store.parameters.gradients_exist()
        present = self.watch.present(call, bucket, waiting, gradients=gradients)
        on_device = self.watch.on_device
        while not bucket.planned_for.stays:
            if (again := present_rule(bucket.planned_for, present)) is None:
                break
            self._plan_again(bucket, again)  # which may have divided the device
            others = on_device.others_nbytes()
            present = replace(present, share=on_device.share, others_nbytes=others)
        if bucket.profile is None and not bucket.statistics.steps and not self._fits_here(call, bucket):
            self.store.discard(bucket)
            return self.policy_for(call, waiting)
        self.watch.peaks.start(call.model)
        self.watch.on_device.bucket = bucket
        bucket.statistics.steps += 1
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

    def left_policy(self, off: OffPath, call: ModelCall | None) -> None:
        """Note that the forward that runs has left its policy, and warn.

        Args:
            off: where.
            call: of the model, whose forward runs.
        """
        if (bucket := self.store.current) is not None:
            bucket.stale = f"{LEFT}, {off}"
            if call is not None and call.shape == bucket.step.shape:
                bucket.leave()
            if bucket.planned_for.fits(1):
                return  # also if all is saved
        self.planner.warn_once(
            "left",
            f"it left its policy: {off}. Ops that the policy does not contain are saved, so this step may "
            "need more memory than was predicted",
        )

    def forward_ended(
        self, bucket: PlannedBucket, call: ModelCall, out: Any, *, left: bool, ran: Collection[str]
    ) -> None:
        """Watch the forward of `call`, which returned `out`, until its backward begins.

        Args:
            bucket: under which it ran.
            call: of the model.
            out: what it returned.
            left: it has left the policy.
            ran: modules that it has run, and that the profiled one had skipped.
        """
        if not left and bucket.stale.startswith(LEFT):
            bucket.stale = ""
        if ran:
            self._warn_of_skipped(bucket, ran)
        self.watch.in_flight.add(call.tensors, out, partial(self._backward_begins, bucket, bucket.loaded))

    def _warn_of_skipped(self, bucket: PlannedBucket, paths: Collection[str]) -> None:
        """Warn of modules that ran, and that the profiled forward skipped; the next step is observed."""
        bucket.leave()
        if not bucket.planned_for.fits(1):
            ran = sorted(paths, key=lambda path: (len(path), path))
            more = f" and {len(ran) - 3} more" if len(ran) > 3 else ""
            what = f"modules run that the profiled forward skipped ({', '.join(ran[:3])}{more}). They are "
            what += "decided like the nearest layer that it ran, or else saved"
            advice = "a first batch that runs all modules is planned best"
            bucket.warn(self._name, may_go_over(bucket.planned_for, "skipped", what, advice))

    def observed_forward_ended(self, step: ObservedStep, call: ModelCall, out: Any) -> None:
        """Follow a forward of an observed step, which returned `out`, until its backward begins."""
        step.end_forward(out)
        if step.needs_checkpoints:
            self.planner.needs_checkpoints = True  # the next step is observed in place of this one
        else:
            self.watch.in_flight.add(call.tensors, out, BackwardListener(step))

    def optimizer_stepped(self) -> None:
        """Read the counter, and end an observed step: what follows is not part of it."""
        self.watch.peaks.read()
        self.watch.on_device.note_step()
        observation = self.planner.observation
        if observation is not None and observation.step.has_backward and not observation.runs_elsewhere:
            observation.step.end()
            observation.step.note_dropped()

    def end_step(self) -> None:
        """Compare the step that is over with its prediction."""
        if (ended := self.watch.peaks.end_step()) is None:
            return
        bucket, measured = ended
        if measured.peak is not None:
            bucket.statistics.compared += 1
            bucket.statistics.fragments = measured.fragments
            measured = measured._replace(peak=max(measured.peak, bucket.statistics.peak or 0))
        self.judge(bucket, measured)

    def judge(self, bucket: PlannedBucket, measured: Measured) -> None:
        """Plan `bucket` again if its steps went over the limit, or waited for copies."""
        if measured.peak is not None:
            bucket.statistics.peak = measured.peak
        action = measured_rule(bucket.planned_for, measured)
        if isinstance(action, PlanAgain):
            bucket.statistics.corrections += 1
            self._plan_again(bucket, action, logging.WARNING)
            if not is_capturing():
                torch.cuda.empty_cache()  # of the plan before
        elif action is not None:
            bucket.warn(self._name, action)

    def _backward_begins(self, bucket: PlannedBucket, loaded: LoadedPolicy, backward: BackwardFacts) -> None:
        """Warn if the running step is not the planned one, and note the loop's form for the next plan."""
        if (step := recorded_step()) is not None:
            step.leave_out()  # until backward ends: it is of another model
        if bucket.loaded is not loaded:
            return
        if current_split() is not None and not bucket.planned_for.fits(1):
            self.planner.warn_once("split", UNCOUNTED)
        backward, gradients = self.watch.in_backward(bucket, backward, self.store.parameters.gradients_exist)
        planned, freed = bucket.planned_for, bucket.frees_gradients
        bucket.shown, warning = backward_rule(planned, bucket.shown, backward)
        if warning is not None:
            bucket.warn(self._name, warning)
        if gradients is not None and freed is not False:
            bucket.frees_gradients = not gradients  # once held, they count in all later plans
        if gradients and freed:
            what = f"gradients of {format_bytes(gradients)} are held in backward, and the plan is for a loop"
            advice = "call zero_grad() before the forward"
            bucket.warn(
                self._name, may_go_over(planned, "gradients", f"{what} that frees them before", advice)
            )
        elif gradients and freed is None and planned.peak > self.options.limit:
            self.planner.warn_over_budget(planned.peak, GRADIENTS)
        if (peak := self.watch.peaks.read()) > max(planned.limit, planned.peak):
            limit = format_bytes(planned.limit)
            text = f"this step took {format_bytes(peak)} until backward began, over the limit of {limit}"
            bucket.warn(self._name, Warned("until backward", text))

    def _observes(self, bucket: PlannedBucket, form: Form, call: ModelCall, waiting: int) -> bool:
        """Return True if the step that begins is observed, to plan `bucket` for another form of step.

        Of steps of two forms that take turns, only one is planned for.
        """
        planned = bucket.planned_for
        if form in bucket.observed_for:
            bucket.shown = planned.form
            if planned.peak + waiting * planned.forward_nbytes > planned.limit:
                self.planner.warn_once(
                    f"turns {form}",
                    f"some steps have another form ({form}), and others not. The plan is for the others, so "
                    f"these steps may go over the limit of {format_bytes(planned.limit)}",
                )
        elif not waiting:  # more forwards in flight are observed from the next step's first one on
            if is_capturing():
                raise CannotCapture(self._name, f"a plan is to be made for another form of step: {form}")
            try:
                key = key_of(call.args, call.kwargs)
                self.planner.observe(call, key, partial(self._plan_observed, bucket, form))
                return True
            except ProfilerBusy as busy:
                self.planner.warn_once(
                    "busy form",
                    f"steps have another form than the plan ({form}), and none can be observed now ({busy}): "
                    f"these steps may go over the limit of {format_bytes(planned.limit)}",
                )
        return False

    def _plan_observed(
        self, bucket: PlannedBucket, form: Form, found: Profile, call: ModelCall, observation: Observation
    ) -> PlannedBucket:
        """Plan `bucket` from the profile of a step that was observed for `form`, if it has that form.

        If steps of two forms take turns, the plan of the one with more ops, forwards or passes stays. So does
        a corrected plan, if the step does not show what the corrections are for.

        Args:
            found: the profile.
            call: of the step after the one that was observed.
            observation: of the step.
        """
        planned, present = bucket.planned_for, bucket.profile
        assert present is not None
        shown = form_of(found, form)
        bucket.observed_for |= {form, shown}
        bucket.shown = planned.form
        as_planned = shown == planned.form and found.waiting_microbatches < planned.microbatches
        if as_planned or shown.forwards < planned.form.forwards or shown.passes < planned.form.passes:
            return bucket
        if shown.tries > planned.form.tries and len(found.ops) <= len(present.ops):
            skipped = skipped_modules(call.model, self.planner.called)
            if shown.tries == MOST_TRIES or skipped != bucket.step.skipped:
                bucket.shown = replace(bucket.shown, tries=MOST_TRIES)
                bucket.planned_for = replace(planned, form=replace(planned.form, tries=MOST_TRIES))
                return bucket
        bucket.shown = shown
        if shown.over > planned.form.over and not bucket.takes_more(found, present):
            bucket.planned_for = replace(planned, form=shown)
            if planned.peak > self.options.limit:
                why = "steps take more than predicted, and an observed one does not show why"
                self.planner.warn_over_budget(planned.peak, why)
            return bucket
        held = replace(planned.present, optimizers=optimizers_in(found))
        terms = replace(
            planned, form=shown, present=held, correction=Correction(withheld=planned.correction.withheld)
        )
        again = PlanAgain(terms, f"a step had another form: {shown}")
        with self._present_stays(bucket, again):
            held = replace(held, others_nbytes=self.watch.on_device.others_nbytes())
            limit = self.planner.limit_of(terms.counted_in(found))
            again = again._replace(terms=replace(terms, present=held, limit=limit))
            self._load(bucket, self.planner.profiled_step(call, found, observation), again)
        return bucket

    def _plan_again(self, bucket: PlannedBucket, again: PlanAgain, level: int = logging.INFO) -> None:
        """Plan `bucket` from the profile that it has, for the terms of `again`."""
        if not again.terms.link_share:
            self.planner.host.stop(again.reason)
        with self._present_stays(bucket, again):
            self._load(bucket, bucket.step, again, level)

    @contextmanager
    def _present_stays(self, bucket: PlannedBucket, again: PlanAgain) -> Iterator[None]:
        """Plan inside. If no plan can be made, the present one stays, for the terms of `again`."""
        try:
            with self.planner.lock:
                yield
        except (PlannerError, RemoteError) as error:
            correction = replace(bucket.planned_for.correction, times=again.terms.correction.times)
            bucket.planned_for = replace(again.terms, correction=correction)  # once
            bucket.stale = again.reason
            log.warning(
                "%s: %s, and no plan could be made for that (%s). The present plan stays",
                self._name,
                again.reason,
                first_line(error),
            )

    def _load(
        self, bucket: PlannedBucket, step: ProfiledStep, again: PlanAgain, level: int = logging.INFO
    ) -> None:
        """Load the plan of `step` for the terms of `again`, or the tightest plan if none fits.

        Raises:
            PlannerError, RemoteError: no plan was found; the bucket is as it was.
        """
        terms, reason = again
        correction, others = terms.correction, terms.present.others_nbytes
        assert step.profile is not None
        limit = max(1, terms.limit - correction.total)
        within = terms.counted_in(step.profile), limit, step.rank_nbytes + others
        policy, plan, infeasible = self.planner.plan_or_tightest(*within)
        peak = policy.predicted.peak_bytes + correction.nbytes
        policy = policy.model_copy(update={"budget_bytes": self.options.budget_bytes})
        if (share := self.watch.on_device.share) != terms.present.share:
            others = self.watch.on_device.others_nbytes()
            terms = replace(terms, present=replace(terms.present, share=share, others_nbytes=others))
        bucket.load(LoadedPolicy(corrected(policy, correction.nbytes, correction.total), plan), step, terms)
        expects_gradients = terms.present.gradients and bucket.frees_gradients is None
        last = infeasible is not None or correction.times == MOST_CORRECTIONS
        if last and correction.nbytes and not terms.form.over:
            bucket.shown = replace(bucket.shown, over=True)
            reason += ", and the next step is observed"
        elif infeasible is not None and peak > self.options.limit and not expects_gradients:
            bucket.warned.add("over the limit")
            self.planner.warn_over_budget(peak, reason)
            return
        log.log(
            level,
            "%s: planned again, since %s: %d of %d ops are recomputed, and the predicted peak is %s of %s",
            self._name,
            reason,
            policy.recomputed,
            len(policy.decisions),
            format_bytes(peak),
            format_bytes(terms.limit),
        )
