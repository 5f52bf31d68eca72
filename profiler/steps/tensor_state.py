"""Put gradients and buffers back after a step that ran for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.gradients import gradient_of


@contextmanager
def tensors_restored(
    model: nn.Module, leaves: Iterable[Tensor], *, accumulates: bool, missing: bool
) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Put the gradients of `leaves` and the buffers of `model` back: the same tensors, the same contents.

    Inside, hooks that run when a gradient is complete are not called: an optimizer in backward would step.

    Args:
        model: whose buffers a step inside may write.
        leaves: its parameters, and the tensors of the batch.
        accumulates: the step adds to the gradients that exist. False: it finds none.
        missing: it adds to zeros where a parameter has no gradient.

    Yields:
        A function that notes the gradients of further leaves, to which the step may add.
    """
    gradients: list[tuple[TensorWeakRef, Tensor | None, Tensor | None]] = []  # leaf, gradient, its contents
    noted: set[int] = set()

    def note(leaves: Iterable[Tensor], *, copies: bool = True) -> None:
        for leaf in leaves:
            if id(leaf) not in noted:
                noted.add(id(leaf))
                gradient = gradient_of(leaf)
                contents = gradient.detach().clone() if copies and gradient is not None else None
                gradients.append((TensorWeakRef(leaf), gradient, contents))  # forward may have made the leaf

    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_inference()
    ]
    trained = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    note(trained, copies=accumulates)
    hooks = [(found, dict(found)) for leaf in trained if (found := leaf._post_accumulate_grad_hooks)]
    try:
        for found, _ in hooks:
            found.clear()
        for leaf in trained:
            if not accumulates:
                leaf.grad = None
            elif missing and leaf.grad is None and isinstance(leaf, nn.Parameter):
                leaf.grad = torch.zeros_like(leaf)
        yield note
    finally:
        for found, before in hooks:
            found.update(before)
        # A graph that has saved a buffer before may go on to its backward.
        kept = private.unsafe_preserve_version_counter(tuple(buffer for _, _, buffer, _ in buffers))
        with torch.no_grad(), kept:
            for ref, gradient, contents in gradients:
                if (noted_leaf := ref()) is not None:
                    noted_leaf.grad = gradient
                if gradient is not None and contents is not None:
                    gradient.copy_(contents)
            for module, name, buffer, content in buffers:
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)
                buffer.copy_(content)
