"""Test the names that equivalent kernels share in keys."""

from __future__ import annotations

import pytest

from autoac.planner.formats.op_key import kernels_of, name_in_keys


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash"])
def test_kernels_of_attention_share_a_name(kernel: str) -> None:
    name = name_in_keys(f"aten._scaled_dot_product_{kernel}_attention.default")
    assert name == "aten.scaled_dot_product_attention.default"
    assert f"aten._scaled_dot_product_{kernel}_attention.default" in kernels_of(name)
