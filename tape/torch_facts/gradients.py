"""Find where backward begins, and read and free the gradients of leaves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autoac.tape.torch_facts.private import tree_leaves


def roots_of(output: Any) -> list[Tensor]:
    """Return the tensors where backward begins: the output's `.loss` or `["loss"]`, else all of the
    output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def leaves_of(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves to which a backward from `roots` gives gradients."""
    leaves = [root for root in roots if root.grad_fn is None]
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return leaves


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient of a parameter, if it has one.

    A tensor that `torch.func.functional_call` puts in place of a parameter need not be a leaf, and torch
    warns if its gradient is read.
    """
    return parameter.grad if parameter.is_leaf else None


@contextmanager
def noting_gradients(leaves: Iterable[Tensor], note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `note` with the gradient that backward gives to a leaf without one, once the leaf has it.

    If a leaf is used in several places, the engine first adds up the gradients of all.
    """
    without = [leaf for leaf in leaves if leaf.grad is None]
    nodes: Any = [(get_gradient_edge(leaf).node, weakref.ref(leaf)) for leaf in without]
    hooks = [node.register_hook(partial(_note_gradient, note, leaf)) for node, leaf in nodes]
    del nodes, without
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note_gradient(note: Callable[[Tensor], None], ref: weakref.ref[Tensor], *_gradients: Any) -> None:
    leaf = ref()
    if leaf is not None and leaf.grad is not None:
        note(leaf.grad)


class _AsNonLeaf(torch.autograd.Function):
    """Return the contents of a leaf as the output of an op, which may be written in place."""

    @staticmethod
    def forward(_ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def output_of_leaf(leaf: Tensor) -> Tensor:
    """Return a tensor on the memory of `leaf`, which forward may write in place as no leaf may be."""
    return cast(Tensor, _AsNonLeaf.apply(leaf))  # type: ignore[no-untyped-call]


def free_gradient(leaf: Tensor) -> None:
    """Free the gradient of `leaf`: as a hook, as if each gradient were added to an existing one."""
    leaf.grad = None
