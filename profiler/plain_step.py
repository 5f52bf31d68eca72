"""Run training steps as they are, without a record, and put back what they changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from autoac.profiler.autocast import autocast_to
from autoac.profiler.steps.tensor_state import tensors_restored
from autoac.profiler.steps.training_loop import TrainingStep, run_forwards
from autoac.tape.distributed.fsdp import parameters_of
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.gradients import leaves_of
from autoac.tape.torch_facts.rng import generators_restored


@contextmanager
def steps_put_back(
    model: nn.Module, steps: Sequence[TrainingStep], device: torch.device
) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Put the gradients, buffers and generators back that `steps` of `model` change inside.

    Yields:
        A function that notes the gradients of further leaves, such as those of a loss.
    """
    batches = [tensor for step in steps for tensor in batch_tensors((*step.args, *step.kwargs.values()))]
    leaves = [*parameters_of(model), *batches]
    with (
        generators_restored(device),
        torch.enable_grad(),
        tensors_restored(model, leaves, accumulates=False, missing=False) as note_leaves,
    ):
        yield note_leaves


def run_batches(
    step: TrainingStep,
    count: int,
    device: torch.device,
    autocast: torch.dtype | None,
    note_leaves: Callable[[Iterable[Tensor]], None] | None = None,
) -> None:
    """Run forward and backward `count` times; the gradients add up, from none. Wait for the device.

    Args:
        note_leaves: called with the leaves to which each backward is about to give gradients.
    """
    for parameter in parameters_of(step.compiled):
        parameter.grad = None
    for _ in range(count):
        with autocast_to(device.type, autocast):
            call = partial(step.compiled, *step.args, **step.kwargs)
            _, roots = run_forwards([call], step.loss, lambda _: [], lambda: None)
        if note_leaves is not None:
            note_leaves(leaves_of(roots))
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        del roots
    if device.type == "cuda":
        torch.cuda.synchronize(device)
