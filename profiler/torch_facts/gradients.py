"""Read and free the gradients of leaves."""

from __future__ import annotations

from torch import Tensor


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter, if it has one.

    A tensor that `torch.func.functional_call` puts in place of a parameter need not be a leaf, and torch
    warns if its gradient is read.
    """
    return parameter.grad if parameter.is_leaf else None


def free_gradient_when_accumulated(leaf: Tensor) -> None:
    """Free each gradient of `leaf` at once, as if it were added to an existing one."""
    leaf.register_post_accumulate_grad_hook(_free_gradient)


def _free_gradient(leaf: Tensor) -> None:
    leaf.grad = None
