"""Tensor parallelism: the ops below DTensors are recomputed, and the smallest peak is below checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_setups import Facts, facts_of
from ranks import outputs_of_ranks

ON_TWO = ["TP, sequence", "TP, loss", "TP, dropout", "TP, uneven shards", "TP, functions"]
ON_FOUR = ["FSDP2 over TP 2x2"]
AGAIN = "TP, sequence, collectives again"
AGAIN_ON_FOUR = "FSDP2 over TP 2x2, collectives again"

BySetup = dict[str, list[Facts]]


def facts_on(backend: str, stores: pytest.TempPathFactory, only: list[int] | None = None) -> BySetup:
    folder = stores.mktemp(backend)
    on_two = facts_of([*ON_TWO, AGAIN], folder / "2", backend, only, exact=False)
    return on_two | facts_of([*ON_FOUR, AGAIN_ON_FOUR], folder / "4", backend, only, exact=False)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> BySetup:
    return facts_on("gloo", tmp_path_factory)


@pytest.fixture(scope="module")
def on_fake_ranks(tmp_path_factory: pytest.TempPathFactory) -> BySetup:
    """Return facts of the first rank, which has the largest shards; nothing is freed late, as gloo may."""
    return facts_on("fake", tmp_path_factory, [0])


@pytest.mark.parametrize("setup", ON_TWO + ON_FOUR)
def test_tensor_parallel_model_has_the_gradients_of_the_plain_one(setup: str, on_ranks: BySetup) -> None:
    for facts in on_ranks[setup]:
        assert facts["equal"]
        assert facts["recomputed"] > 0
        assert facts["off path"] == ""
        assert facts["collectives"][0] == facts["collectives"][1]


@pytest.mark.parametrize("setup", ON_TWO + ON_FOUR)
def test_tensor_parallel_model_is_recomputed_below_its_dtensors(setup: str, on_fake_ranks: BySetup) -> None:
    for facts in on_fake_ranks[setup]:
        assert facts["smallest"] < facts["checkpoint"] < 0.7 * facts["plain"]
        assert facts["off"] == 0


@pytest.mark.parametrize("setup", [AGAIN, AGAIN_ON_FOUR])
def test_collectives_that_are_repeated_lower_the_smallest_peak(
    setup: str, on_ranks: BySetup, on_fake_ranks: BySetup
) -> None:
    saving = setup.removesuffix(", collectives again")
    for facts in on_ranks[setup]:
        assert facts["equal"]
        assert facts["off path"] == ""
        assert facts["collectives"][0] > facts["collectives"][1]
    for facts, default in zip(on_fake_ranks[setup], on_fake_ranks[saving], strict=True):
        assert facts["smallest"] < 0.95 * default["smallest"]
        assert abs(facts["off"]) <= 12, "scalars that Python makes for a masked embedding"


REFUSED = """
import json
import logging
import torch.nn.functional as F
from rank_setups import SETUPS, made, step
import ac_client
from autoac.planner import Constraints

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("ac_client").addHandler(handler)
again = Constraints(save_collectives=False, pin_recompute=("blocks.*",))

def planned(setup, **options):
    model = ac_client.apply(made(setup), 1.0, constraints=again, **options)
    said.clear()
    for number in range(2):
        model.zero_grad()
        step(setup, model, number)
    return model, ac_client.applied(model).policy

def repeats(policy):
    return any("all_gather_into" in key and how == "recompute" for key, how in policy.decisions.items())

found = {}
for name, options in ("TP, uneven shards", {}), ("TP, sequence", {"group": None}), ("TP, sequence", {}):
    model, policy = planned(SETUPS[name], **options)
    found[f"{name}{options}"] = repeats(policy), any("saves collectives" in message for message in said)
step(SETUPS[name], model, 2)  # which finds gradients
found["stays"] = ac_client.applied(model).policy.decisions == policy.decisions
model.blocks[1].feed.forward = lambda x: model.blocks[1].feed.down(F.gelu(model.blocks[1].feed.up(x)))
try:
    step(SETUPS[name], model, 3)
except RuntimeError as error:
    found["left"] = str(error)
print(json.dumps(found))
"""


def test_collectives_are_saved_or_the_forward_raises_where_ranks_may_differ(tmp_path: Path) -> None:
    ranks = [json.loads(out.splitlines()[-1]) for out in outputs_of_ranks(REFUSED, tmp_path / "store")]
    for found in ranks:
        for case in "TP, uneven shards{}", "TP, sequence{'group': None}":
            assert not found[case][0]
            assert any(one[case][1] for one in ranks), "the rank that plans warns"
        assert found["TP, sequence{}"] == [True, False]
        assert found["stays"]
        assert "save_collectives" in found["left"]


@pytest.mark.parametrize("setup", ["FSDP2, 1F1B", "experts"])
def test_ranks_that_exchange_in_forward_are_planned_below_the_peak_of_checkpoints(
    setup: str, tmp_path: Path
) -> None:
    for facts in facts_of([setup], tmp_path / "store", "gloo")[setup]:
        assert facts["equal"]
        assert facts["recomputed"] > 0
        assert facts["collectives"][0] == facts["collectives"][1]
        assert facts["smallest"] < facts["checkpoint"]
        assert facts["off"] <= 0
