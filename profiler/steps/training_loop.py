"""The form of a training loop: how many forwards run before one backward, and where that begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autoac.profiler.torch_facts.batch_contents import batch_tensors
from autoac.profiler.torch_facts.private import tree_leaves

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Loop:
    """The part of a training loop between two steps of the optimizer."""

    forwards: int = 1  # that run before one backward, which goes through all of them
    drops: frozenset[int] = frozenset()  # outputs that are not held until backward, by position among all
    retains: bool = False  # backward frees nothing of what forward saved (`retain_graph=True`)


ONE_FORWARD = Loop()


def loss_of(loss: Loss, out: Any) -> Tensor:
    root = loss(out)
    if not isinstance(root, Tensor):
        raise TypeError(
            f"loss=... returned a {type(root).__name__}: it is to return the tensor to differentiate"
        )
    return root


def roots_of(out: Any) -> list[Tensor]:
    """Return where backward starts: `.loss` or `["loss"]` of the output if there is one, else all of it."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    found = tree_leaves(list(out.values()) if isinstance(out, Mapping) else out)
    return [t for t in found if isinstance(t, Tensor) and t.requires_grad]


def outputs_held(out: Any, loop: Loop) -> Any:
    """Return what the loop holds of an output until the end of backward."""
    if not loop.drops:
        return out
    return [tensor for i, tensor in enumerate(batch_tensors([out])) if i not in loop.drops]
