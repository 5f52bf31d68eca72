"""Test training whose first step is observed on a device, where backward has a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from benchmarks.observed_profile import peaks
from standin.test_peaks import SideStream
from standin.training import Task, train
from tests.client.observing.test_inner_backwards import Equilibrium, SeveralBackwards

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # of an LSTM


def test_training_on_two_streams_whose_first_step_is_observed_has_the_plain_numbers(gpu: ModuleType) -> None:
    task = Task(SideStream, lambda: {"x": torch.randn(16, 32, 32)})
    budget = int(0.8 * peaks(task.observed())[0])
    plain = train(gpu, task, steps=5)
    planned = train(gpu, task, budget, 5, group=None)
    report = planned.applied.report()
    assert report.recomputed > 0
    assert planned.same_numbers(plain)
    assert planned.peaks[2:] == [report.predicted_peak_bytes] * 3
    assert (report.corrections, report.off_path) == (0, "")


class WithLoss(nn.Module):
    """Return the loss of a model in a dict. It gets a copy of the batch, which it may differentiate."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(x.clone())}


@pytest.mark.parametrize(("make", "share"), [(SeveralBackwards, 0.85), (Equilibrium, 0.9)])
def test_backward_inside_of_a_step_on_a_device_is_planned(
    gpu: ModuleType, make: Callable[[], nn.Module], share: float
) -> None:
    task = Task(lambda: WithLoss(make), lambda: {"x": torch.randn(512, 16)})
    plain = train(gpu, task, steps=5)
    planned = train(gpu, task, int(share * max(plain.peaks[2:])), 5, group=None)
    report = planned.applied.report()
    assert report.recomputed > 0
    assert planned.same_numbers(plain)
    assert planned.peaks[2:] == [report.predicted_peak_bytes] * 3
