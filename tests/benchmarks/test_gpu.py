"""Run the GPU benchmark on the CPU, with an allocator that counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ac_client.measure.memory_timeline import AllocatorTimeline
from benchmarks import gpu
from benchmarks.gpu import Case, CudaMeter, Row
from benchmarks.models.tiny import ZOO


class CountingCpu:
    """A meter of the CPU. `base` is what was allocated before a call, which torch.profiler does not see."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.base = 0

    def peak_of(self, call: Callable[[], object]) -> int:
        with AllocatorTimeline(base=self.base) as timeline:
            call()
        return timeline.peak_bytes

    def seconds_of(self, call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def clear(self) -> None: ...


def case(name: str, blocks: Callable[[nn.Module], list[nn.Module]]) -> Case:
    entry = next(entry for entry in ZOO if entry.name == name)
    return Case(name, entry.make, entry.batch, blocks)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: some kernels allocate memory for each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_plan_at_a_baselines_peak_measures_as_predicted() -> None:
    llama = case("Llama", lambda model: list(model.model.layers))
    meter = CountingCpu()
    training = gpu.Training(llama, "fp32", meter.device)
    # Parameters, both moments, step counters and the batch are allocated before a step.
    parameters = list(training.model.parameters())
    ids = training.batch["input_ids"]
    buffers = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in training.model.buffers()}
    meter.base = sum(3 * p.nbytes + 4 for p in parameters) + ids.nbytes + sum(buffers.values())
    found = gpu.measure_case(llama, "fp32", meter, steps=1)
    assert [row.way for row in found][:2] == ["plain", "torch checkpoint"]
    assert found[0].error == 0
    ours = [row for row in found if row.way.startswith("ours") and row.measured is not None]
    assert ours
    assert all(row.error == 0 and row.measured <= row.budget for row in ours)
    assert all(row.step_s is not None and row.step_s > 0 for row in ours)


def test_the_summary_counts_wrong_peaks_and_exceeded_budgets() -> None:
    rows = [
        Row("a", "fp32", "plain", None, 100, 101, 1.0),
        Row("a", "fp32", "ours, peak of checkpoint", 100, 100, 120, 1.5),
        Row("a", "fp32", "ours, peak of selective", 100, None, None, None, "needs 1 KiB"),
    ]
    page = gpu.render(rows, "a GPU")
    assert "1 of 2 predicted peaks within 2 %, 1 over budget" in page
    assert "| 120 B | +20.00% | 1500.0 | 1.500 |" in page
    assert "| needs 1 KiB |" in page


def test_the_peak_is_reset_before_the_call_and_read_after_the_stream_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def logged(name: str, result: object = None) -> Callable[..., object]:
        def call(*_args: object) -> object:
            calls.append(name)
            return result

        return call

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, logged(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", logged("max_memory_allocated", 7))
    meter = CudaMeter(torch.device("cuda", 0))
    assert meter.peak_of(logged("step")) == 7
    assert calls == ["synchronize", "reset_peak_memory_stats", "step", "synchronize", "max_memory_allocated"]
