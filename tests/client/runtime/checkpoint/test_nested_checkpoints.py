"""Put checkpoints into checkpoints, policies and planned models, and compare with plain gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import THEIRS, chain, replayed, same
from fuzzers.nested_checkpoints import compare
from stepping import EventLog, SeenOps, recomputed
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import ac_client
from ac_client import checkpoint, save_recompute_policy


@pytest.mark.parametrize("depth", [2, 4])
def test_ops_of_nested_checkpoints_are_recomputed_once_for_each_level(x: Tensor, depth: int) -> None:
    def f(how: Callable[..., Tensor], level: int, t: Tensor) -> Tensor:
        y = t.neg().exp()
        y = (how(f, how, level - 1, y) if level > 1 else y).sin()
        return y * y

    want = torch.autograd.grad(f(lambda g, *args: g(*args), depth, x).sum(), x)
    for how in (checkpoint, THEIRS):
        loss = how(f, how, depth, x).sum()
        with SeenOps() as ops:
            got = torch.autograd.grad(loss, x)
        assert ops.ran["exp"] == ops.ran["sin"] == sum(range(depth + 1))
        assert same(got, want)


NESTINGS = int(os.environ.get("AUTOAC_NESTINGS", "16"))


@pytest.mark.parametrize("first", range(0, NESTINGS, 4))
def test_random_nestings_have_the_plain_gradients_and_at_most_the_peak_of_torch(first: int) -> None:
    assert [one for one in map(compare, range(first, first + 4)) if one.differs] == []


def test_must_save_all_around_a_checkpoint_saves_and_recompute_all_changes_nothing(x: Tensor) -> None:
    with save_recompute_policy("must_save_all"):
        saved = checkpoint(chain, x).sum()
    with save_recompute_policy("recompute_all"):
        remade = checkpoint(chain, x).sum()
    assert replayed(saved.backward, "exp", "sin") == [0, 0]
    assert replayed(remade.backward, "exp", "sin") == [1, 1]


def test_checkpoint_in_a_region_that_prefers_to_save_recomputes_only_its_own_ops(x: Tensor) -> None:
    log = EventLog()
    with save_recompute_policy(CheckpointPolicy.PREFER_SAVE, log=log):
        loss = checkpoint(lambda t: t.exp().sin(), x.cos()).tan().sum()
    want = torch.autograd.grad(x.cos().exp().sin().tan().sum(), x)
    assert same(torch.autograd.grad(loss, x), want)
    assert recomputed(log) == ["aten.exp.default"]


def test_policy_inside_a_checkpoint_can_insist_on_saving(x: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        with save_recompute_policy("must_save_all"):
            t = t.exp()
        return t.sin().square()

    assert replayed(checkpoint(f, x).sum().backward, "exp", "sin") == [0, 1]


@pytest.mark.parametrize(("outer", "inner"), [(checkpoint, THEIRS), (THEIRS, checkpoint)])
def test_checkpoints_of_torch_and_ours_inside_of_each_other_give_the_plain_gradients(
    x: Tensor, w: Tensor, outer: Callable[..., Tensor], inner: Callable[..., Tensor]
) -> None:
    want = torch.autograd.grad(chain(chain(x, w).exp()).sum(), (x, w))
    loss = outer(lambda t, v: chain(inner(chain, t, v).exp()), x, w).sum()
    assert same(torch.autograd.grad(loss, (x, w)), want)


@pytest.mark.parametrize("taken_over", [True, False])
def test_checkpoint_in_a_planned_model_has_plain_gradients(taken_over: bool) -> None:
    class Model(nn.Module):
        def __init__(self, how: Callable[..., Any]) -> None:
            super().__init__()
            self.how = how
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.how(lambda t: self.linear(t).exp().sin(), x)
            return y.tanh()

    def gradients(how: Callable[..., Any], budget_gb: float | None) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        model = Model(how)
        if budget_gb is not None:
            ac_client.apply(
                model, budget_gb, constraints=ac_client.Constraints(take_over_checkpoints=taken_over)
            )
        model(torch.ones(3, 4)).sum().backward()
        model.zero_grad()
        loss = model(torch.ones(3, 4)).sum()
        counts = replayed(loss.backward, "exp")
        return [p.grad for p in model.parameters()], counts

    want, _ = gradients(lambda f, t: f(t), None)
    got, counts = gradients(checkpoint, 1.0)
    assert same(got, want)
    assert counts == [0 if taken_over else 1]  # the plan has room for all
