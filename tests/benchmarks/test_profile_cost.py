"""Check the memory figures of `python -m benchmarks.profile_cost`."""

from __future__ import annotations

import torch
from torch import nn

from autoac.profiler import profile
from benchmarks.profile_cost import FakeCost, Row, largest_node_nbytes, render


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.tanh() * 2).sum()


def test_the_largest_node_counts_what_it_unpacks_and_the_gradients_around_it() -> None:
    x = torch.linspace(-1, 1, 1 << 18, requires_grad=True)  # a MiB
    assert largest_node_nbytes(profile(Tanh(), x)) >> 20 == 3, "tanh, its gradient, and that of x"


def test_the_summary_counts_models_within_the_limits() -> None:
    lean = Row("lean", 300, 90, 60, plain_s=1.0, ratios=[2.0, 2.4, 9.0])
    greedy = Row("greedy", 300, 150, 147, plain_s=0.5, ratios=[2.6, 2.7, 2.8])
    page = render([lean, greedy], FakeCost(7, [1.0, 0.5], 2**30))
    assert "a third of the memory in 1 of 2 models, and a profile takes at most 2.5 plain steps in 1." in page
    assert "| lean | 1000 | 300 B | 90 B | 0.30 | 0.20 | 2.40 |" in page
    assert "| greedy | 500 | 300 B | 150 B | 0.50 | 0.49 | 2.70 |" in page
