"""Describe a step to profile: model, batch and loss, and the training loop around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autoac.tape.errors import NothingToProfile
from autoac.tape.torch_facts.gradients import roots_of

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Loop:
    """The part of a training loop between two steps of the optimizer."""

    forwards: int = 1  # that run before one backward, which covers all of them
    drops: frozenset[int] = frozenset()  # outputs not held until backward, by position among all
    passes: int = 1  # of backward, through the same graph (`retain_graph=True`)


ONE_FORWARD = Loop()


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One step of a training loop: `loss(compiled(*args, **kwargs)).backward()`."""

    compiled: nn.Module  # a model, or torch.compile(model)
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    loss: Loss | None = None
    accumulates: bool | None = None  # gradients are added to existing ones; None: if there are gradients now
    loop: Loop = ONE_FORWARD


def loss_of(loss: Loss, output: Any) -> Tensor:
    """Return `loss(output)`.

    Raises:
        TypeError: the loss is not a tensor.
    """
    root = loss(output)
    if not isinstance(root, Tensor):
        raise TypeError(f"loss must return the tensor to differentiate, got a {type(root).__name__}")
    return root


def run_forwards(
    calls: Iterable[Callable[[], Any]],
    loss: Loss | None,
    ended: Callable[[Any], list[Tensor]],
    begin_loss: Callable[[], None],
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the forwards of a step, and its loss. Hold no other output than a loss needs.

    Args:
        calls: run one forward each, and return its output.
        loss: of the output, or of the list of the outputs of several forwards.
        ended: called with each output; returns the tensors that forward did not make.
        begin_loss: called before the loss.

    Returns:
        What `ended` returned, and the tensors where backward begins.
    """
    held: list[Tensor] = []
    outputs: list[Any] = []
    roots: list[Tensor] = []
    for call in calls:
        output = call()
        held += ended(output)
        if loss is None:
            roots += roots_of(output)
        else:
            outputs.append(output)
        del output
    if loss is not None:
        begin_loss()
        roots = [loss_of(loss, outputs if len(outputs) > 1 else outputs[0])]
    return held, [root for root in roots if root.requires_grad]


def check_roots(roots: Sequence[Tensor], leaves: Iterable[Tensor]) -> None:
    """Check that there is something to differentiate.

    Args:
        roots: that require a gradient, where backward begins.
        leaves: of the model and the batch.

    Raises:
        NothingToProfile: `roots` is empty.
    """
    if roots:
        return
    if not any(leaf.requires_grad for leaf in leaves):
        raise NothingToProfile(
            "no parameter and no input of the model requires a gradient; call requires_grad_() on those "
            "to train"
        )
    raise NothingToProfile(
        "no output of the model depends on a parameter or input that requires a gradient; "
        "pass loss=... if backward does not start at the model's output"
    )
