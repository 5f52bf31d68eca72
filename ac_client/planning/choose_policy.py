"""Choose the policy of a batch: the model's single one, that of a bucket that covers it, a new one, or none.

docs/shapes.md explains the buckets, and docs/integrations.md says what several ranks agree on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

from torch import nn

from ac_client.errors import ShapeNotPlanned
from ac_client.planning.batch_shape import Key, ModelCall, key_of
from ac_client.planning.loaded_policy import LoadedPolicy, PlannedBucket, largest
from ac_client.planning.plan_batch import (
    NO_PLAN,
    OTHER_THREAD,
    AnotherIsObserved,
    BatchPlanner,
    InCheckpoint,
    Observation,
    first_line,
)
from ac_client.planning.policy_store import MOST_BUCKETS, PolicyStore
from ac_client.planning.ranks import (
    AUTO,
    Need,
    Ranks,
    digest_of,
    has_other_ranks,
    meet,
    ranks_of,
    ranks_of_collectives,
)
from ac_client.planning.trigger import PlannedFor
from ac_client.service_client.errors import RemoteError
from autoac.planner import OtherProfile, Plan, PlannerError, Policy, Profile, as_planned
from autoac.planner.formats.policy_set import Shape, shape_in_words
from autoac.planner.units import format_bytes
from autoac.profiler import ProfilerBusy, device_of
from autoac.tape.distributed.pipelining import infers_metadata
from autoac.tape.errors import CannotCapture, CannotProfile, ProfilerError
from autoac.tape.torch_facts.streams import is_capturing
from autoac.tape.torch_facts.torch_trace import profiler_is_running

log = logging.getLogger("ac_client")

MOST_OBSERVED = 2  # steps that begin alike, for a later forward that was longer
OTHER_PARAMETERS = "other parameters train than before, or the dtype or the mode changed"


class PolicyChooser:
    """Finds or makes the policy for each batch of one model.

    Args:
        given: a policy was passed to `apply`.
        on_failure: returns the function to call before an error that leaves the model without any plan.

    Attributes:
        ranks: those that run each forward together; not known before the first forward.
    """

    def __init__(
        self,
        model: nn.Module,
        store: PolicyStore,
        planner: BatchPlanner,
        *,
        given: bool,
        on_failure: Callable[[], Callable[[], None] | None],
    ) -> None:
        self.ranks: Ranks | None = None
        self._store = store
        self._planner = planner
        self._options = options = planner.options
        self._on_failure = on_failure
        self._began: Key | None = None  # key of the first forward of the step that runs
        self._longer: set[Key] = set()  # such keys of steps with a longer later forward, observed next
        self._observed = Counter[Key]()  # by such a key: how often a step was observed for that
        self._to_meet = not given and options.group is not None  # the ranks, when the second step begins

    @property
    def plans_first(self) -> bool:
        """Return True if the next forward begins with a plan: of an observed step, or with other ranks."""
        return self._planner.observation is not None or not self._store.all

    def for_batch(self, call: ModelCall, waiting: int = 0) -> PlannedBucket | None:
        """Return the bucket that runs this batch, planned if necessary; None if the batch runs unplanned.

        Args:
            call: of the model, on the batch.
            waiting: how many forwards wait for their backward.

        Raises:
            ShapeNotPlanned: strict, and no bucket covers the batch.
            PlannerError, RemoteError: planning failed.
        """
        store = self._store
        if self._planner.observation is not None and self._goes_on(self._planner.observation, call, waiting):
            return None
        if store.parameters.sample_changed(call.model):
            with self._planner.lock:
                store.look_at_parameters(call.model)
        if self._to_meet and self._has_ranks(call):
            return self._observe_with_ranks(call)
        if waiting and (current := store.current) is not None and waiting <= len(current.step.following):
            if current.covers_next(call, waiting) or current.planned_for.fits(1):
                return current  # the group of forwards is one
            return self._in_the_middle(call.shape)
        key = key_of(call.args, call.kwargs)
        if not waiting:
            self._began = key
            if key in self._longer and not is_capturing():
                self._longer.remove(key)
                self._observed[key] += 1
                return self._observe(call, key)
        bucket = store.buckets.known.get(key)
        return self._of_new_shape(call, key, waiting) if bucket is None else bucket

    def _has_ranks(self, call: ModelCall) -> bool:
        """Return True if other ranks run each forward of the model with this one, or may."""
        if others := has_other_ranks():
            self.ranks = self.ranks or ranks_of(call.model, self._options.group)
        return self.ranks is not None or (self._options.group is AUTO and others)

    def _goes_on(self, observation: Observation, call: ModelCall, waiting: int) -> bool:
        """Return True if this forward belongs to the observed step; plan the step if it is over.

        Raises:
            PlannerError, RemoteError, ProfilerError: planning failed.
        """
        step = observation.step
        if observation.runs_elsewhere:
            return True  # a forward of another thread runs unplanned until then
        if step.recording and waiting and not step.has_backward:
            step.note_batch(call.tensors)
            step.begin_forward()
            observation.following.append(call.shape)
            return True
        with self._planner.lock:
            if self._planner.observation is observation:
                self._planner.observation = None
                self._end_observation(observation, call)
        return False

    def _end_observation(self, observation: Observation, call: ModelCall) -> None:
        """Plan the step of `observation`, which is over; the caller holds the lock of the planner."""
        step = observation.step
        step.end()
        if observation.meets and self.ranks is None and step.groups is not None:
            with self._giving_up():
                self.ranks, unknown = ranks_of_collectives(step.groups, call.model)
            if unknown:
                self._warn_of_unknown_ranks(unknown)
        again, ranks = not step.has_backward, self.ranks if observation.meets else None
        # A rank whose step nobody differentiated has no profile: then all observe another step.
        if ranks.any(again) if ranks is not None else again:
            if step.missed_backward:
                self._planner.missed += 1
                self._planner.warn_once("busy", f"it has no plan, and may go over the budget: {OTHER_THREAD}")
            step.discard()
        elif ranks is not None:
            with self._giving_up():
                self._planner.host.agree(ranks, device_of(call.model, call.args, call.kwargs))
            need: Need | Exception
            profile, terms = None, PlannedFor(0)
            try:
                profile = self._planner.observed(call, observation)
                terms = self._planner.terms(call, profile)
                counted = terms.counted_in(profile)
                limit, static = self._planner.limit_of(counted), counted.static.total
                among = ranks.include(step.groups or {})
                need = Need(observation.shape, limit, static, digest_of(counted) if among else "")
            except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised on each
                need = error
            with self._giving_up():
                self._meet(observation, call, terms, need, profile)
            self._to_meet = False
        else:
            self._to_meet = self._to_meet and not observation.meets
            with self._giving_up(ProfilerError, PlannerError, RemoteError):
                self._plan_observed(observation, call)

    def settle_ended(self, model: nn.Module) -> None:
        """Plan the observed step now, if its record has ended."""
        if (observation := self._planner.observation) is not None and not observation.step.recording:
            self.settle(model)

    def settle(self, model: nn.Module, *, raises: bool = False) -> None:
        """Plan the observed step now, if it is over. What cannot be planned raises in the next forward.

        Raises:
            PlannerError, RemoteError, ProfilerError: planning failed, and `raises`.
        """
        observation = self._planner.observation
        if observation is None or observation.meets or not observation.step.has_backward:
            return
        observation.step.end()
        batch = tuple(tensor for ref in observation.batch if (tensor := ref()) is not None)
        errors = ProfilerError, PlannerError, RemoteError
        try:
            with self._giving_up(*errors) if raises else nullcontext():
                self._plan_observed(observation, ModelCall(model, batch, {}))
            self._planner.observation = None
        except errors as error:
            if raises:
                self._planner.observation = None
                raise
            log.info("%s: %s", self._planner.name, first_line(error))

    def _plan_observed(self, observation: Observation, call: ModelCall) -> None:
        """Plan the step of `observation`, which is over.

        Raises:
            PlannerError, RemoteError, ProfilerError: it has no profile, or no plan.
        """
        with self._planner.lock:
            buckets = self._store.buckets
            profile = self._planner.observed(call, observation)
            if observation.then is not None:
                self._store.current = observation.then(profile, call, observation)
                return
            bucket = self._plan(call, profile, observation)
            buckets.remember(observation.key, bucket)
            self._store.current = bucket
            self._planner.on_device.bucket = bucket

    def plan_for(self, call: ModelCall) -> Policy:
        """Plan for one more shape of batch, by one real step on it without the optimizer.

        Raises:
            PlannerError, RemoteError, ProfilerError: the batch could not be planned.
        """
        with self._planner.lock:
            if self._store.parameters.changed(call.model):
                self._store.look_at_parameters(call.model)
            forwards = max((one.planned_for.form.forwards for one in self._store.buckets.all), default=1)
            return self._plan(call, self._planner.profile(call, forwards)).policy

    def _of_new_shape(self, call: ModelCall, key: Key, waiting: int) -> PlannedBucket | None:
        """Return the bucket for a batch whose key is new; None: none covers it, and its step is observed.

        Args:
            call: of the model, on the batch.
            key: of the batch.
            waiting: how many forwards wait for their backward.

        Raises:
            ShapeNotPlanned: strict, and no bucket covers the batch.
        """
        buckets = self._store.buckets
        with self._planner.lock:  # a forward on another thread waits for the plan
            bucket = buckets.covering(call.args, call.kwargs)
            if bucket is None:
                shape, planned = call.shape, len(self._store.all)
                without_budget = self._options.budget_bytes is None
                if self._options.strict and buckets.all:
                    shapes = [b.shape for b in buckets.all if b.shape is not None]
                    raise ShapeNotPlanned(shape, shapes, not without_budget)
                if planned and (without_budget or planned >= MOST_BUCKETS):
                    why = "no budget_gb was given" if without_budget else f"there are {MOST_BUCKETS}"
                    bucket = self._uncovered("beyond", shape, f"none is added ({why})")
                    buckets.remember(key, bucket)
                    return bucket
                if waiting and buckets.all:
                    return self._in_the_middle(shape)
                if is_capturing():
                    raise CannotCapture(self._planner.name, "no plan covers its batch")
                observation = self._planner.observation
                if observation is not None and observation.runs_elsewhere:
                    return None  # it began while this thread waited
                return self._observe(call, key)
            buckets.remember(key, bucket)
        return bucket

    def _observe(self, call: ModelCall, key: Key, *, meets: bool = False) -> PlannedBucket | None:
        """Observe the step that begins; return the bucket that runs it instead if that is impossible now."""
        try:
            with self._giving_up(CannotProfile):
                self._planner.observe(call, key, meets=meets, recorded=not infers_metadata())
        except ProfilerBusy as busy:
            return self._unplanned_now(busy, call, meets=meets)
        return None

    @contextmanager
    def _giving_up(self, *errors: type[Exception]) -> Iterator[None]:
        """Remove what `apply` put on the model if the ranks cannot meet, or the first step cannot be planned.

        Args:
            errors: that leave a model alone which has a bucket already; none if the ranks meet inside.
        """
        handled = errors or (BaseException,)
        try:
            yield
        except handled:
            if not (errors and self._store.all) and (remove := self._on_failure()) is not None:
                remove()
            raise

    def _plan(
        self, call: ModelCall, profile: Profile, observation: Observation | None = None
    ) -> PlannedBucket:
        running = ""
        if self._store.all and not self._store.buckets.all:
            running = OTHER_PARAMETERS
        elif self._store.all and observation is not None:  # it ran, and the loop goes on
            running = f"for a batch of {shape_in_words(observation.shape)}"
        bucket = self._planner.plan(call, profile, observation, running=running)
        same = [one for one in self._store.buckets.all if one.shape == bucket.shape and one.step.following]
        if observation is not None and same and largest([bucket, *same]) is not bucket:
            return same[0]  # for longer forwards after the first one
        self._store.add(bucket)
        return bucket

    def _observe_with_ranks(self, call: ModelCall) -> PlannedBucket | None:
        """Observe the first step; the ranks meet when the next one begins: NOTE [ Where ranks meet ]."""
        with self._planner.lock:
            with self._giving_up():
                busy = self.ranks is not None and self.ranks.any(profiler_is_running())
            if busy:
                return self._unplanned_now(ProfilerBusy(), call, meets=True)
            return self._observe(call, key_of(call.args, call.kwargs), meets=True)

    def _meet(
        self,
        observation: Observation,
        call: ModelCall,
        terms: PlannedFor,
        need: Need | Exception,
        profile: Profile | None,
    ) -> None:
        """Agree with the other ranks, and add the buckets of all policies.

        Args:
            observation: of this rank's step.
            call: of the model.
            terms: of the plan, but for its limit.
            need: of this rank, or the error that kept it from finding out.
            profile: of this rank; None with an error.
        """
        ranks, shape = self.ranks, observation.shape
        assert ranks is not None
        own_plan: list[Plan] = []

        def plan(limit: int, extra_static: int, alike: bool) -> Policy:
            assert profile is not None
            counted = terms.counted_in(profile)
            policy, plan = self._planner.plan_within(counted, limit, extra_static, together=alike)
            own_plan.append(plan)
            return policy

        policies, static = meet(ranks, need, plan)
        device = self._planner.on_device.device()
        if not self._planner.host.pins_on_all([one.policy for one in policies], device, ranks):
            own_plan.clear()
            policies, static = meet(ranks, need, plan)
        assert profile is not None
        assert isinstance(need, Need), "meet raises the error of a rank"
        counted = terms.counted_in(profile)
        for one in policies:
            policy, found = one.policy, own_plan[0] if one.planner == ranks.rank else None
            if found is None and one.shape == shape:
                policy, found = self._plan_on(policy, counted, need.limit)
            loaded, step = LoadedPolicy(policy, found), None
            if found is not None:
                step = self._planner.profiled_step(call, profile, observation, static - counted.static.total)
            bucket = PlannedBucket(one.shape, loaded, step, replace(terms, limit=need.limit))
            self._store.add(bucket)
            log.info("%s: planned by rank %d of %d", self._planner.name, one.planner, ranks.size)

    def _plan_on(self, policy: Policy, profile: Profile, limit: int) -> tuple[Policy, Plan | None]:
        """Return another rank's policy, and its plan on this rank's profile.

        If this rank runs other ops, as with a smaller shard, return a policy of its own: the tightest if none
        keeps the limit, since the other ranks train on.
        """
        with suppress(OtherProfile):
            return policy, as_planned(policy, profile)
        with suppress(*NO_PLAN):
            own, plan, infeasible = self._planner.plan_or_tightest(profile, limit)
            if infeasible is not None:
                needs = own.predicted.peak_bytes
                self._planner.warn_over_budget(needs, "other ops than on the rank that planned")
            return own, plan
        return policy, None

    def _warn_of_unknown_ranks(self, reason: str) -> None:
        self._planner.warn_once(
            "ranks",
            f"it is not known which ranks run each forward together ({reason}). So each rank plans alone. If "
            "one fails, others may wait for it forever. Pass group=... with the group "
            "of the ranks that communicate in forward, or group=None if none do",
        )

    def _unplanned_now(
        self, busy: ProfilerBusy, call: ModelCall, *, meets: bool = False
    ) -> PlannedBucket | None:
        """Return the bucket for a batch that cannot be profiled now; None: the batch runs unplanned.

        Args:
            busy: says why.
            call: of the model, on the batch.
            meets: the ranks meet when the next step begins.
        """
        if isinstance(busy, InCheckpoint):
            self._planner.warn_once("in checkpoint", str(busy))
            return None
        if self._store.all:
            why = f"none is added until a step can be observed ({busy})"
            return self._uncovered("busy beyond", call.shape, why)
        queued = isinstance(busy, AnotherIsObserved)  # its turn comes in the next step
        if not queued:
            self._planner.warn_once("busy", f"it runs without a plan until a step can be observed: {busy}")
        meets &= not queued
        self._planner.observe(call, key_of(call.args, call.kwargs), meets=meets, recorded=False)
        return None

    def _in_the_middle(self, shape: Shape) -> PlannedBucket:
        """Return the bucket of the forward that waits; the next step that begins alike is observed."""
        if self._began is not None and self._observed[self._began] < MOST_OBSERVED:
            self._longer.add(self._began)
        why = "no observed step had one like it while another forward waits: the next is observed"
        return self._uncovered("in the middle", shape, why)

    def _uncovered(self, subject: str, shape: Shape, why: str) -> PlannedBucket:
        """Return the bucket that runs a batch which none covers, and say why it does."""
        waits = self._store.current if subject == "in the middle" else None
        bucket = waits or largest(self._store.buckets.all or self._store.all)
        self._planner.warn_once(
            subject,
            f"no bucket covers a batch of {shape_in_words(shape)}, and {why}. It runs under another one: "
            f"this step and later steps may go over the limit of {format_bytes(bucket.planned_for.limit)}",
        )
        return bucket
