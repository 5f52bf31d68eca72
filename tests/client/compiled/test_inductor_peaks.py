"""Test plans under Inductor, a short version of `make bench-compiled`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoac.planner import Profile
from autoac.profiler import profile
from benchmarks.inductor_peaks import train
from benchmarks.models.batches import Batch
from benchmarks.models.tiny import ZooModel


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
    passes: list[Any] = []
    with torch._inductor.config.patch(joint_custom_post_pass=passes.append):
        run = train(ZooModel("chain", Chain, batch), share=0.5)
    assert len(passes) == 2  # without a plan, and once for the profile and all plans
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


class Pooled(nn.Module):
    """Elementwise ops between a convolution and a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(self.convolution(x).sin().exp().cos(), 2).mean()


def test_profile_counts_memory_as_inductor_lays_it_out() -> None:
    model, x = Pooled(), torch.randn(4, 16, 8, 8)

    def found(backend: str) -> Profile:
        torch.compiler.reset()
        return profile(torch.compile(model, backend=backend), x)  # type: ignore[arg-type]

    inductor, aot_eager = found("inductor"), found("aot_eager")
    pool = next(i for i, key in enumerate(inductor.keys()) if "max_pool" in key)
    assert inductor.ops.workspace_nbytes[pool] == 0  # in registers
    copies = x.nbytes + model.convolution.weight.nbytes  # channels-last
    assert inductor.backward.other_nbytes[0] == aot_eager.backward.other_nbytes[0] + copies
    activation = 4 * 32 * 6 * 6 * 4
    assert held_at_cosine(inductor) == held_at_cosine(aot_eager) + copies - activation  # in registers


def held_at_cosine(found: Profile) -> int:
    """Return the most bytes of gradients and temporaries where backward computes the cosine."""
    names = [found.nodes[name].rpartition("/")[2] for name in found.backward.name]
    return found.backward.peak_nbytes[names.index("aten.cos.default")]
