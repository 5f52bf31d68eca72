"""Check which batches a bucket of a policy set covers, and that the set survives JSON."""

from __future__ import annotations

from functools import cache

import pytest

from autoac.planner import Constraints, MalformedPolicy, Policy, PolicySet, UnknownVersion
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


def image(*dims: int) -> dict[str, str]:
    return {"0": f"float32{list(dims)}"}


@cache
def policy() -> Policy:
    return Policy.model_validate(
        {
            "model": "M",
            "fingerprint": "f",
            "profile_digest": "d",
            "inputs": ["int64[4]"],
            "device": "cpu",
            "budget_bytes": 8,
            "stopped": "optimal",
            "predicted": {
                "peak_bytes": 8,
                "peak_at": "a/b#0, forward",
                "save_all_peak_bytes": 9,
                "static_bytes": 1,
                "recompute_us": 1.0,
                "recompute_bound_us": 1.0,
                "step_us": 2.0,
                "gap": 0.0,
                "stall_us": 0.0,
                "moved_bytes": 0,
                "microbatches": 1,
            },
            "tools": {},
            "corrected_by_bytes": 0,
            "constraints": Constraints(),
            "forward_ends": [],
            "use_groups": {},
            "moves": {},
            "needed_until": {},
            "decisions": {"a/b#0": "save"},
        }
    )


def test_policy_set_round_trips_through_json() -> None:
    corrected = policy().model_copy(update={"corrected_by_bytes": -3})
    made = PolicySet(
        buckets=(Bucket(shape=image(4, 4), policy=policy()), Bucket(shape=image(8, 8), policy=corrected))
    )
    again = PolicySet.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[]", MalformedPolicy),
        ("{", MalformedPolicy),
        ('{"format": "autoac.policy-set", "version": 1}', UnknownVersion),
        ('{"format": "autoac.policy-set", "version": 7, "buckets": [{}]}', MalformedPolicy),
        ('{"format": "autoac.policy", "version": 7, "buckets": []}', MalformedPolicy),
    ],
)
def test_text_that_is_not_a_policy_set_is_rejected(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        PolicySet.from_json(text)
