"""Test that an observed step on a device, whose backward has a thread of its own, has the hollow profile."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from autoac.profiler import profile
from autoac.profiler.rehearse import rehearse
from autoac.profiler.steps.training_loop import TrainingStep
from benchmarks.models.tiny import ZOO, ZooModel
from benchmarks.observed_profile import IN_BACKWARD, differing, peaks
from standin.test_peaks import SideStream
from standin.training import Task, train
from tests.client.observing.test_inner_backwards import Equilibrium, SeveralBackwards
from tests.client.observing.test_observed_step import SCALARS

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # of an LSTM

DEVICE = torch.device("cuda:0")
IN_CI = ("GPT-2", "Llama", "ViT", "Mixtral", "ResNet", "U-Net")
MODELS = [entry for entry in ZOO if os.environ.get("AUTOAC_ZOO") == "all" or entry.name in IN_CI]


def on_device(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(DEVICE).requires_grad_(value.requires_grad)


def batch_of(entry: ZooModel) -> dict[str, Any]:
    return {name: on_device(value) for name, value in entry.batch().items()}


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_observed_step_on_a_device_has_the_profile_of_a_hollow_step(gpu: ModuleType, entry: ZooModel) -> None:
    model, batch = entry.make().train().to(DEVICE), batch_of(entry)
    hollow = rehearse(TrainingStep(model, (), batch))
    observed = profile(model, **batch)
    scalars = SCALARS.get(entry.name, 0)
    assert not differing(observed, hollow, *IN_BACKWARD)
    assert peaks(observed) == pytest.approx(peaks(hollow), abs=scalars)


@pytest.mark.parametrize("workspace", [1 << 20, 3 << 20])
def test_workspaces_of_cublas_count_for_both_threads(gpu: ModuleType, workspace: int) -> None:
    entry = next(entry for entry in ZOO if entry.name == "GPT-2")
    gpu.set_workspace(workspace)
    model, batch = entry.make().train().to(DEVICE), batch_of(entry)
    hollow = rehearse(TrainingStep(model, (), batch))
    observed = profile(model, **batch)
    assert observed.static == hollow.static
    assert not differing(observed, hollow, *IN_BACKWARD)
    assert peaks(observed) == peaks(hollow)


@pytest.mark.parametrize("workspace", [0, 1 << 20])
def test_observed_step_on_two_streams_has_the_profile_of_a_hollow_step(
    gpu: ModuleType, workspace: int
) -> None:
    gpu.set_workspace(workspace)
    torch.manual_seed(0)
    model, x = SideStream().cuda(), torch.randn(2, 8, 32, device=DEVICE)
    model.stream = torch.cuda.Stream()
    hollow = rehearse(TrainingStep(model, (x,), {}))
    observed = profile(model, x)
    assert not differing(observed, hollow, *IN_BACKWARD)
    assert peaks(observed) == peaks(hollow)


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
    assert planned.applied is not None
    report = planned.applied.report()
    assert report.recomputed > 0
    assert planned.same_numbers(plain)
    assert planned.peaks[2:] == [report.predicted_peak_bytes] * 3
