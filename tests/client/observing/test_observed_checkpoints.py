"""Test observed steps of models that checkpoint parts of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import in_torch, nested, ours, plainly, reentrant
from stepping import seeded
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Policy

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, LAYERS, ROWS = 64, 8, 512
Call = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Layers with dropout under a checkpoint each; counts how often it runs, and how often they do."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Dropout(), nn.Linear(8 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.forwards = self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        x = self.first(x)
        for i in range(LAYERS):
            x = self.call(lambda x, i=i: self.layer(i, x), x)
        return x.square().mean()

    def layer(self, i: int, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers[i](x)
        return x + out


class Streamed(Net):
    """The first weight of each layer is put into one parameter that all share, before the layer runs."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.shared = nn.Parameter(torch.zeros(WIDTH, 8 * WIDTH), requires_grad=False)
        self.streamed = [torch.randn(WIDTH, 8 * WIDTH) / 8 for _ in range(LAYERS)]

    def layer(self, i: int, x: Tensor) -> Tensor:
        self.shared.copy_(self.streamed[i])
        return super().layer(i, x + (x @ self.shared).sin().chunk(8, 1)[0])


def step(model: nn.Module, number: int) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(number)
    model(torch.randn(ROWS, WIDTH)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def same(model: nn.Module, other: nn.Module, steps: int = 4) -> bool:
    return all(all(map(torch.equal, step(model, i), step(other, i))) for i in range(steps))


def observed(model: Net, *, take_over: bool = True) -> Net:
    rules = ac_client.Constraints(take_over_checkpoints=take_over)
    return ac_client.apply(model, 1.0, constraints=rules, group=None)


@pytest.mark.parametrize("call", [in_torch, reentrant, nested, ours], ids=lambda call: call.__name__)
def test_checkpoints_are_plain_calls_in_the_observed_step(
    call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    model = observed(seeded(Net, call))
    assert same(model, seeded(Net, plainly), 1)
    assert (model.forwards, model.calls) == (1, LAYERS)
    policy = ac_client.applied(model).policy
    assert policy.decisions.keys() == policy_of_plain_calls().decisions.keys()
    assert same(model, seeded(Net, plainly))
    assert (model.forwards, model.calls) == (5, 5 * LAYERS)
    assert not caplog.text


def policy_of_plain_calls() -> Policy:
    model = observed(seeded(Net, plainly))
    step(model, 0)
    policy = ac_client.applied(model).policy
    assert policy is not None
    return policy


def peak_of_first_step(model: nn.Module) -> int:
    """Return the peak of a step. If it is observed, it has no record here, and holds the same."""
    with AllocatorTimeline() as timeline:
        step(model, 0)
    return timeline.peak_bytes


@pytest.mark.parametrize("call", [in_torch, reentrant, nested, ours], ids=lambda call: call.__name__)
def test_observed_step_holds_what_the_checkpoints_hold_that_it_leaves_alone(call: Call) -> None:
    planned = peak_of_first_step(observed(seeded(Net, call), take_over=False))
    assert planned <= 1.02 * peak_of_first_step(seeded(Net, call))


def test_step_that_finds_needed_checkpoints_copies_what_two_of_the_layers_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.ROWS", 16)
    models = seeded(Streamed, in_torch), seeded(Streamed, in_torch)
    for model in models:
        model.layers.requires_grad_(False)  # so that what they share is large
    planned, plain = models
    more = peak_of_first_step(observed(planned)) - peak_of_first_step(plain)
    assert more <= 2.5 * planned.shared.nbytes


def test_a_model_inside_a_checkpoint_of_torch_trains_without_a_plan_and_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def gradients(model: nn.Module) -> list[Tensor | None]:
        for seed in range(3):
            torch.manual_seed(seed)
            in_torch(lambda x: model(x).sin(), torch.randn(ROWS, WIDTH)).backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients(seeded(lambda: Net(lambda layer, x: layer(x))))
    planned = gradients(ac_client.apply(seeded(lambda: Net(lambda layer, x: layer(x))), budget_gb=1))
    assert all(
        torch.equal(a, b) for a, b in zip(planned, plain, strict=True) if a is not None and b is not None
    )
    assert sum("a checkpoint around it" in message for message in caplog.messages) == 1
