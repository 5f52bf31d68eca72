"""Copy a training step for a fake one: its model, batch and loss, on tensors without memory.

The copy is a deep one, made at once: what two of the three share, their copies share. The step runs on the
copy, so the user's objects stay as they are. Functions are not copied: what a closure or a global variable
refers to is the user's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoac.profiler.steps.training_loop import TrainingStep
from autoac.tape.capture.known_values import copy_if_known, fake_like
from autoac.tape.distributed.ddp import copy_wrappers
from autoac.tape.errors import CannotProfile
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.gradients import free_gradient, output_of_leaf
from autoac.tape.torch_facts.inductor import compile_copies, keep_contexts, uncompiled

NEXT_MOVE = "profile it without on=..., by a real step on its own device"


def fake_copy(step: TrainingStep, *, accumulates: bool) -> TrainingStep:
    """Return a copy of `step` on tensors without memory. Call it under FakeTensorMode.

    Args:
        step: whose tensors may be real, fake, or on the meta device.
        accumulates: gradients are added to existing ones.

    Raises:
        CannotProfile: the model, the batch or the loss has an object that cannot be copied.
    """
    model, memo = step.compiled, dict[int, Any]()
    leaves: list[Tensor] = []
    for parameter in model.parameters():
        alias = nn.Parameter(fake_like(parameter), requires_grad=parameter.requires_grad)
        vars(alias).update(vars(parameter))  # attributes, such as the scales of a quantized weight
        memo[id(parameter)] = alias
        leaves.append(alias)
    for buffer in model.buffers():
        memo[id(buffer)] = copy_if_known(buffer)
    for tensor in batch_tensors((*step.args, *step.kwargs.values())):
        if id(tensor) not in memo:
            memo[id(tensor)], leaf = _input(tensor)
            leaves.append(leaf)
    originals = list(model.modules())
    parts = model, tuple(step.args), dict(step.kwargs), step.loss
    try:
        with _FakeCopies():
            keep_contexts(model, memo)
            copy_wrappers(model, memo)
            compiled, args, kwargs, loss = copy.deepcopy(parts, memo)
    except Exception as error:
        raise CannotProfile(
            type(uncompiled(model)).__name__,
            f"a fake step runs on a copy, but the model, its batch or its loss has no copy ({error})",
            NEXT_MOVE,
        ) from error
    compile_copies(originals, memo)
    for module in compiled.modules():  # hooks look at gradients, which have no numbers
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    if accumulates:
        for leaf in leaves:
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(free_gradient)
    return replace(step, compiled=compiled, args=args, kwargs=kwargs, loss=loss)


def _input(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a copy of a tensor of the batch, and the leaf that gets its gradient."""
    leaf = copy_if_known(tensor)
    if tensor._is_view():
        leaf = leaf.view_as(leaf)  # autocast caches casts of leaves, not of views
    if tensor.requires_grad:
        leaf.requires_grad_()
    return output_of_leaf(leaf) if tensor.requires_grad and not tensor.is_leaf else leaf, leaf


class _FakeCopies(TorchFunctionMode):
    """Copy the tensors that objects hold in other places without memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = _input(tensor)[0]
            return memo[id(tensor)]
        if func is Tensor.clone:  # of a parameter that is not one of a module
            return copy_if_known(args[0])
        return func(*args, **(kwargs or {}))


def own_leaves(original: nn.Module, leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return those of `leaves` to which backward gives gradients: all but the user's own tensors.

    Args:
        original: the model whose copy runs.
        leaves: of the graph.

    Raises:
        CannotProfile: a parameter of `original` is one of them.
    """
    parameters = {id(parameter) for parameter in original.parameters()}
    found = []
    for leaf in leaves:
        if id(leaf) in parameters:
            raise CannotProfile(
                type(original).__name__,
                "a function in it refers to the model itself, so that a copy runs parts of the original",
                NEXT_MOVE,
            )
        if type(leaf) is not Tensor and type(leaf) is not nn.Parameter:
            found.append(leaf)
    return found
