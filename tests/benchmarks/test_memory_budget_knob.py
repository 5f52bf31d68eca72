"""Test the comparison with torch's `activation_memory_budget`, a short version of `make bench-compiled`."""

from __future__ import annotations

import pytest
import torch
from stepping import needs_compiled_plans
from torch import Tensor, nn

from benchmarks.memory_budget_knob import compare, report
from benchmarks.models.batches import ModelAndBatch

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Net(nn.Module):
    """Linear layers and activations, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()


def net() -> ModelAndBatch:
    return Net(), {"x": torch.randn(256, 32)}


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
