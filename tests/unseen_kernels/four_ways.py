"""Compare a model's training steps under a plan, checkpoints and a region with its plain steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import ac_client
from unseen_kernels.steps import equal, in_a_region, in_checkpoints, plainly, steps


def planned(net: nn.Module) -> nn.Module:
    """Have a plan recompute all that it may."""
    ac_client.pin(net, "must_recompute")
    return ac_client.apply(net, budget_gb=1.0)


def compare_four_ways(
    make: Callable[[], nn.Module],
    batch: Callable[[int], Tensor],
    prepare: Callable[[nn.Module], object] = lambda _: None,
) -> int:
    """Return how many ops the plan recomputes; raise AssertionError where an output or a gradient differs.

    Args:
        batch: return the batch of a step, by its number.
        prepare: called with the planned model before its steps.
    """

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    plain = steps(model(), plainly, batch)
    ways = {
        "apply": (planned(model()), plainly),
        "checkpoint": (model(), in_checkpoints),
        "save_recompute_policy": (model(), in_a_region),
    }
    prepare(ways["apply"][0])
    wrong = [way for way, (net, run) in ways.items() if not equal(plain, steps(net, run, batch))]
    assert not wrong, f"gradients differ in {', '.join(wrong)}"
    recomputed = ac_client.applied(ways["apply"][0]).report().recomputed
    assert recomputed > 0, "nothing was recomputed"
    return recomputed
