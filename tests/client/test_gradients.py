"""Gradients, outputs, buffers and generators are those of the plain step, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ConvNet, InPlace, Recurrent, Routed, Transformer, Views
from stepping import assert_same, step
from torch import nn

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "transformer": (Transformer, lambda: ((torch.randn(2, 8, 32, requires_grad=True),), {})),
    "transformer with nested keywords": (
        Transformer,
        lambda: ((torch.randn(2, 8, 32),), {"scale": {"by": torch.randn(32, requires_grad=True)}}),
    ),
    "convolutions": (ConvNet, lambda: ((torch.randn(4, 3, 8, 8, requires_grad=True),), {})),
    "recurrent": (Recurrent, lambda: ((torch.randn(2, 5, 8),), {})),
    "routed": (Routed, lambda: ((torch.randn(12, 16, requires_grad=True),), {})),
    "in place": (InPlace, lambda: ((torch.randn(4, 16, requires_grad=True),), {})),
    "views": (Views, lambda: ((torch.randn(4, 8, requires_grad=True),), {})),
}


def coin(seed: int, probability: float) -> Callable[..., bool]:
    chance = random.Random(seed)
    return lambda ctx, out, op, *args, **kwargs: chance.random() < probability


POLICIES = {
    "recompute all": lambda: "recompute_all",
    "save all": lambda: "must_save_all",
    "save matmuls": lambda: [torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.convolution],
    **{f"random {seed}": (lambda seed=seed: coin(seed, 0.2 + 0.1 * seed)) for seed in range(7)},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_a_policy_changes_no_bit(case: str, policy: str) -> None:
    make, batch = CASES[case]
    torch.manual_seed(5)
    args, kwargs = batch()
    plain = step(make, *args, **kwargs)
    planned = step(make, *args, policy=POLICIES[policy](), **kwargs)
    assert_same(plain, planned)
    if policy == "recompute all":
        assert planned.recomputed(), "nothing was recomputed, so nothing was tested"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_in_forward_and_around_backward(dtype: torch.dtype, backward_inside: bool) -> None:
    x = torch.randn(2, 8, 32, requires_grad=True)

    def backward(loss: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=backward_inside):
            loss.backward()

    def around() -> Any:
        return torch.autocast("cpu", dtype=dtype)

    plain = step(Transformer, x, around=around, backward=backward)
    planned = step(Transformer, x, policy="recompute_all", around=around, backward=backward)
    assert_same(plain, planned)


def test_statistics_of_batch_norm_move_once() -> None:
    planned = step(ConvNet, torch.randn(4, 3, 8, 8), policy="recompute_all")
    assert planned.buffers["bn1.num_batches_tracked"] == 1
    assert "aten.native_batch_norm.default" in planned.recomputed()


def test_every_op_is_run_again_at_most_once() -> None:
    planned = step(Transformer, torch.randn(2, 8, 32), policy="recompute_all")
    computed = [name for kind, name in planned.log.events if kind == "compute"]
    assert len(planned.recomputed()) <= len(computed)
    assert planned.recomputed().count("aten.addmm.default") <= computed.count("aten.addmm.default")
