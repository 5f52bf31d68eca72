"""Test that planned steps on a device have the predicted peak and the plain step's numbers."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import nn

import ac_client
from autoac.planner import bounds, build
from benchmarks.models.samples import SAMPLES, TINY, Attention
from benchmarks.sample_training import Case
from benchmarks.sample_training import train as planned_training
from standin.tasks import TASKS, LanguageModel, SideStream, bounds_of, smallest_of, task_of
from standin.training import Task, Training, train

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # of an LSTM

_plain: dict[str, Training] = {}


def plain(gpu: ModuleType, name: str) -> Training:
    if name not in _plain:
        _plain[name] = train(gpu, task_of(name))
    return _plain[name]


@pytest.mark.parametrize("name", [name for name in TASKS if name != "several backwards"])
def test_plain_step_has_the_predicted_save_all_peak(gpu: ModuleType, name: str) -> None:
    """Several backwards without a plan free what a plan holds for the last one."""
    gc.collect()
    assert gpu.live(0) == gpu.live(1) == 0
    assert plain(gpu, name).peaks[-1] == bounds_of(name).ceiling


@pytest.mark.parametrize(
    ("name", "part"),
    [*(("GPT-2", part) for part in (0.9, 0.7, 0.2)), *((name, 0.4) for name in TASKS)],
)
def test_planned_step_has_the_predicted_peak_and_the_plain_numbers(
    gpu: ModuleType, name: str, part: float
) -> None:
    smallest, ceiling = smallest_of(name), bounds_of(name).ceiling
    budget = int(smallest + part * (ceiling - smallest))
    planned = train(gpu, task_of(name), budget)
    report = planned.applied.report()
    assert planned.peaks[-1] == report.predicted_peak_bytes <= budget
    assert max(planned.peaks[2:]) == planned.peaks[-1]  # before, backward also compares contents
    assert report.recomputed > 0
    assert (report.corrections, report.off_path) == (0, "")
    assert planned.same_numbers(plain(gpu, name))


def test_workspaces_of_cublas_count_for_both_threads(gpu: ModuleType) -> None:
    """Forward and backward run on two threads. The forward that compares contents allocates none for good."""
    task, without, workspace = task_of("GPT-2"), bounds_of("GPT-2"), 2 << 20
    gpu.set_workspace(workspace)
    found = bounds(build(task.observed()))
    assert found.ceiling == without.ceiling + 2 * workspace
    planned = train(gpu, task, (found.floor + found.ceiling) // 2)
    report = planned.applied.report()
    assert planned.peaks[-1] == report.predicted_peak_bytes
    assert report.corrections == 0


def test_workspaces_are_there_in_every_step_that_is_compared(gpu: ModuleType) -> None:
    """This model's peak is the end of forward, before backward would allocate its workspace."""
    gpu.set_workspace(1 << 20)
    case = Case(SAMPLES[-1], "fp32", TINY, torch.device("cuda", 0))
    known = bounds(build(case.profiled()))
    trained = planned_training(case, (known.floor + known.ceiling) // 2)
    assert trained.peak_bytes == trained.report.predicted_peak_bytes


def test_workspace_of_a_stream_that_only_the_profile_had_is_not_left(gpu: ModuleType) -> None:
    gpu.set_workspace(1 << 20)
    task = Task(SideStream, lambda: {"x": torch.randn(2, 8, 32)})
    planned = train(gpu, task, 1 << 30)
    report = planned.applied.report()
    assert planned.peaks[-1] == report.predicted_peak_bytes
    assert report.corrections == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # efficient and flash
def test_attention_without_dropout_is_recomputed(gpu: ModuleType, dtype: torch.dtype) -> None:
    """It returns a seed that it has not written, and whose contents nothing must compare."""
    attention = Attention(replace(TINY, heads=1), causal=True).cuda().to(dtype)
    ac_client.pin(attention, "must_recompute")
    model, x = nn.Sequential(attention, nn.Linear(32, 32).cuda().to(dtype)), torch.randn(2, 8, 32)
    ac_client.apply(model, 1.0)
    for _ in range(3):
        model(x.cuda().to(dtype)).sum().backward()
    assert ac_client.applied(model).report().recomputed > 0


def test_optimizer_that_steps_all_parameters_at_once_has_the_predicted_peak(gpu: ModuleType) -> None:
    """Its temporary tensors are as large as the parameters."""
    task = Task(LanguageModel, lambda: {"ids": torch.arange(4)[None]}, foreach=True)
    found = task.observed()
    assert found.optimizer_workspace_nbytes >= found.static.parameters
    assert train(gpu, task).peaks[-1] == bounds(build(found)).ceiling
    assert bounds(build(replace(task, foreach=False).observed())).ceiling < bounds(build(found)).ceiling
