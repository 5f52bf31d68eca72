"""Recompute around each collective of torch.distributed on real ranks: equal to plain, silent in backward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import outputs_of_ranks

SCRIPT = """
import json
from autoac.tape.torch_facts import minor_version
from fuzzers.collectives import COLLECTIVES, all_to_all, differences, functional_irecv

found = {}
missing = {all_to_all, functional_irecv} if minor_version() < (2, 12) else set()
for collective in [each for each in COLLECTIVES if each not in missing][::STRIDE]:
    found.update(differences(collective, WAYS))
print(json.dumps(found))
"""


@pytest.mark.parametrize(("world", "ways", "stride"), [(2, ["apply", "function"], 1), (4, ["checkpoint"], 3)])
def test_recompute_around_a_collective_is_equal_to_plain_and_never_communicates(
    tmp_path: Path, world: int, ways: list[str], stride: int
) -> None:
    script = f"WAYS, STRIDE = {ways}, {stride}\n{SCRIPT}"
    for out in outputs_of_ranks(script, tmp_path / "store", world):
        found = json.loads(out)
        assert len(found) > 20
        assert {where: differs for where, differs in found.items() if differs} == {}
