"""Test the predicted time of recording ops."""

from __future__ import annotations

import pytest
import torch
from stepping import scalar
from torch import nn

import ac_client
from autoac.planner import Policy, build, plan
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import profile
from benchmarks.models.modules import Transformer

X = torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)


@pytest.fixture
def _two_us_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ac_client.applied_model.RECORDED_OP_US", 2.0)


def step(model: nn.Module) -> None:
    scalar(model(X)).backward()
    model.zero_grad()


def planned() -> tuple[nn.Module, Policy]:
    """Return a planned model after its first step, with few recomputed ops."""
    graph = build(found := profile(Transformer(), X))
    policy = plan(found, budget_bytes=peak_bytes(graph, graph.everything) - 2000).policy()
    model = ac_client.apply(Transformer(), policy=policy)
    step(model)
    return model, policy


@pytest.mark.usefixtures("_two_us_an_op")
def test_report_predicts_the_time_of_recording() -> None:
    model, policy = planned()
    report = ac_client.applied(model).report()
    assert report.recorded == report.ops == len(policy.decisions)
    assert report.recording_us == 2 * report.ops
    predicted = policy.predicted
    assert report.predicted_step_us == predicted.step_us + predicted.recompute_us + report.recording_us
    assert "us of recording in forward" in str(report)
    metrics = report.metrics()
    assert metrics["autoac/recording_ms"] == pytest.approx(report.recording_us / 1000)
    assert metrics["autoac/recompute_overhead"] == pytest.approx(predicted.recompute_us / predicted.step_us)


@pytest.mark.usefixtures("_two_us_an_op")
def test_modules_that_run_without_the_mode_are_not_counted() -> None:
    model, policy = planned()
    step(model)  # they do so from the second step on
    report = ac_client.applied(model).report()
    left_out = report.ops - report.recorded
    saved = sum(decision == "save" for decision in policy.decisions.values())
    assert 0 < left_out <= saved
    assert report.recording_us == 2 * report.recorded


@pytest.mark.usefixtures("_two_us_an_op")
def test_nothing_is_recorded_if_nothing_is_recomputed() -> None:
    model = ac_client.apply(Transformer(), 10.0)
    step(model)
    report = ac_client.applied(model).report()
    assert (report.recorded, report.recording_us) == (0, 0)
    assert "recording" not in str(report)
