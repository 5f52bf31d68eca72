"""The policies of one model by the shape of the batch: the smallest bucket that covers a batch runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from ac_client.planning.batch_shape import Key, leaves_of
from ac_client.planning.loaded_policy import PlannedBucket
from autoac.planner.formats.policy_set import Extent

MOST_BUCKETS = 32  # a loop with ever larger batches must not plan for ever
MOST_KEYS = 10_000


class ShapeBuckets:
    """All policies of a model while one set of its parameters trains.

    Attributes:
        all: buckets in the order in which they were planned.
        single_policy: the bucket that runs every batch, if there is one.
        known: the bucket chosen for a key; read by each forward.
    """

    def __init__(self) -> None:
        self.all: list[PlannedBucket] = []
        self.single_policy: PlannedBucket | None = None
        self.known: dict[Key, PlannedBucket] = {}

    def covering(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlannedBucket | None:
        """Return the smallest bucket that covers this batch; None if no bucket does."""
        batch = Extent.of_leaves(leaves_of(args, kwargs))
        covering = [(b.extent.elements, b) for b in self.all if b.extent and b.extent.covers(batch)]
        if covering:
            return min(covering, key=itemgetter(0))[1]
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
        self.single_policy = None if self.single_policy is bucket else self.single_policy
        self.known.clear()
