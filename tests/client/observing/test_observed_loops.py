"""Test that training whose first step is observed equals plain training, and keeps the budget afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from stepping import functions_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ac_client
from ac_client import InfeasibleBudget
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import build
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import observed_step, profile

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
GIB = 2**30
HEAD = torch.linspace(-1, 1, 96 * WIDTH).reshape(WIDTH, 96)


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


def plain_step(training: Training, x: Tensor) -> None:
    training.loss(x).backward()


def loss_outside(training: Training, x: Tensor) -> None:
    logits = training.model(x) @ HEAD
    loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
    training.losses.append(loss.detach())
    loss.backward()


def accumulation(training: Training, x: Tensor) -> None:
    for part in (x, x.flip(0)):
        (training.loss(part) / 2).backward()


def two_forwards(training: Training, x: Tensor) -> None:
    (training.loss(x) + training.loss(x.flip(0))).backward()


def two_backwards(training: Training, x: Tensor) -> None:
    loss = training.loss(x)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def call_of_the_engine(training: Training, x: Tensor) -> None:
    """As in the pipeline schedules of Megatron."""
    loss = training.loss(x)
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def gradient_of_inputs(training: Training, x: Tensor) -> None:
    training.loss(x.requires_grad_()).backward()
    assert x.grad is not None
    training.losses.append(x.grad)


def evaluations(training: Training, x: Tensor) -> None:
    for trains in (True, False):
        training.model.eval()
        with torch.no_grad():
            training.losses.append(training.model(x).mean())
        training.model.train()
        if trains:
            training.loss(x).backward()


def forward_without_backward(training: Training, x: Tensor) -> None:
    if not training.losses:
        training.loss(x)
    training.loss(x).backward()


def growing_batches(training: Training, x: Tensor) -> None:
    training.loss(x if len(training.losses) < 3 else torch.randn(320, WIDTH)).backward()


def fails_once(training: Training, x: Tensor) -> None:
    if not training.losses:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            training.loss(torch.randn(256, WIDTH + 1))
    training.loss(x).backward()


LOOPS = functions_of(globals(), "training")


def train(training: Training, steps: int, step: Callable[[Training, Tensor], None] = plain_step) -> None:
    for _ in range(steps):
        step(training, torch.randn(256, WIDTH))
        training.step()


def training(*, checkpoints: bool = False) -> Training:
    torch.manual_seed(0)
    model = Layers(checkpoints=checkpoints).train()
    return Training(model, torch.optim.SGD(model.parameters(), 0.1))


def budget() -> float:
    """Return 0.8 of the peak of plain training, in GiB."""
    graph = build(profile(Layers().train(), torch.randn(256, WIDTH)))
    return 0.8 * peak_bytes(graph, graph.everything) / GIB


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_training_whose_first_step_is_observed_equals_plain_training(
    loop: Callable[[Training, Tensor], None],
) -> None:
    plain = training()
    torch.manual_seed(1)
    train(plain, 5, loop)
    planned = training()
    ac_client.apply(planned.model, budget_gb=budget(), group=None)
    torch.manual_seed(1)
    train(planned, 5, loop)
    assert planned.model.calls == plain.model.calls
    assert all(map(torch.equal, planned.losses, plain.losses))
    ours, theirs = planned.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ac_client.applied(planned.model).policy is not None


def test_observed_step_over_the_budget_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for limit, said in ((1 / 1024, 1), (budget(), 0)):
        planned = training()
        ac_client.apply(planned.model, budget_gb=limit, group=None)
        with pytest.raises(InfeasibleBudget) if said else nullcontext():
            train(planned, 3)
        messages = [record.getMessage() for record in caplog.records]
        assert sum("MiB over the budget of 1.00 MiB" in message for message in messages) == said
        caplog.clear()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_step_that_torchs_profiler_watches_takes_what_an_observed_one_takes(
    checkpoints: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, planned = training(checkpoints=checkpoints), training(checkpoints=checkpoints)
    ac_client.apply(planned.model, budget_gb=budget(), group=None)
    peaks = []
    for one in (plain, planned):
        torch.manual_seed(1)
        with AllocatorTimeline() as timeline:
            loss = one.loss(torch.randn(256, WIDTH))
            loss.backward()
        peaks.append(timeline.peak_bytes - 256 * WIDTH * 4)  # of the batch
        one.step()
        train(one, 1)
    observed = observed_step._latest.step() if observed_step._latest.step is not None else None
    assert observed.model() is planned.model
    assert peaks[1] == pytest.approx(observed.peak_nbytes - observed._static.total, rel=0.02)
    assert checkpoints or peaks[1] < 0.7 * peaks[0]
    ours, theirs = planned.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("torch.profiler is running" in message for message in messages) == 1


def test_torchs_profiler_is_free_after_an_observed_step_and_after_one_that_nobody_differentiates() -> None:
    planned = training()
    ac_client.apply(planned.model, budget_gb=budget(), group=None)
    loss = planned.loss(torch.randn(256, WIDTH))
    assert torch.autograd._profiler_enabled()
    del loss
    planned.losses.clear()
    assert not torch.autograd._profiler_enabled()
    planned.loss(torch.randn(256, WIDTH)).backward()
    assert not torch.autograd._profiler_enabled()


def test_interrupted_observed_forward_stands_in_the_way_of_no_other_model() -> None:
    first, second = training(), training()
    for planned in (first, second):
        ac_client.apply(planned.model, budget_gb=2 * budget(), group=None)
    first.model.norm.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.loss(torch.randn(256, WIDTH))
    train(second, 2)
    assert ac_client.applied(second.model).policy is not None


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_backward_that_raises_leaves_no_profile_and_the_next_step_is_observed() -> None:
    planned = training()
    ac_client.apply(planned.model, budget_gb=budget(), group=None)
    x = torch.randn(256, WIDTH, requires_grad=True)
    x.register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        planned.loss(x).backward()
    assert not torch.autograd._profiler_enabled()
    assert ac_client.applied(planned.model).policy is None
    planned.optimizer.zero_grad()
    train(planned, 1)
    assert ac_client.applied(planned.model).policy is not None


def _fail(_gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_forward_of_another_thread_is_not_part_of_an_observed_one() -> None:
    plain, planned = training(), training()
    ac_client.apply(planned.model, budget_gb=budget(), group=None)
    for one in (plain, planned):
        torch.manual_seed(2)
        inside = one.model.layers[2].register_forward_hook(partial(_run_on_another_thread, one.model))
        loss = one.loss(torch.randn(256, WIDTH))
        inside.remove()
        loss.backward()
    assert plain.model.calls == planned.model.calls == 2
    assert ac_client.applied(planned.model).policy is not None
    gradients = zip(planned.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in gradients if ours.grad is not None)


def _run_on_another_thread(model: Layers, *_: object) -> None:
    if model.calls == 1:
        thread = threading.Thread(target=model, args=(torch.ones(256, WIDTH),))
        thread.start()
        thread.join()
