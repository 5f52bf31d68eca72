"""Constraints in `apply`, and what the profiler saves by default because it decides."""

from __future__ import annotations

import sys

import pytest
import torch
from checkpoints import same
from stepping import EventLog, gradients, recomputed, seeded
from torch import Tensor, nn

import ac_client
from ac_client import Constraints, InvalidConstraints, save_recompute_policy
from autoac.planner import build, constrained, plan
from autoac.planner.formats.profile import DECIDES
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import OpId
from autoac.profiler import profile


class Routed(nn.Module):
    """Two experts; the larger score decides which of them a row goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(1, dim=-1)
        both = torch.stack([expert(x) for expert in self.experts], dim=1)
        picked = both.gather(1, chosen.unsqueeze(-1).expand(-1, 1, 16)).squeeze(1)
        return torch.tanh(picked * weight)


def model() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(*(Routed() for _ in range(3))))


def test_planned_model_obeys_constraints_with_the_plain_gradients() -> None:
    x = torch.randn(64, 16)
    rules = Constraints(pin_recompute=("*.experts",), fsdp_units=("*",), forward_budget_bytes=1 << 29)
    planned = ac_client.apply(model(), budget_gb=1.0, constraints=rules)
    assert same(gradients(planned, x), gradients(model(), x))
    policy = ac_client.applied(planned).policy
    assert policy.constraints == rules
    assert {d for key, d in policy.decisions.items() if ".experts." in key} == {"recompute"}
    assert {d for key, d in policy.decisions.items() if "topk" in key} == {"save"}


def test_constraints_that_cannot_be_met_leave_the_model_as_it_was() -> None:
    net, x = model(), torch.randn(4, 16)
    ac_client.apply(net, budget_gb=1.0, constraints=Constraints(pin_save=("9",)))
    gradients(net, x)
    with pytest.raises(InvalidConstraints, match="pin_save '9' matches none"):
        net(x)
    with pytest.raises(ac_client.NotApplied):
        ac_client.applied(net)
    policy = plan(profile(net, x), budget_gb=1.0).policy()
    with pytest.raises(InvalidConstraints, match="carried out as it is"):
        ac_client.apply(net, policy=policy, constraints=Constraints(pin_save=("0",)))


def test_deciding_ops_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 16)
    found = profile(model(), x)
    rules = Constraints(pin_recompute=(".",))
    policy = plan(found, budget_gb=1.0, constraints=rules).policy()
    assert {d for key, d in policy.decisions.items() if "topk" in key} == {"save"}
    net = ac_client.apply(model(), policy=policy)
    log = EventLog()
    monkeypatch.setattr(
        sys.modules["ac_client.planning.planned_forward"],
        "save_recompute_policy",
        lambda policy: save_recompute_policy(policy, log=log),
    )
    assert same(gradients(net, x), gradients(model(), x))
    assert recomputed(log)
    assert not any("topk" in name for name in recomputed(log))


def test_gradients_that_would_exist_count_as_in_the_profile_of_a_step_that_finds_them() -> None:
    net, x = model(), torch.randn(64, 16)
    absent = profile(net, x)
    gradients(net, x)
    present = build(profile(net, x))
    assumed = constrained(absent, Constraints(gradients="present"))
    assert assumed.static_bytes == present.static_bytes
    assert assumed.closing_bytes == present.closing_bytes == 0
    some = frozenset(op.id for op in assumed.ops if op.id % 3)
    for save_set in (assumed.everything, frozenset[OpId](), some):
        assert peak_bytes(assumed, save_set) == peak_bytes(present, save_set)


BOUNDARIES = {
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(1).indices,
    "sort": lambda x: x.sort().indices,
    "max": lambda x: x.max(-1).indices,
    "greater": lambda x: x > 0,
    "isnan": lambda x: x.isnan(),
    "isposinf": lambda x: x.isposinf(),
    "any": lambda x: x.any(-1),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.detach().unique(),
    "count_nonzero": lambda x: x.count_nonzero(-1),
    "logical_not": lambda x: x.logical_not(),
    "mask": lambda x: (x > 0) & (x < 1),
    "long": lambda x: x.long(),
    "bool": lambda x: x.bool(),
    "cummax": lambda x: x.cummax(-1).indices,
    "searchsorted": lambda x: torch.searchsorted(x.detach()[0].sort().values, x.detach()),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0])),
    "multinomial": lambda x: x.softmax(-1).multinomial(1),
    "masked_select": lambda x: x.masked_select(x > 0),
    "item": lambda x: x.sum().item(),
}


class Deciding(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        decided = BOUNDARIES[self.name](y)
        shift = decided.sum() if isinstance(decided, Tensor) else decided
        return torch.tanh(y + shift)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_deciding_values_are_saved(name: str) -> None:
    graph = build(profile(Deciding(name), torch.randn(4, 8)))
    assert any(op.must_save for op in graph.ops), [op.name for op in graph.ops]


def test_dropout_masks_do_not_count_as_deciding() -> None:
    graph = build(profile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)))
    assert not any(op.must_save for op in graph.ops)
    assert DECIDES not in {op.must_save for op in constrained(graph, Constraints()).ops}
