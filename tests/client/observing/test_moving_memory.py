"""Test models whose memory is written, or freed and filled again, between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ac_client

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 512
Backward = Callable[[nn.Sequential, Tensor], None]


class Frees(nn.Module):
    """As Megatron's checkpoint without output: the activation exists while it is read."""

    width = 32

    def __init__(self, by_op: bool) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(self.width), nn.Linear(self.width, 8 * self.width)
        self.down, self.by_op = nn.Linear(8 * self.width, self.width), by_op

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


class Scaled(nn.Module):
    """Adds a buffer and another small tensor, of which autograd saves nothing."""

    width = 64

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(self.width, 4 * self.width), nn.Linear(4 * self.width, self.width)
        self.register_buffer("scale", torch.ones(()))
        self.temperature = torch.full((1,), 2.0)  # not registered

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x) + self.scale - self.temperature))


def move(model: nn.Sequential) -> None:
    for block in model:
        block.scale.add_(0.25)
        block.temperature.mul_(1.5)


def moved_by_the_loop(model: nn.Sequential, loss: Tensor) -> None:
    move(model)
    loss.backward()


def moved_in_backward(model: nn.Sequential, loss: Tensor) -> None:
    loss.register_hook(lambda _gradient: move(model))
    loss.backward()


def train(
    make: Callable[[], nn.Module], backward: Backward, budget_mib: float | None
) -> tuple[list[Tensor], ac_client.Report | None]:
    """Return losses, gradients and buffers of four steps, and the report with the peak of the last."""
    torch.manual_seed(0)
    model = nn.Sequential(*[make() for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if budget_mib is not None:
        ac_client.apply(model, budget_mib / 1024, optimizer=optimizer, group=None)
    found = []

    def step() -> None:
        loss = model(torch.randn(ROWS, model[0].width)).square().mean()
        backward(model, loss)
        found.extend([loss.detach(), *[p.grad.clone() for p in model.parameters()]])
        found.extend(buffer.clone() for buffer in model.buffers())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with nullcontext() if budget_mib is None else ac_client.applied(model).measure():
        step()
    return found, None if budget_mib is None else ac_client.applied(model).report()


@pytest.mark.parametrize(
    ("make", "backward", "budget_mib"),
    [
        (partial(Frees, by_op=True), lambda _, loss: loss.backward(), 5.55),
        (partial(Frees, by_op=False), lambda _, loss: loss.backward(), 5.55),
        (Scaled, moved_by_the_loop, 5.0),
        (Scaled, moved_in_backward, 5.0),
    ],
    ids=["filled by an op", "filled by its storage", "written by the loop", "written in backward"],
)
def test_memory_that_moves_has_the_plain_gradients_and_the_predicted_peak(
    make: Callable[[], nn.Module], backward: Backward, budget_mib: float
) -> None:
    """Leave to the model what it fills again, and let ops recompute from the old contents of buffers."""
    plain, _ = train(make, backward, None)
    planned, report = train(make, backward, budget_mib)
    assert all(map(torch.equal, planned, plain))
    assert report.recomputed > 0
    assert report.measured_peak_bytes == report.predicted_peak_bytes
