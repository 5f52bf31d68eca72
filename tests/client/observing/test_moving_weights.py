"""Test weights that are in memory only while their block runs: hooks fill and empty `parameter.data`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.tape.runtime.write_guard import StaleError

WIDTH, STEPS = 48, 4

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)
        self.down = nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.down(self.up(x)))


def weights_alive() -> int:
    """Return how many storages of the size of a block's weight there are."""
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return len({t.untyped_storage()._cdata for t in tensors if t.untyped_storage().nbytes() == 4 * WIDTH**2})


Change = Callable[[int, Tensor], Tensor]


def train(
    *, planned: bool, in_backward: Change, early: bool = True
) -> tuple[list[Tensor], list[int], ac_client.Report | None]:
    """Return gradients, the weights alive between forward and backward in each step, and the last peak.

    Args:
        planned: under a plan.
        in_backward: returns the weights that backward gets, from the step and those of forward.
        early: the weights are empty before the first forward as well.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    bases = [p for block in model for p in block.base.parameters()]  # type: ignore[union-attr]
    stored = {p: p.detach().numpy().copy() for p in bases}
    step = 0

    def fill(block: Block, change: Change) -> None:
        for p in block.base.parameters():
            p.data = change(step, torch.tensor(stored[p]))

    def empty(block: nn.Module, *_: object) -> None:
        for p in block.base.parameters():  # type: ignore[union-attr]
            p.data = torch.empty(0)

    for block in model:
        block.base.requires_grad_(False)  # type: ignore[union-attr]
        if early:
            empty(block)
        block.register_forward_pre_hook(lambda block, _: fill(block, lambda _step, weight: weight))
        block.register_forward_hook(empty)
        block.register_full_backward_pre_hook(lambda block, _: fill(block, in_backward))
        block.register_full_backward_hook(empty)
    if planned:
        ac_client.apply(model, 1.0)
    gradients, alive = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        batch = torch.randn(8, WIDTH, requires_grad=True)
        with ac_client.applied(model).measure() if planned and step == STEPS - 1 else nullcontext():
            loss = model(batch).square().mean()
            alive.append(weights_alive())
            loss.backward()
        gradients += [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return gradients, alive, ac_client.applied(model).report() if planned else None


@pytest.mark.parametrize("early", [True, False])
def test_weights_that_backward_fills_again_are_not_held(early: bool) -> None:
    plain, *_ = train(planned=False, in_backward=lambda _, weight: weight, early=early)
    planned, alive, report = train(planned=True, in_backward=lambda _, weight: weight, early=early)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert alive[-1] == 0
    assert report.predicted_peak_bytes - report.measured_peak_bytes == (not early) * 12 * (WIDTH + 1) * WIDTH


@pytest.mark.parametrize(
    "change",
    [lambda weight: weight + 1, lambda weight: weight.bfloat16().float(), lambda _: torch.empty(0)],
    ids=["other values", "another dtype", "nothing"],
)
def test_weights_that_backward_does_not_fill_again_are_those_of_forward(change: Any) -> None:
    plain, *_ = train(planned=False, in_backward=lambda _, weight: change(weight))
    planned, _, report = train(planned=True, in_backward=lambda _, weight: change(weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert report.predicted_peak_bytes >= report.measured_peak_bytes


@pytest.mark.parametrize("since", range(1, STEPS))
def test_other_values_after_steps_with_the_same_are_an_error(since: int) -> None:
    with pytest.raises(StaleError, match="Fill it with the same values"):
        train(planned=True, in_backward=lambda step, weight: weight + (step == since))
