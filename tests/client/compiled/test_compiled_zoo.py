"""Test the compiled plan of a model with batch norms, a short version of `make bench-compiled`."""

from __future__ import annotations

import pytest

from benchmarks.compiled_peaks import compare
from benchmarks.models.tiny import ZOO

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_peak_is_exact_and_results_are_the_same() -> None:
    (entry,) = (entry for entry in ZOO if entry.name == "U-Net")
    (row,) = compare(entry, shares=[0.5])
    assert row.recomputed > 0
    assert row.same_results
    assert row.measured == row.predicted <= row.budget
