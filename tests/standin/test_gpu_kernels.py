"""Test the benchmark of kernels that only a GPU has, on the stand-in."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from benchmarks.gpu_kernels import SideStream, compare


def test_models_for_kernels_of_a_gpu_are_planned_as_predicted(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest peak is that of the optimizer, so with no more room every plan has its peak there."""
    monkeypatch.setattr("benchmarks.gpu_kernels.ROOM", 1.0)
    gpu.set_workspace(1 << 20)
    row = compare(SideStream)
    assert (row.plain_distance, row.distance, row.error) == (0, 0, 0)
    assert row.recomputed > 0
    assert row.peak <= row.budget
    assert not row.is_wrong
    assert replace(row, distance=0.1).is_wrong
    assert replace(row, peak=row.budget + 1).is_wrong
