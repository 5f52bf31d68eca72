"""Small functions to checkpoint, and counts of the ops that their backward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from stepping import SeenOps
from torch import Tensor, nn
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ac_client

MM = torch.ops.aten.mm.default
THEIRS = functools.partial(torchs.checkpoint, use_reentrant=False)


def plainly(function: Any, *args: Any) -> Any:
    return function(*args)


def in_torch(function: Any, *args: Any) -> Any:
    return torchs.checkpoint(function, *args, use_reentrant=False)


def reentrant(function: Any, *args: Any) -> Any:
    return torchs.checkpoint(function, *args, use_reentrant=True)


def nested(function: Any, *args: Any) -> Any:
    return in_torch(lambda *args: in_torch(function, *args), *args)


def ours(function: Any, *args: Any) -> Any:
    return ac_client.checkpoint(function, *args)


def replayed(backward: Callable[[], Any], *names: str) -> list[int]:
    """Return how often `backward` ran each op of `names`. No derivative formula uses these ops."""
    with SeenOps() as ops:
        backward()
    return [ops.ran[name] for name in names]


def graded(loss: Tensor, inputs: Any, *names: str, retain_graph: bool = False) -> tuple[Any, list[int]]:
    """Return the gradients of `loss`, and how often backward ran each op of `names`."""
    found: list[Any] = []
    counts = replayed(
        lambda: found.append(torch.autograd.grad(loss, inputs, retain_graph=retain_graph)), *names
    )
    return found[0], counts


def chain(x: Tensor, w: Tensor | None = None) -> Tensor:
    """Run exp, sin and tanh. Backward replays exp and sin, and needs the output of tanh itself."""
    y = x.exp().sin()
    return (y if w is None else y @ w).tanh()


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def same(got: Any, want: Any) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def selective(policy: Any, **kwargs: Any) -> Any:
    return functools.partial(create_selective_checkpoint_contexts, policy, **kwargs)


def checkpoint_each(net: nn.Module, x: Tensor) -> Tensor:
    """Run `net`, a Sequential, with a checkpoint around each module."""
    for block in net:
        x = ac_client.checkpoint(block, x, use_reentrant=False)
    return x
