"""Test the measured time of recording and replaying an op."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from stepping import scalar
from torch import nn

import ac_client
from ac_client.measure import recording_overhead as recording
from ac_client.measure.recording_overhead import HostTimes, host_times, host_times_of_process, recording_us
from ac_client.planning import plan_batch
from autoac.planner import Policy, Profile, build, plan
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import profile
from autoac.tape.runtime import replay
from autoac.tape.runtime.policy_context import active
from autoac.tape.runtime.region import Region
from benchmarks.models.modules import Transformer

X = torch.linspace(-1, 1, 2 * 8 * 32).reshape(2, 8, 32)


def test_only_the_op_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that advances a microsecond for each op that a region sees."""
    seen = 0
    dispatch = Region.__torch_dispatch__

    def counted(self: Region, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(Region, "__torch_dispatch__", counted)
    monkeypatch.setattr(recording.time, "thread_time_ns", lambda: seen * 1000)
    assert recording_us(repeats=3) == 1
    assert active.region is None


def test_measuring_inside_a_region_is_rejected() -> None:
    with (
        ac_client.save_recompute_policy("recompute_all"),
        pytest.raises(RuntimeError, match="outside of forward"),
    ):
        recording_us()


@pytest.fixture
def _two_us_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ac_client.applied_model.recording_us_of_process", lambda: 2.0)


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


@pytest.mark.usefixtures("_two_us_an_op")
def test_report_leaves_recording_time_out_while_a_peak_is_measured() -> None:
    model, _ = planned()
    at = ac_client.applied(model)
    with at.measure():
        step(model)
        report = at.report()
    assert report.recording_us is None
    assert "autoac/recording_ms" not in report.metrics()
    assert at.report().recording_us == 2 * report.recorded


def test_replay_time_is_the_time_that_the_runtime_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that advances a microsecond for each recorded op and two for each replayed op."""
    us = 0
    unsaved, again = Region._run_recorded, replay._replay

    def recorded(self: Region, *args: Any) -> Any:
        nonlocal us
        us += 1
        return unsaved(self, *args)

    def replayed(*args: Any) -> None:
        nonlocal us
        us += 2
        again(*args)

    monkeypatch.setattr(Region, "_run_recorded", recorded)
    monkeypatch.setattr(replay, "_replay", replayed)
    monkeypatch.setattr(recording.time, "thread_time_ns", lambda: us * 1000)
    assert host_times(rounds=2) == (0, 3)


def test_replay_time_is_measured_unseen_by_the_hooks_of_the_caller() -> None:
    host_times_of_process.cache_clear()
    packed = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        packed += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert min(host_times_of_process()) >= 0
    assert packed == 0


def on_gpu(taken: Profile, us: float) -> Profile:
    """Return `taken` as a GPU's profile, on which each op takes `us`, its backward included."""
    environment = taken.environment.model_copy(update={"device_type": "cuda"})
    ops = taken.ops.model_copy(update={"runtime_us": (us,) * len(taken.ops)})
    backward = taken.backward.model_copy(update={"runtime_us": (0.0,) * len(taken.backward)})
    return taken.model_copy(update={"environment": environment, "ops": ops, "backward": backward})


@pytest.mark.parametrize(("us", "counts"), [(1.0, True), (10.0, True), (13.0, False), (100.0, False)])
def test_gpu_step_counts_replay_time_if_the_host_is_slower(
    us: float, counts: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The host takes 5 us for an op without a plan, and 7 us more to record and replay it."""
    taken = plan_batch.ObservedStep.profile
    monkeypatch.setattr(plan_batch, "host_times_of_process", lambda: HostTimes(5.0, 7.0))
    monkeypatch.setattr(plan_batch.ObservedStep, "profile", lambda *args: on_gpu(taken(*args), us))
    loose = ac_client.apply(Transformer(), budget_gb=1.0)
    step(loose)
    ceiling = ac_client.applied(loose).plan
    assert ceiling is not None
    budget = ceiling.peak - 2000
    model = ac_client.apply(Transformer(), budget_gb=budget / 2**30)
    with caplog.at_level("WARNING", logger="ac_client"):
        step(model)
    made = ac_client.applied(model).plan
    assert made is not None
    assert made.recompute_set
    assert {op.replay_us for op in made.graph.ops} == {7.0 if counts else 0.0}
    assert ("bound by the host" in caplog.text) is counts


def test_apply_includes_replay_time_in_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_batch, "host_times_of_process", lambda: HostTimes(5.0, 7.0))
    model = ac_client.apply(Transformer(), 10.0)
    step(model)
    made = ac_client.applied(model).plan
    assert made is not None
    assert made.profile is not None
    assert made.profile.replay_us == 7
    assert {op.replay_us for op in made.graph.ops} == {7}


def test_recording_is_measured_while_the_interpreter_ends() -> None:
    """A report may come that late; no thread can be started any more."""
    program = """
import atexit
from ac_client.measure.recording_overhead import recording_us_of_process
atexit.register(lambda: print(recording_us_of_process()))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(ran.stdout) >= 0
    assert "Error" not in ran.stderr
