"""Choose the policy of a batch: the only one, its bucket's, one that is planned now, or none.

docs/budget.md explains the buckets, docs/integrations.md what several ranks agree on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from ac_client.errors import ShapeNotPlanned
from ac_client.planning.batch_shape import Key, ModelCall, key_of
from ac_client.planning.loaded_policy import LoadedPolicy, PlannedBucket, ProfiledStep, largest
from ac_client.planning.loop_watch import LoopWatch
from ac_client.planning.peak_counter import allocator_peak
from ac_client.planning.plan_batch import BucketPlanner, check_hooks, dropping_all, first_line
from ac_client.planning.ranks import (
    AUTO,
    Group,
    Need,
    Ranks,
    Terms,
    has_other_ranks,
    meet,
    ranks_of,
    ranks_of_collectives,
)
from ac_client.planning.replan import PeakWatch, Replanner
from ac_client.planning.shape_buckets import MOST_BUCKETS, Buckets
from ac_client.planning.trained_parameters import TrainedKey, TrainedParameters
from ac_client.service_client.errors import RemoteError
from autoac.planner import (
    InfeasibleBudget,
    OtherProfile,
    Plan,
    PlannerError,
    Policy,
    PolicySet,
    Profile,
    as_planned,
)
from autoac.planner.formats.policy_set import Bucket, Shape, shape_in_words
from autoac.planner.units import format_bytes
from autoac.profiler import Loop, NothingToProfile, ProfilerBusy, device_of
from autoac.profiler.distributed.fsdp import process_group_of
from autoac.profiler.distributed.process_groups import noting_groups
from autoac.profiler.errors import ProfilerError
from autoac.profiler.torch_facts.torch_trace import profiler_is_running

log = logging.getLogger("ac_client")

Shapes = Literal["bucket", "first"]


class PolicyStore:
    """Holds the policies of one model, and finds or makes the policy for each batch.

    Args:
        policy: as passed to `apply`; None to plan every batch.

    Attributes:
        ranks: those that run each forward together; not known before the first forward.
        current: the bucket of the last forward that was planned.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: BucketPlanner,
        replanner: Replanner,
        watch: LoopWatch,
        peaks: PeakWatch,
        *,
        policy: Policy | PolicySet | None,
        strict: bool,
        shapes: Shapes,
        group: Group,
    ) -> None:
        self._bucket_planner = planner
        self._planner = planner.planner
        self._name = planner.planner.name
        self._lock = planner.lock
        self._replanner = replanner
        self._watch = watch
        self._peaks = peaks
        self._strict = strict
        self._shapes = shapes
        self._said_how_to_compare = False
        self._group = (process_group_of(model) or AUTO) if group is None or group is AUTO else group
        self.ranks: Ranks | None = None
        self._to_meet = policy is None and group is not None  # the ranks, in the first forward
        self.current: PlannedBucket | None = None
        self._given: list[PlannedBucket] = []
        if isinstance(policy, Policy):
            self._given = [PlannedBucket(None, LoadedPolicy(policy))]
        elif policy is not None:
            self._given = [
                PlannedBucket(bucket.shape, LoadedPolicy(bucket.policy)) for bucket in policy.buckets
            ]
        self._by_trained: dict[TrainedKey, Buckets] = {}
        self._parameters = TrainedParameters(model)
        self._training = model.training
        self._select_buckets()
        for bucket in self._given:
            self._log_policy("runs under a given policy", bucket)

    @property
    def all(self) -> list[PlannedBucket]:
        """Return all buckets that were planned or given so far."""
        buckets = (bucket for buckets in self._by_trained.values() for bucket in buckets.all)
        return list(dict.fromkeys(buckets))  # a given one is there for each set of parameters

    @property
    def single_policy(self) -> PlannedBucket | None:
        """Return the bucket that runs every batch, if there is one."""
        return self._buckets.single_policy

    @property
    def latest(self) -> PlannedBucket | None:
        """Return the bucket that the last forward ran under, or that every forward will."""
        return self.current or self.single_policy

    def policies(self) -> PolicySet:
        """Return one policy for each shape of batch that was planned. A single policy has no shape."""
        return PolicySet(
            buckets=tuple(
                Bucket(shape=dict(bucket.shape), policy=bucket.policy)
                for bucket in self._buckets.all
                if bucket.shape is not None
            )
        )

    def for_batch(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        waiting: int,
        on_failure: Callable[[], None],
    ) -> PlannedBucket | None:
        """Return the bucket that runs this batch, planned if necessary; None if the batch runs unplanned.

        Args:
            waiting: how many forwards wait for their backward.
            on_failure: called before an error that leaves the model without any plan.

        Raises:
            ShapeNotPlanned: strict, and no bucket covers the batch.
            PlannerError, RemoteError: planning failed.
        """
        if model.training is not self._training or self._parameters.sample_changed():
            self._look_at_parameters(model)
        bucket = self._buckets.single_policy
        if self.ranks is None:
            self.ranks = ranks_of(model, self._group)
        if self._to_meet and (self.ranks is not None or (self._group is AUTO and has_other_ranks())):
            bucket = self._plan_with_ranks(ModelCall(model, args, kwargs), on_failure)
        elif bucket is None:
            key = key_of(args, kwargs)
            bucket = self._buckets.known.get(key)
            if bucket is None:
                bucket = self._plan_new_shape(ModelCall(model, args, kwargs), key, on_failure)
        if bucket is None:
            return None
        self.current = self._planned_again(ModelCall(model, args, kwargs), bucket, waiting)
        return self.current

    def plan_for(self, call: ModelCall) -> Policy:
        """Plan for one more shape of batch.

        Raises:
            PlannerError, RemoteError, ProfilerError: the batch could not be planned.
        """
        with self._lock:
            if call.model.training is not self._training or self._parameters.changed():
                self._look_at_parameters(call.model)
            return self._plan(call).policy

    def _look_at_parameters(self, model: nn.Module) -> None:
        with self._lock:
            self._parameters.look(model)
            self._training = model.training
            self._select_buckets()

    def _select_buckets(self) -> None:
        """Take the buckets for the parameters that train now."""
        buckets = self._by_trained.get(self._parameters.key)
        if buckets is None:
            planned = bool(self.all)
            buckets = self._by_trained[self._parameters.key] = Buckets()
            for bucket in self._given:
                buckets.add(bucket)
            if len(self._given) == 1 and self._given[0].shape is None:
                buckets.single_policy = self._given[0]
            elif planned:
                log.info(
                    "%s: other parameters train, or in another dtype or mode: batches are planned again",
                    self._name,
                )
        self._buckets = buckets

    def _planned_again(self, call: ModelCall, bucket: PlannedBucket, waiting: int) -> PlannedBucket:
        """Return `bucket`, or a new bucket if this step needs more than `bucket` was planned for."""
        loop = self._watch.loop_to_plan(bucket, waiting)
        current = bucket
        try:
            if bucket.may_lack_gradients and self._parameters.gradients_exist():
                current = self._replanner.for_gradients(call, current, loop)
            if current.profile is not None and self._planner.budget_bytes is not None:
                self._replanner.count_optimizers(call.model, current)
                if current.ran_skipped and not waiting and not self._watch.fits_twice(current):
                    current = self._replanner.for_more_modules(call, current)
                self._replanner.count_other_models(current)
                if loop != current.step.loop:
                    current = self._replanner.for_loop(call, current, loop)
        finally:  # an error in a later one must not lose what an earlier one planned
            if current is not bucket:
                with self._lock:
                    self._add(call.model, current)
        return current

    def _plan_new_shape(
        self,
        call: ModelCall,
        key: Key,
        on_failure: Callable[[], None],
        profiled: Profile | Exception | None = None,
    ) -> PlannedBucket | None:
        """Return the bucket for a batch whose key is new, planned if no bucket covers it; None: unplanned.

        Args:
            profiled: the profile of the step if it was profiled just now, or the error of that.

        Raises:
            ShapeNotPlanned: strict, and no bucket covers the batch.
        """
        if key in self._buckets.unplanned:
            return None
        with self._lock:  # a forward on another thread waits for the plan
            bucket = self._buckets.covering(key, call.args, call.kwargs)
            if bucket is None:
                shape = call.shape
                first = not self.all
                if self._strict and self._buckets.all:
                    planned = [b.shape for b in self._buckets.all if b.shape is not None]
                    raise ShapeNotPlanned(shape, planned, self._planner.budget_bytes is not None)
                if not first and (self._planner.budget_bytes is None or len(self.all) >= MOST_BUCKETS):
                    return self._beyond(shape, key)
                check_hooks()
                try:
                    bucket = self._plan(call, profiled)
                except ProfilerBusy as busy:
                    return self._unplanned_now(busy)
                except (ProfilerError, PlannerError, RemoteError) as error:
                    # Not what forward itself raises, or Ctrl-C: the next batch may be planned.
                    if first:
                        on_failure()
                    elif isinstance(error, NothingToProfile):
                        self._buckets.unplanned.add(key)
                        return None
                    elif isinstance(error, InfeasibleBudget) and not self._buckets.all:
                        bucket = self._of_other_parameters(call, key, error)
                        self._buckets.remember(key, bucket)
                        return bucket
                    raise
            if self._buckets.single_policy is None:
                self._buckets.remember(key, bucket)
        return bucket

    def _plan(self, call: ModelCall, profiled: Profile | Exception | None = None) -> PlannedBucket:
        if isinstance(profiled, Exception):
            raise profiled
        bucket = self._bucket_planner.plan(call, Loop(self._watch.forwards), profile=profiled)
        self._add(call.model, bucket)
        return bucket

    def _add(self, model: nn.Module, bucket: PlannedBucket, *, serve_all: bool = True) -> None:
        """Let `bucket`, which was planned just now, serve batches."""
        if self._peaks.allocator is None:
            self._peaks.allocator = allocator_peak(device_of(model))
        self._buckets.add(bucket)
        if self._shapes == "first" and serve_all:
            self._buckets.serve_all(bucket)
        self._log_policy("planned", bucket)
        if self._peaks.allocator is None and not self._said_how_to_compare:
            self._said_how_to_compare = True
            log.info(
                "%s: on a CPU nothing compares the measured peak with the predicted one by itself. To "
                "compare them, run a step in `with ac_client.applied(model).measure():`",
                self._name,
            )

    def _plan_with_ranks(self, call: ModelCall, on_failure: Callable[[], None]) -> PlannedBucket | None:
        """Return the bucket for the first batch, agreed on by all ranks; None: this time all run unplanned.

        See NOTE [ Where ranks meet ] in ranks.py. Each rank profiles its own batch, and some plan. If it is
        not known which ranks run the forward, the collectives of the profile show it.
        """
        with self._lock:
            if self.ranks is not None and self.ranks.any(profiler_is_running()):
                return self._unplanned_now(ProfilerBusy())
            shape, loop = call.shape, Loop(self._watch.forwards)
            profile: Profile | None = None
            need: Need | Exception
            with noting_groups() as groups:
                try:
                    profile = self._bucket_planner.profiler.profile(call, loop)
                    need = Need(shape, self._planner.limit, profile.static.total)
                except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised on each
                    need = error
            if self.ranks is None:
                self.ranks, unknown = ranks_of_collectives(groups, call.model)
                if unknown:
                    self._warn_of_unknown_ranks(unknown)
            ranks = self.ranks
            if ranks is None:
                if not isinstance(need, ProfilerBusy):
                    self._to_meet = False
                key = key_of(call.args, call.kwargs)
                profiled = need if isinstance(need, Exception) else profile
                return self._plan_new_shape(call, key, on_failure, profiled)
            own_plan: list[Plan | None] = [None]

            def plan(terms: Terms) -> Policy:
                assert profile is not None
                made, _, _ = self._bucket_planner.plan_first(profile, loop, terms.extra_static, terms.limit)
                policy, own_plan[0] = made
                return policy

            try:
                agreed = meet(ranks, need, plan)
            except BaseException as error:
                if isinstance(error, ProfilerBusy):
                    return self._unplanned_now(error)
                on_failure()
                raise
            self._to_meet = False
            assert profile is not None
            extra = agreed.static - profile.static.total
            dropped = dropping_all(profile, loop)
            for one in agreed.policies:
                of = dropped if one.policy.fingerprint == dropped[0].fingerprint else (profile, loop)
                plan_made = own_plan[0] if one.planner == ranks.rank else None
                if plan_made is None and one.shape == shape:
                    plan_made = _plan_on(one.policy, of[0])
                if plan_made is not None:
                    bucket = self._bucket_planner.bucket(
                        call, *of, (one.policy, plan_made), rank_nbytes=extra
                    )
                else:
                    bucket = PlannedBucket(
                        one.shape, LoadedPolicy(one.policy), ProfiledStep(one.shape, loop=loop)
                    )
                self._add(call.model, bucket, serve_all=False)
                log.info("%s: planned by rank %d of %d", self._name, one.planner, ranks.size)
            covering = self._buckets.covering(key_of(call.args, call.kwargs), call.args, call.kwargs)
            assert covering is not None
            if self._shapes == "first":
                self._buckets.serve_all(covering)
            return covering

    def _warn_of_unknown_ranks(self, reason: str) -> None:
        self._planner.warn_once(
            "ranks",
            "%s: it is not known which ranks run each forward together (%s). Each rank plans alone, and an "
            "error of one rank does not reach the others. Pass ac_client.apply(..., group=...) with the "
            "group of all these ranks, or group=None to plan alone",
            self._name,
            reason,
        )

    def _of_other_parameters(self, call: ModelCall, key: Key, error: InfeasibleBudget) -> PlannedBucket:
        """Return a bucket planned while other parameters trained, since no plan fits for the present ones."""
        covering = (buckets.covering(key, call.args, call.kwargs) for buckets in self._by_trained.values())
        bucket = next((bucket for bucket in covering if bucket is not None), None) or largest(self.all)
        self._planner.warn_once(
            "other parameters",
            "%s: other parameters train than before, or the dtype or the mode changed, and no plan for that "
            "fits (%s). The model runs under an earlier plan, and goes over the budget",
            self._name,
            first_line(error),
        )
        return bucket

    def _unplanned_now(self, busy: ProfilerBusy) -> PlannedBucket | None:
        """Return the bucket for a batch that cannot be profiled now; None: the batch runs unplanned."""
        if planned := self.all:
            return largest(self._buckets.all or planned)
        self._planner.warn_once(
            "busy", "%s runs without a plan now, and will be planned in a later forward: %s", self._name, busy
        )
        return None

    def _beyond(self, shape: Shape, key: Key) -> PlannedBucket:
        """Return the largest bucket, for a batch that no bucket covers and for which no plan may be made."""
        bucket = largest(self._buckets.all or self.all)
        self._planner.warn_once(
            "beyond",
            "%s: no bucket covers a batch of %s, and none is added (%s). The batch runs under the largest of "
            "%d buckets, and may need more memory than this bucket was planned for",
            self._name,
            shape_in_words(shape),
            "no budget_gb was given" if self._planner.budget_bytes is None else f"there are {MOST_BUCKETS}",
            len(self.all),
        )
        self._buckets.remember(key, bucket)
        return bucket

    def _log_policy(self, event: str, bucket: PlannedBucket) -> None:
        policy = bucket.policy
        predicted = policy.predicted
        log.info(
            "%s: %s: predicted peak %s of %s, %.1f%% of the step recomputed (%d of %d ops)",
            self._name,
            event,
            format_bytes(predicted.peak_bytes),
            format_bytes(policy.budget_bytes),
            100 * predicted.recompute_us / predicted.step_us if predicted.step_us else 0.0,
            policy.recomputed,
            len(policy.decisions),
        )


def _plan_on(policy: Policy, profile: Profile) -> Plan | None:
    """Return the plan of another rank's policy on this rank's profile; None if this rank runs other ops."""
    try:
        return as_planned(policy, profile)
    except OtherProfile:
        return None
