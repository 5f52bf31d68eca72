"""Test plans under Inductor, a short version of `make bench-compiled`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import Profile, find_minimum_peak
from autoac.profiler import profile
from autoac.tape.capture.allocations import AllocationRecord
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


class Layer(nn.Module):
    """Ops that Inductor fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin().exp()


class Layers(nn.Module):
    """Equal layers between eager ops."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)).exp()
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_layers_compiled_one_by_one_share_a_budget_with_eager_ops() -> None:
    x = batch()["x"]
    reference = Layers().double()
    reference(x.double()).backward()
    model = Layers()
    for layer in model.layers:
        layer.compile()
    budget = int(1.02 * find_minimum_peak(profile(model, x), time_limit_s=10).found)
    ac_client.apply(model, budget / 2**30)
    model(x).backward()
    model.zero_grad()
    with AllocationRecord(torch.device("cpu")) as record:
        model(x).backward()
    report, policy = ac_client.applied(model).report(), ac_client.applied(model).policy
    assert policy is not None
    recomputed = {key.partition("/")[0] for key, what in policy.decisions.items() if what != "save"}
    assert {".", "layers.1"} <= recomputed  # in eager and in compiled parts
    assert not report.off_path
    measured = policy.predicted.static_bytes + max(accumulate(change.nbytes for change in record.changes))
    assert measured == policy.predicted.peak_bytes <= budget  # the peak is in eager ops
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert got.grad is not None
        assert want.grad is not None
        assert torch.allclose(got.grad.double(), want.grad, rtol=1e-4, atol=1e-7)
