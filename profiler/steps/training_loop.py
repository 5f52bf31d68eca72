"""Describe a training loop: how many forwards run before one backward, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Loop:
    """The part of a training loop between two steps of the optimizer."""

    forwards: int = 1  # that run before one backward, which covers all of them
    drops: frozenset[int] = frozenset()  # outputs not held until backward, by position among all
    retains: bool = False  # backward frees nothing that forward saved (`retain_graph=True`)


ONE_FORWARD = Loop()


def loss_of(loss: Loss, output: Any) -> Tensor:
    """Return `loss(output)`.

    Raises:
        TypeError: the loss is not a tensor.
    """
    root = loss(output)
    if not isinstance(root, Tensor):
        raise TypeError(f"loss must return the tensor to differentiate, got a {type(root).__name__}")
    return root
