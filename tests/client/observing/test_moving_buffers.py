"""A loop may write small buffers of the model between forward and backward: ops recompute from copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ac_client

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


class Scaled(nn.Module):
    """Adds a buffer and another small tensor, of which autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))
        self.temperature = torch.full((1,), 2.0)  # not registered

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x) + self.scale - self.temperature))


def move(model: nn.Sequential) -> None:
    for block in model:
        block.scale.add_(0.25)
        block.temperature.mul_(1.5)


def in_the_loop(model: nn.Sequential, loss: Tensor) -> None:
    move(model)
    loss.backward()


def in_backward(model: nn.Sequential, loss: Tensor) -> None:
    loss.register_hook(lambda _gradient: move(model))
    loss.backward()


def train(budget: float | None, backward: Callable[[nn.Sequential, Tensor], None]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Scaled() for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if budget is not None:
        ac_client.apply(model, budget / 1024, optimizer=optimizer, group=None)
    found = []
    for _ in range(4):
        loss = model(torch.randn(512, WIDTH)).square().mean()
        backward(model, loss)
        found += [loss.detach(), *[p.grad.clone() for p in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    if budget is not None:
        assert ac_client.applied(model).report().recomputed > 0
    return [*found, *[block.scale for block in model]]


@pytest.mark.parametrize("backward", [in_the_loop, in_backward])
def test_small_buffers_that_the_loop_writes_before_backward_recompute_from_their_old_contents(
    backward: Callable[[nn.Sequential, Tensor], None],
) -> None:
    assert all(map(torch.equal, train(5.0, backward), train(None, backward)))
