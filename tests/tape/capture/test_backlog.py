"""Test that time of the host does not enter measured times, on a simulated GPU and its host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import Body
from torch import nn

from autoac.profiler.timing.on_device import CACHE_SIZES, cache_overwriter, seconds
from autoac.tape.capture import backlog as backlog_module
from autoac.tape.capture.backlog import FIRST_US, LONGEST_US, Backlog
from autoac.tape.capture.op_timer import OpSpans, Samples
from autoac.tape.torch_facts import private

DEVICE = torch.device("cuda", 1)
KERNEL_US, CYCLES_PER_US = 10.0, 1000


class Gpu:
    """A GPU that runs in order what its host queues, and the clock of both, in microseconds."""

    def __init__(self) -> None:
        self.now = self.idle_at = 0.0
        self.host_us = 30.0  # to launch a kernel

    def launch(self, kernel_us: float = KERNEL_US) -> None:
        self.now += self.host_us
        self.idle_at = max(self.idle_at, self.now) + kernel_us

    def sleep(self, cycles: int) -> None:
        self.now += 1
        self.idle_at = max(self.idle_at, self.now) + cycles / CYCLES_PER_US

    def synchronize(self, _device: Any = None) -> None:
        self.now = max(self.now, self.idle_at)

    def current_stream(self, device: torch.device) -> torch.device:
        return device

    def device(self, _device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_device_properties(self, _device: torch.device) -> Any:
        return SimpleNamespace(L2_cache_size=1000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = Gpu()

    class Event:
        def __init__(self, **_options: Any) -> None: ...

        def record(self, _stream: Any) -> None:
            found.now += 1
            self.at = max(found.now, found.idle_at)

        def query(self) -> bool:
            return found.now >= self.at

        def elapsed_time(self, later: Event) -> float:
            return (later.at - self.at) / 1e3

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: found)
    monkeypatch.setattr(private, "sleep_of", lambda _device: found.sleep)
    backlog_module.cycles_per_us.cache_clear()
    yield found
    backlog_module.cycles_per_us.cache_clear()


class Launching(private.TorchDispatchMode):
    """Run the ops of a forward on the simulated GPU too."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.gpu.launch()
        if func is torch.ops.aten.nonzero.default:  # waits for its result
            self.gpu.synchronize()
        return func(*args, **(kwargs or {}))


def timed(gpu: Gpu, model: nn.Module, backlog: Backlog) -> Samples:
    spans, x = OpSpans(DEVICE, backlog), torch.ones(2)
    with Launching(gpu):
        for layer in model.children():
            began = spans.begin()
            x = layer(x)
            spans.end((type(layer).__name__,), began)
    return spans.samples()


def test_op_takes_the_time_of_its_kernel_alone(gpu: Gpu) -> None:
    backlog = Backlog(DEVICE)
    samples = timed(gpu, nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh()), backlog)
    assert {key[0]: len(found) for key, found in samples.items()} == {"Tanh": 2, "Sigmoid": 1}
    assert [us for found in samples.values() for us in found] == pytest.approx([KERNEL_US] * 3)
    assert backlog.note() == ""


def test_time_of_the_host_enters_and_is_noted_if_no_work_can_be_queued(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "sleep_of", lambda _device: None)
    backlog = Backlog(DEVICE)
    samples = timed(gpu, nn.Sequential(nn.Tanh(), nn.Tanh()), backlog)
    assert min(us for found in samples.values() for us in found) > gpu.host_us > KERNEL_US
    assert "torch cannot queue work ahead" in backlog.note()


def test_more_work_is_queued_if_the_host_is_slow_and_late_samples_are_left_out(gpu: Gpu) -> None:
    gpu.host_us = 3 * FIRST_US
    backlog = Backlog(DEVICE)
    samples = timed(gpu, nn.Sequential(*(nn.Tanh() for _ in range(5))), backlog)
    assert next(iter(samples.values())) == pytest.approx([KERNEL_US] * 3)  # 50 and 100 us were too little
    assert backlog.note() == "2 of 5 timed intervals may include time of the host"


def test_op_that_waits_for_the_device_keeps_its_time(gpu: Gpu) -> None:
    backlog, waits = Backlog(DEVICE), nn.Sequential(Body(lambda _, x: x.nonzero()))
    samples = timed(gpu, waits, backlog)
    assert [us for found in samples.values() for us in found] == pytest.approx([KERNEL_US + 1])  # the event
    for _ in range(9):
        timed(gpu, waits, backlog)
    before = gpu.now
    timed(gpu, nn.Sequential(nn.Tanh()), backlog)
    gpu.synchronize()
    assert gpu.now - before < LONGEST_US + 100, "waiting ops must not queue ever more"


def test_op_of_a_real_step_takes_the_time_of_its_kernel_and_the_step_that_of_its_host(gpu: Gpu) -> None:
    spans = OpSpans(DEVICE, Backlog(DEVICE), sparing=True)
    before = gpu.now
    for _ in range(100):
        began = spans.begin()
        gpu.launch()
        spans.end("op", began)
    on_host = gpu.now - before
    (found,) = spans.samples().values()
    assert len(found) > 50
    assert found == pytest.approx([KERNEL_US] * len(found))
    assert gpu.now - before < on_host + LONGEST_US


def test_call_runs_again_until_all_of_it_is_launched_in_time(gpu: Gpu) -> None:
    ran = []

    def tiny() -> None:
        ran.append(None)
        for _ in range(200):
            gpu.launch(2.0)

    gpu.host_us = 5.0
    assert seconds(tiny, DEVICE) == pytest.approx(200 * 2e-6)
    assert len(ran) == 6  # 50, 100, ..., 1,600 us


def test_call_that_no_backlog_covers_ends(gpu: Gpu) -> None:
    gpu.host_us = 1e6
    assert 0.9 < seconds(gpu.launch, DEVICE) < 1


def test_caches_are_overwritten_before_each_call_outside_of_its_time(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Any:
        made.append((nbytes * dtype.itemsize, device))
        return SimpleNamespace(zero_=lambda: gpu.launch(100.0))

    monkeypatch.setattr(torch, "empty", empty)
    before = cache_overwriter(DEVICE)
    assert made == [(CACHE_SIZES * 1000, DEVICE)]
    assert seconds(gpu.launch, DEVICE, before) == pytest.approx(KERNEL_US / 1e6)
    assert gpu.idle_at > 100
