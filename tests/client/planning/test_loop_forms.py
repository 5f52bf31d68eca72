"""Steps of several forwards, lengths or passes of backward: plain gradients, and peaks as predicted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from blocks import Block
from stepping import measured, peaks, same_gradients, warnings
from torch import Tensor, nn

import ac_client
from autoac.planner.units import GIB

WIDTH, ROWS = 32, 256


class WritesInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        return x + self.drop(self.down(torch.nn.functional.relu(hidden, inplace=True).tanh()))


class Net(nn.Module):
    """Returns what its middle and its end make of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(WritesInPlace() for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2:
                middle = x.square().mean(1)
        return middle, x


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def auxiliary_first(model: nn.Module) -> None:
    middle, end = model(batch())
    first, second = middle.mean(), end.square().mean()
    del middle, end
    first.backward(retain_graph=True)
    second.backward()


def weighted_by_the_last_layer(model: nn.Module) -> None:
    end = model(batch())[1]
    last = model.get_submodule("blocks.5.down").weight
    near, smooth = end.abs().mean(), end.diff(dim=1).square().mean()
    (a,) = torch.autograd.grad(near, last, retain_graph=True)
    (b,) = torch.autograd.grad(smooth, last, retain_graph=True)
    (near + (a.norm() / (b.norm() + 1e-4)).detach() * smooth).backward()


def one_row_at_a_time(model: nn.Module) -> None:
    end = model(batch())[1].unflatten(0, (4, -1)).square().mean((1, 2))
    for number, each in enumerate(end):
        each.backward(retain_graph=number < 3)


def of_lengths(*lengths: int) -> Step:
    """Return a step with forwards of several lengths before one backward."""

    def step(model: nn.Module) -> None:
        means = [model(torch.randn(length, WIDTH))[1].mean(0) for length in lengths]
        sum((means[0] - other).pow(2).sum() for other in means[1:]).backward()

    return step


Step = Callable[[nn.Module], None]
FORMS: dict[str, Step] = {
    one.__name__: one for one in (auxiliary_first, weighted_by_the_last_layer, one_row_at_a_time)
} | {str(lengths): of_lengths(*lengths) for lengths in ((256, 512), (512, 256), (512, 128, 384))}


def run(step: Step, model: nn.Module, number: int = 0) -> nn.Module:
    model.zero_grad()
    torch.manual_seed(number)
    step(model)
    return model


def budget_for(step: Step, share: float) -> int:
    """Return the budget at `share` of the way from the smallest peak to that of plain training."""
    model = ac_client.apply(Net(), 1.0)
    for _ in range(2):
        run(step, model)
    plan = ac_client.applied(model).plan
    assert plan is not None
    smallest, most = peaks(plan.graph)
    return int(smallest + share * (most - smallest))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("form", FORMS)
def test_step_peaks_where_predicted(form: str, share: float, caplog: pytest.LogCaptureFixture) -> None:
    step, plain = FORMS[form], Net()
    budget = budget_for(step, share)
    model = ac_client.apply(Net(), budget / GIB)
    for number in range(4):
        assert same_gradients(run(step, model, number), run(step, plain, number))
    model.zero_grad()
    report = measured(model, partial(run, step))
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget
    assert report.recomputed
    assert report.buckets == 1
    assert not warnings(caplog)


@pytest.mark.parametrize(("first", "before", "second"), [(256, 384, 512), (512, 128, 384)])
def test_longer_batch_in_the_middle_of_a_step_is_said_and_planned_for(
    first: int, before: int, second: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it is shorter than the first one, whose plan does not cover it there."""
    budget = budget_for(of_lengths(first, second), 0.3)
    model = ac_client.apply(Net(), budget / GIB)
    for length in (before, before, second):
        run(of_lengths(first, length), model)
    assert f"no bucket covers a batch of 0=float32[{second}, {WIDTH}]" in warnings(caplog)[0]
    for length in (second, before, second):
        run(of_lengths(first, length), model)
    report = measured(model, partial(run, of_lengths(first, second)))
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget
    shorter = measured(model, partial(run, of_lengths(first - 8, second - 8)))
    assert shorter.measured_peak_bytes <= budget
    assert same_gradients(model, run(of_lengths(first - 8, second - 8), Net()))
    assert len(warnings(caplog)) == 1
