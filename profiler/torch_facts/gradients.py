"""Gradients of leaves."""

from __future__ import annotations

from torch import Tensor


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient that is there.

    What `torch.func.functional_call` puts in place of a parameter need not be a leaf: then torch warns.
    """
    return parameter.grad if parameter.is_leaf else None


def free_gradient_when_accumulated(leaf: Tensor) -> None:
    """Free each gradient of `leaf` at once, as a gradient that exists already would take it in."""
    leaf.register_post_accumulate_grad_hook(_free_gradient)


def _free_gradient(leaf: Tensor) -> None:
    leaf.grad = None
