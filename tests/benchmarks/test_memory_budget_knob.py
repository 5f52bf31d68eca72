"""Test the comparison with torch's `activation_memory_budget`, a short version of `make bench-compiled`."""

from __future__ import annotations

import pytest
import torch
from blocks import WithLoss
from stepping import needs_compiled_plans

from benchmarks.memory_budget_knob import compare, report
from benchmarks.models.batches import ModelAndBatch

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def net() -> ModelAndBatch:
    return WithLoss(), {"x": torch.randn(256, 32)}


@needs_compiled_plans
@pytest.mark.usefixtures("one_thread")
def test_plan_at_each_peak_of_torch_recomputes_no_more() -> None:
    found = compare("MLP", net, [(1.0, "dp"), (0.5, "dp")])
    torch.compiler.reset()
    roomy, tight = found.rows
    assert roomy.torchs.matmuls == 0
    assert roomy.torchs.peak > tight.torchs.peak >= found.torchs_smallest >= found.smallest
    assert tight.torchs.recompute_us > roomy.torchs.recompute_us
    for row in found.rows:
        assert row.ours.peak <= row.torchs.peak
        assert row.ratio <= 1
    assert "slower at 0" in report([found])
