"""Test the benchmark of our plans against torch's checkpoints, on the stand-in."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from ac_client.doctor.sample_models import SAMPLES, TINY
from ac_client.doctor.sample_training import Case, Numbers, Trained
from benchmarks.gpu import Row, measure_case, render
from benchmarks.gpu_kernels import SideStream, compare
from benchmarks.gpu_kernels import render as render_kernels

CUDA = torch.device("cuda", 0)


def test_plans_at_the_peaks_of_checkpoints_measure_as_predicted(gpu: ModuleType) -> None:
    found = list(measure_case(Case(SAMPLES[1], "fp32", TINY, CUDA)))
    assert [row.way for row in found][:2] == ["plain", "torch checkpoint"]
    plain, theirs = (row.measured for row in found[:2])
    assert plain is not None
    assert theirs is not None
    assert theirs.peak_bytes < plain.peak_bytes
    assert theirs.numbers.distance(plain.numbers) == (0, 0.0)
    ours = [row for row in found if row.way.startswith("ours") and row.measured is not None]
    assert ours
    assert all(row.error == 0 and not row.is_over_budget for row in ours)
    for row in ours:
        assert row.measured.predicted_reserved_bytes == pytest.approx(
            row.measured.reserved_bytes, abs=4 << 20
        )
    assert all(row.measured.numbers.distance(plain.numbers) == (0, 0.0) for row in ours)


def test_summary_counts_wrong_peaks_and_exceeded_budgets(gpu: ModuleType) -> None:
    def measured(peak: int, ms: float) -> Trained:
        return Trained(peak, 0, Numbers({}), ms, ms, 2 * ms, None, peak + 30, peak + 20)

    rows = [
        Row("a", "plain", measured(200, 1.0)),
        Row("a", "ours, peak of checkpoint", measured(120, 1.5), 100, 100),
        Row("a", "ours, peak of selective", measured(100, 1.5), 100, 100),
        Row("a", "ours, peak of selective", None, 100, note="needs 1 KiB"),
    ]
    page = render(rows, "a GPU")
    assert "1 of 2 predicted peaks within 1 %, 1 over budget" in page
    assert "| 120 B | +20.00% | 150 B | 140 B | 1.5 | 1.500 | 3.0 |" in page
    assert "| needs 1 KiB |" in page


@pytest.mark.parametrize("room", [1.0, 1.01])
def test_models_for_kernels_of_a_gpu_are_planned_as_predicted(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    """The smallest peak is that of the optimizer, so with no more room every plan has its peak there."""
    monkeypatch.setattr("benchmarks.gpu_kernels.ROOM", room)
    gpu.set_workspace(1 << 20)
    row = compare(SideStream)
    assert (row.plain_distance, row.distance, row.error) == (0, 0, 0)
    assert row.recomputed > 0
    assert row.peak <= row.budget
    assert not row.is_wrong
    assert replace(row, distance=0.1).is_wrong
    assert replace(row, peak=row.budget + 1).is_wrong
    assert "| SideStream | 0 | 0 |" in render_kernels([row])
