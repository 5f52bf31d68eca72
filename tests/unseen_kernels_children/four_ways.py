"""Compare a model's training steps under a plan, checkpoints and a region with its plain steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import ac_client


def compare_four_ways(make: Callable[[], nn.Sequential], x: Tensor) -> None:
    """Raise AssertionError that names each way in which an output or a gradient differs."""

    def model() -> nn.Sequential:
        torch.default_generator.manual_seed(0)
        return make()

    def planned() -> nn.Sequential:
        net = model()
        ac_client.pin(net, "must_recompute")
        return ac_client.apply(net, budget_gb=1.0, loss=lambda y: y.square().sum())

    def plainly(net: nn.Sequential) -> Tensor:
        y: Tensor = net(x)
        return y

    def in_checkpoints(net: nn.Sequential) -> Tensor:
        y = x
        for block in net:
            y = ac_client.checkpoint(block, y, use_reentrant=False)
        return y

    def in_a_region(net: nn.Sequential) -> Tensor:
        with ac_client.save_recompute_policy("recompute_all"):
            return plainly(net)

    def steps(net: nn.Sequential, run: Callable[[nn.Sequential], Tensor]) -> list[Tensor]:
        found = []
        for _ in range(2):
            net.zero_grad()
            y = run(net)
            y.square().sum().backward()
            found += [y.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        return found

    plain = steps(model(), plainly)
    assert all(map(torch.equal, plain, steps(model(), plainly))), "plain differs from plain"
    ways = {
        "apply": (planned(), plainly),
        "checkpoint": (model(), in_checkpoints),
        "save_recompute_policy": (model(), in_a_region),
    }
    wrong = [way for way, (net, run) in ways.items() if not all(map(torch.equal, plain, steps(net, run)))]
    assert not wrong, f"gradients differ in {', '.join(wrong)}"
    recomputed = ac_client.applied(ways["apply"][0]).report().recomputed
    assert recomputed > 0, "nothing was recomputed"
