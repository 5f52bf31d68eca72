"""Test ops that fill an argument after autograd has packed it: its contents are those after the op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import stepping
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torchs

import ac_client
from autoac.tape.torch_facts import op_facts

HOW: dict[str, Callable[..., Any]] = {
    "plain": lambda function, x: function(x),
    "checkpoint": ac_client.checkpoint,
    "selective checkpoint": functools.partial(
        ac_client.checkpoint,
        context_fn=functools.partial(
            torchs.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
        ),
    ),
    "checkpoint of torch": functools.partial(torchs.checkpoint, use_reentrant=False),
}

# What makes the argument that the op fills.
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "by empty": torch.empty_like,
    "by an op": lambda h: torch.zeros_like(h).add(1),
    "outside": lambda h: torch.from_numpy(numpy.ones(h.shape, numpy.float32)),
}


class Noisy(nn.Module):
    """Call an op of `_FILLS_PACKED` in a block, which runs as `how` says."""

    def __init__(self, op: str, how: str, made: str) -> None:
        super().__init__()
        self.op = getattr(torch._C._nn, op.removeprefix("aten::"))
        self.how, self.made = HOW[how], MADE[made]
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def block(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(self.op(h, self.made(h.detach()), 0.1, 0.4, True).sin())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.how(self.block, x)


def trained(op: str, how: str, made: str, budget_mib: float | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Noisy(op, how, made) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if budget_mib is not None:
        ac_client.apply(model, budget_gb=budget_mib / 1024, optimizer=optimizer)
    return stepping.trained(model, lambda _: torch.randn(256, 16), optimizer=optimizer)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("op", op_facts._FILLS_PACKED)
def test_gradients_are_plain(op: str, how: str, made: str) -> None:
    want = trained(op, "plain", made, None)
    assert all(map(torch.equal, trained(op, how, made, None), want))


@pytest.mark.parametrize(("made", "budget_mib"), [("by empty", 2.0), ("outside", 0.85)])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("op", op_facts._FILLS_PACKED)
def test_gradients_of_a_planned_model_are_plain(op: str, how: str, made: str, budget_mib: float) -> None:
    want = trained(op, "plain", made, None)
    assert all(map(torch.equal, trained(op, how, made, budget_mib), want))
