"""Test plans that save dropout masks as bits."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ac_client
from ac_client.runtime.policy_context import save_recompute_policy
from autoac.planner import Plan, Policy, plan
from autoac.planner.formats.policy import PACK
from autoac.planner.plan import plan_of
from autoac.planner.problem.build import build
from autoac.planner.problem.packing import with_packing, worth_packing
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.solver.start.search_problem import Problem
from autoac.profiler import profile
from benchmarks.fuzzers.packed_masks import tried_masks
from benchmarks.fuzzers.use_groups import AS_IT_IS, difference

PROGRAMS = int(os.environ.get("AUTOAC_PROGRAMS", "10"))  # the nightly target runs more
BATCH = torch.randn(6, 32, 24, generator=torch.Generator().manual_seed(0))


class Dropping(nn.Module):
    """Linear layers with a dropout after each, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.2)
        return x.square().mean()


def packed_plan(keep: bool = True) -> Plan:
    """Return a plan that packs every mask, and saves or recomputes all other ops."""
    found = profile(Dropping(), BATCH)
    step = build(found)
    graph = with_packing(step, worth_packing(step))
    assert len(graph.packs) == 4
    unpacks = {pack.unpack for pack in graph.packs}
    saved = {op for op in graph.everything if keep and op not in unpacks}
    save_set = with_forced_saves(graph, frozenset(saved | {pack.bits for pack in graph.packs}))
    return plan_of(Problem(graph, AS_IT_IS), found, 1 << 40, save_set)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_network_runs_as_planned_to_the_byte(seed: int) -> None:
    assert not tried_masks(seed).differs


@pytest.mark.parametrize("keep", [True, False])
def test_all_masks_as_bits(keep: bool) -> None:
    found = packed_plan(keep)
    policy = Policy.from_json(found.policy().to_json())
    assert list(policy.decisions.values()).count(PACK) == 4
    assert policy.version == 3
    assert not difference(Dropping, BATCH, policy, found.graph, found.save_set)


def test_plan_saves_masks_as_bits_where_they_do_not_fit() -> None:
    taken = profile(Dropping(), BATCH)
    found = plan(taken, budget_bytes=packed_plan().peak, gap=0.0)
    assert found.graph.packs
    assert not difference(Dropping, BATCH, found.policy(), found.graph, found.save_set)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def step(model: nn.Module, *, twice: bool = False) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(BATCH)
    loss.backward(retain_graph=twice)
    if twice:
        loss.backward()
    return gradients(model)


@pytest.mark.parametrize("twice", [False, True])
def test_second_backward_unpacks_again(twice: bool) -> None:
    model = Dropping()
    ac_client.apply(model, policy=packed_plan().policy(), strict=True)
    assert all(map(torch.equal, step(model, twice=twice), step(Dropping(), twice=twice)))


@pytest.mark.parametrize(
    "name", ["aten.addmm", "aten.tanh", "aten.bernoulli_", "aten.empty_like", "aten.mul"]
)
def test_what_is_no_mask_is_saved_as_it_is_whatever_a_policy_says(name: str) -> None:
    planned = packed_plan().policy()
    decisions = {key: PACK if name in key else fate for key, fate in planned.decisions.items()}
    policy = planned.model_copy(update={"decisions": decisions})
    assert list(policy.decisions.values()).count(PACK) > 4
    model = Dropping()
    ac_client.apply(model, policy=Policy.from_json(policy.to_json()), strict=True)
    assert all(map(torch.equal, step(model), step(Dropping())))


def test_mask_that_a_policy_of_the_user_decides_on_is_saved_as_it_is() -> None:
    class Inner(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            with save_recompute_policy("recompute_all"):
                return super().forward(x)

    model = Inner()
    ac_client.apply(model, policy=packed_plan().policy())
    assert all(map(torch.equal, step(model), step(Dropping())))
