"""Take training steps with unseen kernels: plainly, in checkpoints, and in regions that recompute all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from checkpoints import checkpoint_each
from stepping import EventLog
from torch import Tensor, nn

from autoac.tape.runtime.policy_context import save_recompute_policy
from unseen_kernels.library import seed_noise

STEPS = 3  # under `apply`, the first is observed
Run = Callable[[nn.Module, Tensor], Tensor]


def loss_of(y: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.device)
    return (y.float() * weights).sum()


def plainly(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


def in_checkpoints(net: nn.Module, x: Tensor, log: EventLog | None = None) -> Tensor:
    logging = partial(save_recompute_policy, log=log)
    with mock.patch("autoac.tape.runtime.checkpoint.save_recompute_policy", logging):
        return checkpoint_each(net, x)


def in_a_region(net: nn.Module, x: Tensor, log: EventLog | None = None) -> Tensor:
    with save_recompute_policy("recompute_all", log=log):
        return plainly(net, x)


def steps(model: nn.Module, run: Run, batch: Callable[[int], Tensor]) -> list[Tensor]:
    """Return the outputs and gradients of `STEPS` training steps, on the host.

    Args:
        batch: return the batch of a step, by its number.
    """
    found: list[Tensor] = []
    for number in range(STEPS):
        model.zero_grad()
        torch.manual_seed(number)
        seed_noise(number)
        x = batch(number)
        y = run(model, x)
        loss_of(y).backward()
        found.append(y.detach().cpu().clone())
        found += [p.grad.cpu() for p in (x, *model.parameters()) if p.grad is not None]
        del y  # what a loop keeps of a step counts in the next one
    return found


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return True if both lists hold the same tensors, bit for bit."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
        for x, y in zip(a, b, strict=True)
    )
