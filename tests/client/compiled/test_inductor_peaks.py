"""Test plans under Inductor, a short version of `make bench-compiled`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoac.profiler import profile
from benchmarks.inductor_peaks import train
from benchmarks.models.batches import Batch
from benchmarks.models.tiny import ZooModel

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Chain(nn.Module):
    """Equal layers, each with several ops that Inductor fuses. Equal layers share their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin().exp().cos()
        return x.mean()


def batch() -> Batch:
    return {"x": torch.linspace(-1, 1, 256 * 32).reshape(256, 32)}


def test_measured_steps_bring_peak_and_prediction_together() -> None:
    run = train(ZooModel("chain", Chain, batch), share=0.5)
    assert run.recomputed > 0
    assert run.corrections <= 2
    assert run.measured <= run.budget
    assert abs(run.measured - run.predicted) <= 0.02 * run.predicted
    assert run.error <= 2 * run.unplanned_error


@pytest.mark.parametrize("dynamic", [False, True])
def test_ops_inside_a_fused_kernel_cost_no_time(dynamic: bool) -> None:
    found = profile(torch.compile(Chain(), dynamic=dynamic), **batch())  # type: ignore[arg-type]
    times = {
        name: sorted(us for key, us in zip(found.keys(), found.ops.runtime_us, strict=True) if name in key)
        for name in ("addmm", "sin", "exp", "cos")
    }
    assert times["exp"] == [0.0] * 4  # reads and writes registers
    assert times["cos"][0] == 0.0 < times["cos"][1]  # the last one is fused with the mean
    assert times["sin"][0] > 0
    assert times["addmm"][0] > 0
