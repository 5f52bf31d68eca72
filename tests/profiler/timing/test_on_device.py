"""Test the measured datasheet of a device, and the run times of single ops on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoac.profiler import DATASHEETS, Times, datasheet_of, fake_step, profile
from autoac.profiler.timing import cache
from autoac.profiler.timing import on_device as local
from autoac.profiler.timing.roofline import Device, KernelKind
from autoac.tape.torch_facts.op_facts import facts_of
from benchmarks.models.modules import Transformer

CPU = torch.device("cpu")


def test_measured_datasheet_has_the_rates_that_kernels_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes a second, so rates are the work of one call."""
    monkeypatch.setattr(local, "least_s", lambda call, device: 1.0)
    sheet = datasheet_of(torch.device("cpu"))
    assert dict(sheet.flops_per_s) == dict.fromkeys(
        (torch.float32, torch.bfloat16), 2.0 * local.PRODUCT_ROWS**3
    )
    assert sheet.bytes_per_s == 2 * local.COPIED_NBYTES  # read and written
    assert sheet.launch_us == 1e6 / local.TINY_CALLS
    assert dict(sheet.efficiency) == dict.fromkeys(KernelKind, 1.0)
    assert sheet.allocator_rounding == 1


def test_ops_of_a_fake_step_have_measured_times() -> None:
    model, x = Transformer(layers=2), torch.randn(2, 8, 32)
    here = profile(model, x)
    with torch.device("meta"):
        elsewhere, y = Transformer(layers=2), torch.empty(2, 8, 32)
    found = profile(elsewhere, y, on=CPU)
    assert found.keys() == here.keys()
    assert all(us > 0 for us in found.ops.runtime_us)
    assert any(note.startswith("measured: run times of") for note in found.notes)
    assert not any("was not run" in note for note in found.notes)
    assert sum(found.backward.runtime_us) > 0


def test_generators_of_the_device_that_runs_ops_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropout op that is timed by itself draws on that device, not on the CPU of the fake tensors."""
    restored: list[torch.device] = []
    own = fake_step.generators_restored

    def noted(device: torch.device) -> Any:
        restored.append(device)
        return own(device)

    monkeypatch.setattr(fake_step, "generators_restored", noted)
    profile(nn.Linear(4, 4), torch.randn(2, 4), on=torch.device("cpu", 0))
    profile(nn.Linear(4, 4), torch.randn(2, 4), on=DATASHEETS["h100"])
    assert restored == [torch.device("cpu", 0), torch.device("cpu")]


def test_kind_of_op_is_measured_once_and_then_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    once = local.OpTimesOnDevice._once

    def counting(self: Any, func: Any, args: Any, kwargs: Any) -> float:
        ran.append(func)
        return once(self, func, args, kwargs)

    monkeypatch.setattr(local.OpTimesOnDevice, "_once", counting)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), torch.randn(3, 8)
    times = Times(tmp_path / "times.sqlite3")
    first = profile(model, x, on=CPU, times=times)
    assert sum(func is torch.ops.aten.addmm.default for func in ran) == local.RUNS + 1
    ran.clear()
    assert profile(model, x, on=CPU, times=times).ops.runtime_us == first.ops.runtime_us
    assert not ran


SMALL = Device("tiny", {}, 1e9, 1e9, 1000, device_type="cpu", allocator_rounding=1)


def test_ops_that_do_not_fit_or_fail_are_estimated_and_named_in_notes() -> None:
    here = local.OpTimesOnDevice(CPU, SMALL)
    op = torch.ops.aten.mm.default
    large = torch.empty(100, 100, device="meta")
    assert here.runtime_us(facts_of(op), op, (large, large), {}, large) == SMALL.runtime_us(
        facts_of(op), op, (large, large), {}, large
    )
    add = torch.ops.aten.add.Tensor
    operands = torch.empty(3, 4, device="meta"), torch.empty(4, 3, device="meta")
    assert here.runtime_us(facts_of(add), add, operands, {}, operands[0]) > 0
    assert list(here.notes) == [f"{name} was not run, and its time is estimated" for name in (op, add)]
    assert here.kinds == 0


@pytest.mark.skipif(not torch.backends.mkldnn.enabled, reason="oneDNN computes no LSTM")
def test_op_that_would_crash_by_itself_is_estimated_and_named_in_notes() -> None:
    found = profile(nn.LSTM(4, 4), torch.randn(3, 2, 4), on=CPU)
    assert "aten.mkldnn_rnn_layer_backward.default was not run, and its time is estimated" in found.notes


def test_times_of_an_older_method_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(tmp_path / "times.sqlite3")
    times.keep_ops("a machine", {"mm": (1.0, 0.0, 5)})
    times.keep_backward("a machine", "a step", [1.0])
    times.keep_ops("a machine", {"mm": (2.0, 0.0, 5)})
    assert times.ops("a machine", ["mm"]) == {"mm": (1.0, 0.0, 5)}, "new times would change plans"
    monkeypatch.setattr(cache, "METHOD", cache.METHOD + 1)
    assert not times.ops("a machine", ["mm"])
    assert times.backward("a machine", "a step", 1) is None
