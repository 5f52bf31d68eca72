"""Call the user's model on aliases of its tensors, as often as needed, and leave the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autoac.profiler.restore.backward_hooks import BackwardHooks, backward_hooks
from autoac.profiler.restore.batch import Batch
from autoac.profiler.restore.module_state import clear_parametrization_cache, parametrization_cache_restored
from autoac.tape.checkpoints.own_checkpoints import plain_checkpoints
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.gradients import free_gradient_when_accumulated
from autoac.tape.torch_facts.inductor import call_as_compiled, is_called_compiled


@dataclass(frozen=True, slots=True)
class Call:
    """A forward of the model as a function. Each call starts from the same state of model and batch."""

    entry: Callable[..., Any]  # the model, or what torch.compile made of it
    batch: Batch
    hooks: BackwardHooks
    unplanned: dict[str, None]  # messages about code that decides itself what autograd holds

    def __call__(self) -> Any:
        clear_parametrization_cache()
        args, kwargs = self.batch.arguments()
        if is_called_compiled(self.entry):  # torch.compile handles checkpoints itself
            return call_as_compiled(self.entry, args, kwargs)
        with plain_checkpoints(self.unplanned):
            return call_as_compiled(self.entry, args, kwargs)


@contextmanager
def isolated_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of_parameter: Callable[[Tensor], Tensor],
    of_buffer: Callable[[Tensor], Tensor],
    of_input: Callable[[Tensor], Tensor],
    *,
    accumulates: bool,
    entry: Callable[..., Any] | None = None,
) -> Iterator[tuple[Call, list[Tensor]]]:
    """Yield a call of the model on aliases, and the leaves to which its backward may give gradients.

    The aliases replace the model's own parameters and buffers until the end, for backward too: a part of
    forward that runs again in backward (torch.utils.checkpoint), and hooks, find the aliases.

    Args:
        model, args, kwargs: as for `profile`.
        entry: runs the model; by default the model itself.
        of_parameter, of_buffer, of_input: return the alias of a tensor of the model or the batch; the alias
            need not require a gradient.
        accumulates: True if gradients are added to existing ones.
    """
    leaves: list[Tensor] = []
    aliases: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        aliases[name] = nn.Parameter(of_parameter(parameter), requires_grad=parameter.requires_grad)
        vars(aliases[name]).update(vars(parameter))  # attributes, such as the scales of a quantized weight
        if parameter.requires_grad:
            leaves.append(aliases[name])
    for name, buffer in model.named_buffers():
        aliases[name] = of_buffer(buffer)
    batch = Batch(args, kwargs, of_input)
    leaves += batch.leaves
    if accumulates:
        for leaf in leaves:
            free_gradient_when_accumulated(leaf)
    with (
        private.reparametrize_module(model, aliases, tie_weights=True),
        parametrization_cache_restored(),
        backward_hooks(model) as hooks,
        private.compiled_autograd_off(),  # it would trace what autograd holds in place of saved tensors
    ):
        try:
            yield Call(model if entry is None else entry, batch, hooks, {}), leaves
        finally:
            batch.release()
