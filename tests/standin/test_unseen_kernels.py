"""Test unseen kernels on the stand-in device, whose memory is the host's, also on a side stream."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from unseen_kernels.four_ways import compare_four_ways, planned
from unseen_kernels.layers import KINDS, Unseen, affine, batch, network
from unseen_kernels.steps import Run, in_a_region, in_checkpoints, loss_of, plainly
from unseen_kernels.steps import steps as taken

pytestmark = [
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.usefixtures("unseen_kernels"),
]


def steps(model: nn.Module, run: Run) -> list[Tensor]:
    return taken(model, run, lambda _: batch().cuda().requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_have_the_plain_gradients(gpu: ModuleType, kind: str) -> None:
    def prepare(planned: nn.Module) -> None:
        if kind == "own noise":  # the forward that is profiled draws numbers that no profile can restore
            loss_of(planned(batch().cuda().requires_grad_())).backward()

    recomputed = compare_four_ways(
        lambda: network(kind).cuda(), lambda _: batch().cuda().requires_grad_(), prepare
    )
    assert recomputed >= 4


@pytest.mark.parametrize("kind", ["rms norm", "swiglu", "rope unmarked", "attention", "cross entropy"])
def test_autocast_has_the_plain_gradients(gpu: ModuleType, kind: str) -> None:
    def cast(run: Run) -> Run:
        def casting(net: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return run(net, x)

        return casting

    plain = steps(network(kind).cuda(), cast(plainly))
    pinned = planned(network(kind).cuda())
    for net, run in ((pinned, plainly), (network(kind).cuda(), in_checkpoints)):
        assert all(map(torch.equal, plain, steps(net, cast(run))))


class OnSideStream(nn.Module):
    """Write over a visible op's output on a side stream, which is waited for on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), Unseen("scale")
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        h = self.linear(x).sin()
        self.side.wait_stream(main)
        h.record_stream(self.side)
        with torch.cuda.stream(self.side):
            affine(h, 0.6, 0.1)
        main.wait_stream(self.side)
        return self.last(h * h)


@pytest.mark.parametrize("way", ["apply", "checkpoint", "save_recompute_policy"])
def test_kernel_on_a_side_stream_has_the_plain_gradients(gpu: ModuleType, way: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(OnSideStream(), OnSideStream()).cuda()

    run = {"apply": plainly, "checkpoint": in_checkpoints, "save_recompute_policy": in_a_region}[way]
    ours = planned(net()) if way == "apply" else net()
    assert all(map(torch.equal, steps(net(), plainly), steps(ours, run)))
