"""A block may free the memory of a saved tensor, and fill it again in a hook before backward needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ac_client

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS = 32, 512


class Block(nn.Module):
    """As Megatron's checkpoint without output: the activation exists while it is read."""

    def __init__(self, by_op: bool) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH)
        self.down, self.by_op = nn.Linear(8 * WIDTH, WIDTH), by_op

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(F.gelu(self.norm(x)))
        act = F.silu(wide)
        out = self.down(act)
        if out.requires_grad:
            storage, source, kept = act.untyped_storage(), wide.detach(), act.data
            nbytes = storage.nbytes()
            storage.resize_(0)

            def fill(_gradient: Any) -> None:
                storage.resize_(nbytes)
                if self.by_op:
                    kept.copy_(F.silu(source))
                else:
                    storage.copy_(F.silu(source).untyped_storage())

            out.register_hook(fill)
        return x + out


def train(budget: float | None, by_op: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(by_op) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if budget is not None:
        ac_client.apply(model, budget / 1024, optimizer=optimizer, group=None)
    found = []

    def step() -> None:
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        found.extend([loss.detach(), *[p.grad.clone() for p in model.parameters()]])
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    if budget is None:
        step()
        return found
    with ac_client.applied(model).measure():
        step()
    report = ac_client.applied(model).report()
    assert report.recomputed > 0
    assert report.measured_peak_bytes == report.predicted_peak_bytes
    return found


@pytest.mark.parametrize("by_op", [True, False], ids=["by an op", "by its storage"])
def test_saved_tensors_that_the_model_frees_and_fills_again_are_left_to_it(by_op: bool) -> None:
    plain = train(None, by_op)
    assert all(map(torch.equal, train(5.55, by_op), plain))
