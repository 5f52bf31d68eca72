"""The policies of one model by the shape of the batch: the smallest bucket that covers a batch runs it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ac_client.planning.batch_shape import Key, leaves_of
from ac_client.planning.loaded_policy import PlannedBucket
from autoac.planner.formats.policy_set import Extent

MOST_BUCKETS = 32  # a loop with ever larger batches must not plan for ever
MOST_KEYS = 10_000


class _Extent(NamedTuple):
    """The dimensions of a bucket, in a list of buckets whose shapes have the same leaves and types."""

    total: int  # sum of `dims`: a smaller one than the batch's cannot cover it
    dims: tuple[int, ...]  # in the order of the batch key's second half
    bucket: PlannedBucket


class ShapeBuckets:
    """All policies of a model while one set of its parameters trains.

    A key is the structure of a batch, then its dimensions. `known` has the bucket of each key that was seen
    before. For each structure, the buckets of the same structure are remembered. So for a new key of a known
    structure, only dimensions are compared.

    Attributes:
        all: buckets in the order in which they were planned.
        single_policy: the bucket that runs every batch, if there is one.
        unplanned: keys of batches that have nothing to differentiate.
        known: the bucket chosen for a key; read by each forward.
        forwards: number of forwards before one backward to plan for.
    """

    def __init__(self) -> None:
        self.forwards = 1
        self.all: list[PlannedBucket] = []
        self.single_policy: PlannedBucket | None = None
        self.known: dict[Key, PlannedBucket] = {}
        self._alike: dict[tuple[Any, ...], list[_Extent]] = {}  # by first half of a key, the smallest first

    def covering(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PlannedBucket | None:
        """Return the smallest bucket that covers the batch with this key; None if no bucket does."""
        structure, dims = key
        alike = self._alike.get(structure)
        if alike is None:
            if len(self._alike) >= MOST_KEYS:
                self._alike.clear()
            alike = self._alike[structure] = self._built_alike(args, kwargs)
        total = sum(dims)
        for extent in alike:
            if extent.total >= total and all(map(operator.ge, extent.dims, dims)):
                return extent.bucket
        return self.all[0] if self.all and self.all[0].shape is None else None

    def _built_alike(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Extent]:
        leaves = leaves_of(args, kwargs)
        structure = Extent.of_leaves(leaves).structure
        extents = [(Extent.of(bucket.shape), bucket) for bucket in self.all if bucket.shape is not None]
        alike = sorted(
            (pair for pair in extents if pair[0].structure == structure), key=lambda pair: pair[0].elements
        )
        # An extent has its leaves by name; the sort is stable, so leaves of one name keep their order.
        by_name = sorted(range(len(leaves)), key=lambda i: leaves[i][0])
        begins, begin = [0] * len(leaves), 0
        for i in by_name:
            begins[i] = begin
            begin += len(leaves[i][2] or ())
        order = [
            dim
            for first, (_, _, dims) in zip(begins, leaves, strict=True)
            for dim in range(first, first + len(dims or ()))
        ]
        return [
            _Extent(sum(extent.dims), tuple(extent.dims[dim] for dim in order), bucket)
            for extent, bucket in alike
        ]

    def remember(self, key: Key, bucket: PlannedBucket) -> None:
        """Choose `bucket` for batches of `key`."""
        if len(self.known) >= MOST_KEYS:
            self.known.clear()
        self.known[key] = bucket

    def add(self, bucket: PlannedBucket) -> None:
        """Add `bucket`. If there was one for the same shape, the new one replaces it."""
        self.all = [*(old for old in self.all if old.shape != bucket.shape), bucket]
        self._alike.clear()
        self.known.clear()

    def discard(self, bucket: PlannedBucket) -> None:
        """Run no batch under `bucket` any more."""
        self.all = [other for other in self.all if other is not bucket]
        self.single_policy = None if self.single_policy is bucket else self.single_policy
        self._alike.clear()
        self.known.clear()
