"""Test that training whose first step is observed equals plain training, and keeps the budget afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ac_client
from autoac.planner import build
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import profile

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
GIB = 2**30


class Layers(nn.Module):
    """Layers with dropout and an in-place activation; counts its calls."""

    def __init__(self, depth: int = 6, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(inplace=True), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.checkpoints = checkpoints
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            inner = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
            x = F.dropout(x + inner, 0.1)
        return self.norm(x)


@dataclass
class Training:
    """A model with its optimizer, and the losses so far."""

    model: Layers
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)

    def loss(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        self.losses.append(loss.detach())
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def batches(size: int = 256) -> Iterator[Tensor]:
    while True:
        yield torch.randn(size, WIDTH)


def plain_loop(training: Training, steps: int) -> None:
    for x, _ in zip(batches(), range(steps), strict=False):
        training.loss(x).backward()
        training.step()


def loss_outside(training: Training, steps: int) -> None:
    head = torch.randn(WIDTH, 512)
    for x, _ in zip(batches(), range(steps), strict=False):
        logits = training.model(x) @ head
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        training.losses.append(loss.detach())
        loss.backward()
        training.step()


def accumulation(training: Training, steps: int) -> None:
    for x, i in zip(batches(), range(2 * steps), strict=False):
        (training.loss(x) / 2).backward()
        if i % 2:
            training.step()


def two_forwards(training: Training, steps: int) -> None:
    for x, _ in zip(batches(), range(steps), strict=False):
        (training.loss(x) + training.loss(x.flip(0))).backward()
        training.step()


def two_backwards(training: Training, steps: int) -> None:
    for x, _ in zip(batches(), range(steps), strict=False):
        loss = training.loss(x)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        training.step()


def gradient_of_inputs(training: Training, steps: int) -> None:
    for x, _ in zip(batches(), range(steps), strict=False):
        training.loss(x.requires_grad_()).backward()
        assert x.grad is not None
        training.losses.append(x.grad)
        training.step()


def evaluations(training: Training, steps: int) -> None:
    for x, _ in zip(batches(), range(steps), strict=False):
        training.model.eval()
        with torch.no_grad():
            training.losses.append(training.model(x).mean())
        training.model.train()
        training.loss(x).backward()
        training.model.eval()
        with torch.no_grad():
            training.losses.append(training.model(x).mean())
        training.model.train()
        training.step()


def forward_without_backward(training: Training, steps: int) -> None:
    training.loss(next(batches()))
    plain_loop(training, steps)


def growing_batches(training: Training, steps: int) -> None:
    for i in range(2 * steps):
        training.loss(torch.randn(256 if i < steps else 320, WIDTH)).backward()
        training.step()


def fails_once(training: Training, steps: int) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        training.loss(torch.randn(256, WIDTH + 1))
    plain_loop(training, steps)


LOOPS = [
    plain_loop,
    loss_outside,
    accumulation,
    two_forwards,
    two_backwards,
    gradient_of_inputs,
    evaluations,
    forward_without_backward,
    growing_batches,
    fails_once,
]


def training(*, checkpoints: bool = False) -> Training:
    torch.manual_seed(0)
    model = Layers(checkpoints=checkpoints).train()
    return Training(model, torch.optim.SGD(model.parameters(), 0.1))


def half_way() -> float:
    """Return a budget between the smallest peak and that of plain training, in GiB."""
    model = Layers().train()
    graph = build(profile(model, torch.randn(256, WIDTH)))
    most, least = peak_bytes(graph, graph.everything), peak_bytes(graph, graph.must_save)
    return (most + least) / 2 / GIB


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_training_whose_first_step_is_observed_equals_plain_training(
    loop: Callable[[Training, int], None],
) -> None:
    plain = training()
    torch.manual_seed(1)
    loop(plain, 5)
    planned = training()
    ac_client.apply(planned.model, budget_gb=half_way(), first_step="observed", group=None)
    torch.manual_seed(1)
    loop(planned, 5)
    rehearsed = loop is two_backwards  # until a retained graph is observed too
    assert planned.model.calls == plain.model.calls or rehearsed
    assert all(map(torch.equal, planned.losses, plain.losses))
    ours, theirs = planned.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ac_client.applied(planned.model).policy is not None
