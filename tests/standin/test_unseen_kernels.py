"""Test unseen kernels on the stand-in device, whose memory is the host's, also on a side stream."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from checkpoints import checkpoint_each
from torch import Tensor, nn

import ac_client
from benchmarks.unseen_kernels.layers import KINDS, Unseen, affine, batch, network
from benchmarks.unseen_kernels.library import seed_noise

pytestmark = [
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.usefixtures("unseen_kernels"),
]

Run = Callable[[nn.Module, Tensor], Tensor]


def loss_of(y: Tensor) -> Tensor:
    return y.float().square().mean()


def steps(model: nn.Module, run: Run) -> list[Tensor]:
    found: list[Tensor] = []
    for number in range(2):
        model.zero_grad()
        torch.manual_seed(number)
        seed_noise(number)
        x = batch().cuda().requires_grad_()
        y = run(model, x)
        loss_of(y).backward()
        found += [y.detach().cpu(), *(p.grad.cpu() for p in (x, *model.parameters()) if p.grad is not None)]
    return found


def plainly(net: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = net(x)
    return y


def in_a_region(net: nn.Module, x: Tensor) -> Tensor:
    with ac_client.save_recompute_policy("recompute_all"):
        return plainly(net, x)


def planned(net: nn.Module) -> nn.Module:
    ac_client.pin(net, "must_recompute")
    return ac_client.apply(net, budget_gb=1.0, loss=loss_of)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_have_the_plain_gradients(gpu: ModuleType, kind: str) -> None:
    plain = steps(network(kind).cuda(), plainly)
    ours = planned(network(kind).cuda())
    if kind == "own noise":  # the forward that is profiled draws numbers that no profile can restore
        loss_of(ours(batch().cuda().requires_grad_())).backward()
    ways = {
        "apply": (ours, plainly),
        "checkpoint": (network(kind).cuda(), checkpoint_each),
        "save_recompute_policy": (network(kind).cuda(), in_a_region),
    }
    wrong = [way for way, (net, run) in ways.items() if not all(map(torch.equal, plain, steps(net, run)))]
    assert not wrong
    assert ac_client.applied(ours).report().recomputed >= 4


@pytest.mark.parametrize("kind", ["rms norm", "swiglu", "rope unmarked", "attention", "cross entropy"])
def test_autocast_has_the_plain_gradients(gpu: ModuleType, kind: str) -> None:
    def cast(run: Run) -> Run:
        def casting(net: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return run(net, x)

        return casting

    plain = steps(network(kind).cuda(), cast(plainly))
    pinned = planned(network(kind).cuda())
    for net, run in ((pinned, plainly), (network(kind).cuda(), checkpoint_each)):
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
        y: Tensor = self.last(h * h)
        return y


@pytest.mark.parametrize("way", ["apply", "checkpoint", "save_recompute_policy"])
def test_kernel_on_a_side_stream_has_the_plain_gradients(gpu: ModuleType, way: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(OnSideStream(), OnSideStream()).cuda()

    run = {"apply": plainly, "checkpoint": checkpoint_each, "save_recompute_policy": in_a_region}[way]
    ours = planned(net()) if way == "apply" else net()
    assert all(map(torch.equal, steps(net(), plainly), steps(ours, run)))
