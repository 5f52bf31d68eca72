"""Check which batches a bucket of a policy set covers, and that the set survives JSON."""

from __future__ import annotations

import graphs
import pytest

from autoac.planner import PolicySet, plan
from autoac.planner.formats.policy_set import Bucket, Extent


@pytest.mark.parametrize(
    ("bucket", "batch", "covered"),
    [
        ({"0": "int64[4, 128]"}, {"0": "int64[4, 128]"}, True),
        ({"0": "int64[4, 128]"}, {"0": "int64[3, 1]"}, True),
        ({"0": "int64[4, 128]"}, {"0": "int64[5, 1]"}, False),
        ({"0": "int64[4, 128]"}, {"0": "int32[4, 128]"}, False),
        ({"0": "int64[4, 128]"}, {"0": "int64[4]"}, False),
        ({"0": "float32[]"}, {"0": "float32[]"}, True),
        ({"0": "float32[0, 2]"}, {"0": "float32[0, 1]"}, True),
        ({"x": "int64[4]"}, {"y": "int64[4]"}, False),
        ({"x": "int64[4]"}, {"x": "int64[4]", "y": "int64[4]"}, False),
        ({"x": "int64[4]", "flag": "True"}, {"x": "int64[4]", "flag": "False"}, False),
        ({"x": "int64[4]", "n": "int"}, {"x": "int64[2]", "n": "int"}, True),
        ({"x": "None"}, {"x": "int64[4]"}, False),
        ({}, {}, True),
    ],
)
def test_bucket_covers_batches_of_its_kind_that_are_not_larger(
    bucket: dict[str, str], batch: dict[str, str], covered: bool
) -> None:
    assert Extent.of(bucket).covers(Extent.of(batch)) is covered


def test_policy_set_round_trips_through_json() -> None:
    policy = plan(graphs.dropout(), budget_gb=1).policy()
    corrected = policy.model_copy(update={"corrected_by_bytes": -3})
    sides = {4: policy, 8: corrected}
    made = PolicySet(
        buckets=tuple(Bucket(shape={"0": f"float32[{n}, {n}]"}, policy=p) for n, p in sides.items())
    )
    again = PolicySet.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
