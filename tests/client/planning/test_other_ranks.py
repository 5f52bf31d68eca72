"""A policy says for which ranks it was planned, and is planned again, or refused, where others need more."""

from __future__ import annotations

import logging

import pytest
import stepping
import torch
from ranks import outputs_of_ranks
from stepping import seeded
from torch import Tensor, nn

import ac_client
from ac_client.errors import OtherRanks
from autoac.planner import Policy
from autoac.planner.units import GIB
from benchmarks.models.modules import Transformer

SHARDED = """
from torch.distributed.fsdp import fully_shard
from benchmarks.models.modules import Transformer
from stepping import scalar
import ac_client
torch.manual_seed(0)
model = fully_shard(Transformer())
ac_client.apply(model, 1, optimizer=torch.optim.Adam(model.parameters()))
for _ in range(2):
    scalar(model(torch.randn(2, 16, 32))).backward()
    model.zero_grad()
print(ac_client.applied(model).policy.to_json())
"""


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    policy = Policy.from_json(
        outputs_of_ranks(SHARDED, tmp_path_factory.mktemp("ranks") / "store", timeout=300)[0]
    )
    return policy.model_copy(update={"budget_bytes": policy.predicted.peak_bytes})


def trained(model: nn.Module) -> list[Tensor]:
    return stepping.trained(model, lambda _: torch.randn(2, 16, 32), 2, lambda x: model(x)["logits"])


def test_policy_names_its_ranks_and_mesh(of_two_ranks: Policy, caplog: pytest.LogCaptureFixture) -> None:
    assert of_two_ranks.tools["ranks"] == "2 (mesh 2)"
    ac_client.apply(seeded(Transformer), policy=of_two_ranks)
    assert "the policy is for ranks 2 (mesh 2), not 1" in caplog.text


def test_policy_of_other_ranks_that_needs_more_here_is_refused(of_two_ranks: Policy) -> None:
    model = seeded(Transformer)
    ac_client.apply(model, policy=of_two_ranks, optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(OtherRanks) as refused:
        model(torch.randn(2, 16, 32))
    assert refused.value.needs > refused.value.limit == of_two_ranks.budget_bytes


def test_policy_of_other_ranks_is_planned_again_within_a_budget(
    of_two_ranks: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(Transformer)
    adam = torch.optim.Adam(model.parameters())
    ac_client.apply(model, 1.0, policy=of_two_ranks, optimizer=adam)
    with caplog.at_level(logging.WARNING, logger="ac_client"):
        gradients = trained(model)
    assert "planned again" in caplog.text
    planned = ac_client.applied(model).policy
    assert "ranks" not in planned.tools
    assert planned.predicted.static_bytes > of_two_ranks.predicted.static_bytes
    assert planned.budget_bytes == GIB
    assert all(map(torch.equal, gradients, trained(seeded(Transformer))))
