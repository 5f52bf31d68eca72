"""Test the names that equivalent kernels share in keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoac.planner import Policy
from autoac.planner.formats.op_key import kernels_of, name_in_keys, with_shared_names


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash"])
def test_kernels_of_attention_share_a_name(kernel: str) -> None:
    name = name_in_keys(f"aten._scaled_dot_product_{kernel}_attention.default")
    assert name == "aten.scaled_dot_product_attention.default"
    assert f"aten._scaled_dot_product_{kernel}_attention.default" in kernels_of(name)


def test_keys_that_name_kernels_are_numbered_anew() -> None:
    keys = ["a/aten.native_batch_norm.default#0", "a/aten.cudnn_batch_norm.default#0", "a/aten.mm.default#4"]
    assert with_shared_names(keys) == [
        "a/aten.batch_norm.default#0",
        "a/aten.batch_norm.default#1",
        "a/aten.mm.default#4",
    ]


def test_older_policy_is_read_with_the_shared_names() -> None:
    file = Path(__file__).parents[3] / "examples/regenerate/policies/convnet-1.1gib.json"
    data = json.loads(file.read_text()) | {"decisions": {"bn/aten.cudnn_batch_norm.default#0": "recompute"}}
    assert Policy.model_validate(data).decisions == {"bn/aten.batch_norm.default#0": "recompute"}
