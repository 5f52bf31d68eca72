"""Test the comparison with published throughput on a model whose times are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoac.profiler import Device, KernelKind
from benchmarks import published
from benchmarks.published import Run, predicted_per_s

N = 64
FLOPS = 2 * N**3  # of a product
RATE = 1e9  # FLOP/s; memory is so fast that only products and the optimizer take time
GPU = Device(
    "NVIDIA A1 SXM",
    {},
    RATE,
    1e15,
    2**30,
    launch_us=0.0,
    efficiency=dict.fromkeys(KernelKind, 1.0),
    capability=(8, 0),
)


class Squares(nn.Linear):
    """One product in forward, two in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def squares() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        return Squares(N, N, bias=False), {"x": torch.empty(N, N, requires_grad=True)}


RUN = Run("Squares", GPU, "", squares, 1, 100.0, "here")
PRODUCT_S = FLOPS / RATE


@pytest.mark.parametrize(
    ("checkpoint", "products"), [("", 3), ("every second layer", 3.5), ("selective ops", 3.5)]
)
def test_step_is_forward_backward_and_what_runs_again(checkpoint: str, products: float) -> None:
    run = replace(RUN, checkpoint=checkpoint)
    assert predicted_per_s(run) == pytest.approx(1 / (products * PRODUCT_S), rel=1e-3)


def test_optimizer_is_shared_by_shards_and_microbatches() -> None:
    slow = replace(GPU, bytes_per_s=1e6, other_flops_per_s=1e18, efficiency=GPU.efficiency)
    alone, shared = (
        1 / predicted_per_s(replace(RUN, device=slow, shards=shards, microbatches=microbatches))
        for shards, microbatches in ((1, 1), (8, 2))
    )
    state_s = published.STATE_BYTES["AdamW"] * N * N / 1e6
    assert alone - shared == pytest.approx(state_s * 15 / 16, rel=1e-3)
