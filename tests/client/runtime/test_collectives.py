"""Recompute around each collective of torch.distributed on real ranks: equal to plain, silent in backward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import outputs_of_ranks

SCRIPT = """
import json
from fuzzers.collectives import COLLECTIVES, differences, tried_experts

found = {}
for collective in COLLECTIVES[::STRIDE]:
    found.update(differences(collective, WAYS))
found["experts"] = "".join(tried_experts(0, PLANS)[0])
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("world", "ways", "plans", "stride"), [(2, ["apply", "function"], 3, 1), (4, ["checkpoint"], 1, 3)]
)
def test_recompute_around_a_collective_is_equal_to_plain_and_never_communicates(
    tmp_path: Path, world: int, ways: list[str], plans: int, stride: int
) -> None:
    script = f"WAYS, PLANS, STRIDE = {ways}, {plans}, {stride}\n{SCRIPT}"
    for out in outputs_of_ranks(script, tmp_path / "store", world):
        found = json.loads(out)
        assert len(found) > 20
        assert {where: differs for where, differs in found.items() if differs} == {}
