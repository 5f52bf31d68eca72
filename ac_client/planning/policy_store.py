"""Hold the policies of one model: by the parameters that train, and by the shape of the batch.

The smallest bucket that covers a batch runs it: docs/shapes.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from ac_client.planning.batch_shape import Key, leaves_of
from ac_client.planning.loaded_policy import LoadedPolicy, PlannedBucket
from ac_client.planning.options import ApplyOptions
from ac_client.planning.trained_parameters import TrainedKey, TrainedParameters
from ac_client.planning.trigger import Form, PlannedFor
from autoac.planner import Policy, PolicySet
from autoac.planner.formats.policy_set import Bucket, Extent
from autoac.planner.units import format_bytes

log = logging.getLogger("ac_client")

MOST_BUCKETS = 32  # a loop with ever larger batches must not plan for ever
MOST_KEYS = 10_000


class ShapeBuckets:
    """All policies of a model while one set of its parameters trains.

    Attributes:
        all: buckets in the order in which they were planned.
        known: the bucket chosen for a key; read by each forward.
    """

    def __init__(self) -> None:
        self.all: list[PlannedBucket] = []
        self.known: dict[Key, PlannedBucket] = {}

    def covering(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlannedBucket | None:
        """Return the smallest bucket that covers this batch; None if no bucket does."""
        batch = Extent.of_leaves(leaves_of(args, kwargs))
        covering = [(b.extent.elements, b) for b in self.all if b.extent and b.extent.covers(batch)]
        if covering:
            return min(covering, key=itemgetter(0))[1]
        return self.of_every_shape

    @property
    def of_every_shape(self) -> PlannedBucket | None:
        """Return the bucket that runs every batch, if there is one."""
        return self.all[0] if self.all and self.all[0].shape is None else None

    def remember(self, key: Key, bucket: PlannedBucket) -> None:
        """Choose `bucket` for batches of `key`."""
        if len(self.known) >= MOST_KEYS:
            self.known.clear()
        self.known[key] = bucket

    def add(self, bucket: PlannedBucket) -> None:
        """Add `bucket`. If there was one for the same shape, the new one replaces it."""
        self.all = [*(old for old in self.all if old.shape != bucket.shape), bucket]
        self.known.clear()

    def discard(self, bucket: PlannedBucket) -> None:
        """Run no batch under `bucket` any more."""
        self.all = [other for other in self.all if other is not bucket]
        self.known.clear()


class PolicyStore:
    """Holds the policies of one model.

    Args:
        policy: as passed to `apply`; None to plan every batch.

    Attributes:
        parameters: of the model, as they were last looked at.
        buckets: for the parameters that train now.
        current: the bucket of the last forward that was planned.
    """

    def __init__(self, model: nn.Module, options: ApplyOptions, policy: Policy | PolicySet | None) -> None:
        self._name = type(model).__name__
        self.current: PlannedBucket | None = None
        given = (
            []
            if policy is None
            else [(None, policy)]
            if isinstance(policy, Policy)
            else [(bucket.shape, bucket.policy) for bucket in policy.buckets]
        )
        self._given = []
        for shape, one in given:
            limit = one.budget_bytes if options.budget_bytes is None else options.limit
            terms = PlannedFor(limit, form=Form(len(one.forwards)))
            self._given.append(PlannedBucket(shape, LoadedPolicy(one), terms=terms))
            self._log_policy("runs under a given policy", one)
        self._by_trained: dict[TrainedKey, ShapeBuckets] = {}
        self.parameters = TrainedParameters(model)
        self.buckets = self._buckets_of_parameters()

    @property
    def all(self) -> list[PlannedBucket]:
        """Return all buckets that were planned or given so far."""
        buckets = (bucket for buckets in self._by_trained.values() for bucket in buckets.all)
        return list(dict.fromkeys(buckets))  # a given one is there for each set of parameters

    @property
    def recomputes(self) -> bool:
        """Return True if a policy for the parameters that train now recomputes or moves an op."""
        return any(bucket.loaded.recomputes for bucket in self.buckets.all)

    @property
    def latest(self) -> PlannedBucket | None:
        """Return the bucket that the last forward ran under, or that every forward will."""
        return self.current or self.buckets.of_every_shape

    def policies(self) -> PolicySet:
        """Return one policy for each shape of batch that was planned. A single policy has no shape."""
        return PolicySet(
            buckets=tuple(
                Bucket(shape=dict(bucket.shape), policy=bucket.policy)
                for bucket in self.buckets.all
                if bucket.shape is not None
            )
        )

    def look_at_parameters(self, model: nn.Module) -> None:
        """Switch to the buckets for the present mode of `model` and for the parameters that train now."""
        self.parameters.look(model)
        self.buckets = self._buckets_of_parameters()

    def add(self, bucket: PlannedBucket) -> None:
        """Let `bucket`, which was planned just now, serve batches."""
        self.buckets.add(bucket)
        self._log_policy("planned", bucket.policy)

    def discard(self, bucket: PlannedBucket) -> None:
        """Let `bucket`, which was given, serve no batch any more."""
        self._given.remove(bucket)
        for buckets in self._by_trained.values():
            buckets.discard(bucket)

    def _buckets_of_parameters(self) -> ShapeBuckets:
        buckets = self._by_trained.get(self.parameters.key)
        if buckets is None:
            if self.all:
                log.info(
                    "%s: other parameters train, or in another dtype or mode: batches are planned again",
                    self._name,
                )
            buckets = self._by_trained[self.parameters.key] = ShapeBuckets()
            for bucket in self._given:
                buckets.add(bucket)
        return buckets

    def _log_policy(self, event: str, policy: Policy) -> None:
        predicted = policy.predicted
        log.info(
            "%s: %s: predicted peak %s of %s, %.1f%% of the step recomputed (%d of %d ops)%s",
            self._name,
            event,
            format_bytes(predicted.peak_bytes),
            format_bytes(policy.budget_bytes),
            100 * predicted.recompute_us / predicted.step_us if predicted.step_us else 0.0,
            policy.recomputed,
            len(policy.decisions),
            f", {format_bytes(predicted.moved_bytes)} moved to the host" if predicted.moved_bytes else "",
        )
