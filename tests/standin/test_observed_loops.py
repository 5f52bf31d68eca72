"""Test that training on a device, whose first step is observed, has plain numbers and the planned peak."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import ac_client
from autoac.planner import build, find_minimum_peak
from autoac.planner.units import GIB, format_bytes
from autoac.profiler import profile
from standin.tasks import LanguageModel

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")  # of an LSTM


def test_observed_step_over_the_budget_is_said_once_and_by_how_much(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model = LanguageModel().to("cuda")
    batch = {"ids": torch.arange(16 * 32).remainder(61).reshape(16, 32).to("cuda")}
    budget = find_minimum_peak(build(profile(model, **batch)), work_limit=1.0).found
    ac_client.apply(model, budget / GIB, group=None)
    peaks = []
    for _ in range(4):
        gpu.reset_peak(0)
        model(**batch)["loss"].backward()
        peaks.append(gpu.peak(0))
        model.zero_grad()
    said = [r.getMessage() for r in caplog.records if "was observed, without a plan" in r.getMessage()]
    assert peaks[0] > budget >= peaks[-1]
    assert len(said) == 1
    over = f"{format_bytes(peaks[0] - budget)} over the budget of {format_bytes(budget)}"
    assert over in said[0]


def test_gradients_that_the_loop_frees_do_not_count_in_backward_of_the_observed_step(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model = LanguageModel().to("cuda")
    batch = {"ids": torch.arange(16 * 32).remainder(61).reshape(16, 32).to("cuda")}
    model(**batch)["loss"].backward()
    gradients = sum(p.nbytes for p in model.parameters())
    profiled = profile(LanguageModel().to("cuda"), **batch)
    budget = find_minimum_peak(build(profiled), work_limit=1.0).found + gradients
    ac_client.apply(model, budget / GIB, group=None)
    peaks = []
    for _ in range(2):
        gpu.reset_peak(0)
        loss = model(**batch)["loss"]
        model.zero_grad()
        loss.backward()
        peaks.append(gpu.peak(0))
    said = [r.getMessage() for r in caplog.records if "was observed, without a plan" in r.getMessage()]
    assert all(f"took {format_bytes(peaks[0])}" in message for message in said)
    assert bool(said) == (peaks[0] > budget)


def test_microbatches_in_flight_are_planned_like_the_one_that_was_seen(gpu: ModuleType) -> None:
    """As on a stage of a pipeline: two in flight, each with a backward of its own."""
    batches = [(torch.arange(16 * 32).reshape(16, 32) * i).remainder(61) for i in range(1, 6)]

    def train_with(budget_gb: float | None) -> tuple[list[int], list[torch.Tensor], ac_client.Applied | None]:
        torch.manual_seed(0)
        model = LanguageModel().to("cuda")
        if budget_gb is not None:
            ac_client.apply(model, budget_gb, group=None)
        peaks = []
        for _ in range(5):
            model.zero_grad()
            gpu.reset_peak(0)
            losses = []
            for ids in batches:
                losses.append(model(ids.to("cuda"))["loss"])
                if len(losses) == 2:
                    losses.pop(0).backward()
            losses.pop().backward()
            peaks.append(gpu.peak(0))
        found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        return peaks, found, None if budget_gb is None else ac_client.applied(model)

    _, plain, _ = train_with(None)
    _, _, roomy = train_with(1.0)
    smallest, most = (
        find_minimum_peak(roomy.plan.graph, work_limit=1.0).found,
        roomy.plan.policy().predicted.save_all_peak_bytes,
    )
    del roomy
    peaks, ours, applied = train_with((smallest + (most - smallest) // 3) / GIB)
    assert all(map(torch.equal, ours, plain))
    assert applied.policy.predicted.microbatches == 2
    assert applied.report().recomputed > 0
    assert peaks[1:] == [applied.report().predicted_peak_bytes] * 4
