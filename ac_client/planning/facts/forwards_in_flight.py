"""Forwards whose backward has not begun, and what a backward shows of the training loop.

A plan is made for one form of loop. The form says how many forwards run before one backward goes through all
of them, and if backward frees what it has used. A loop of another form needs more memory or less. The outputs
of the model show the form, at almost no cost:

- The autograd node of an output holds a prehook of ours. While the hook lives and has not been called, the
  forward is in flight: autograd holds what it saved, even under a plan that recomputes nothing.
- When the hook is called, a backward has reached the model. It is the first one, or an earlier backward has
  retained the graph. If grad mode is on, gradients of gradients may follow.
- Where a pipeline splits backward, the first node of the weight half holds the prehook, too. Between the
  halves the forward is in flight again.

Weak references to the storages of the outputs show what names of the loop keep until the next forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoac.planner.units import rounded_bytes
from autoac.profiler.static_memory import allocator_rounding
from autoac.tape.distributed.pipelining import nodes_of_weight_half
from autoac.tape.distributed.wrapped_tensors import below, with_memory
from autoac.tape.runtime.split_backward import current_split
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.gradients import gradient_of, roots_of
from autoac.tape.torch_facts.storage_table import has_storage


class BackwardFacts(NamedTuple):
    """Facts about a backward at the moment at which it reaches the graph of a forward."""

    passes: int = 1  # of backward that have reached the forward, this one included
    creates_graph: bool = False  # it does, or an earlier one did
    graphs: int = 1  # of forwards, created since the last backward that freed one
    forward: InFlight | None = None


Listener = Callable[[BackwardFacts], None]
Storages = dict[weakref.ref[Any], int]
"""Weak references to storages, with the bytes of their blocks."""


class ForwardsInFlight:
    """The forwards of one model that wait for their backward.

    Attributes:
        made: outputs of all forwards and gradients that a schedule sends, as long as they exist.
    """

    def __init__(self) -> None:
        self.made = Storages()
        self._forwards: list[weakref.ref[InFlight]] = []
        self._last: weakref.ref[InFlight] | None = None

    def waiting(self) -> int:
        """Return how many forwards have not been differentiated yet, and still may be."""
        return len(self.alive())

    def alive(self) -> list[InFlight]:
        """Return these forwards."""
        alive = [one for ref in self._forwards if (one := ref()) is not None and not one.begun]
        self._forwards = [weakref.ref(one) for one in alive]
        return alive

    def add(self, batch: Sequence[Tensor], out: Any, listener: Listener) -> None:
        """Watch a forward that has just ended with `out`, until it is differentiated or dropped.

        Args:
            batch: the tensors that the forward was called with.
            out: what the forward returned.
            listener: receives the backwards that reach the forward.
        """
        tensors = list(batch_tensors([out]))
        nodes = {t.grad_fn for t in tensors if t.requires_grad and t.grad_fn is not None}
        if not nodes or torch.compiler.is_compiling():
            return
        forward = InFlight(batch, storages_of(tensors), storages_of(roots_of(out)), listener)
        for node in nodes:
            node.register_prehook(forward)
        self.made = {ref: nbytes for ref, nbytes in self.made.items() if ref()} | forward.outputs
        self._last = weakref.ref(forward)
        self._forwards.append(self._last)

    def note_gradients_of(self, batch: Sequence[Tensor]) -> None:
        """Add the gradients of `batch` to what was made, from now on, once for each of its tensors."""
        for tensor in batch:
            if tensor.requires_grad and not hasattr(tensor, _NOTED):
                setattr(tensor, _NOTED, tensor.register_hook(partial(_note_gradient, weakref.ref(self))).id)

    def ended(self) -> InFlight | None:
        """Return the last forward if its graph is still there after a backward, and no forward waits."""
        forward = self._last() if self._last is not None else None
        return None if forward is None or not forward.begun or self.waiting() else forward

    def forget(self) -> None:
        """Stop watching all forwards."""
        for ref in self._forwards:
            if (forward := ref()) is not None:
                forward.listener = None
        self._forwards.clear()


_NOTED = "_autoac_gradient_noted"
"""Attribute of a tensor whose gradients are noted: a number, so that the tensor can be saved."""


def _note_gradient(noting: Callable[[], ForwardsInFlight | None], gradient: Tensor | None) -> None:
    if gradient is not None and (forwards := noting()) is not None:
        forwards.made |= storages_of([gradient])


class InFlight:
    """One forward. Only the autograd nodes of its outputs hold it, as their hook."""

    def __init__(
        self, batch: Sequence[Tensor], outputs: Storages, roots: Storages, listener: Listener
    ) -> None:
        self.batch = storages_of(batch)
        self._inputs = [weakref.ref(tensor) for tensor in batch if tensor.requires_grad]
        self.elements = sum(tensor.numel() for tensor in batch if not tensor.is_nested)
        self._created_graph = False
        self.listener: Listener | None = listener
        self.begun = self._halves = False
        self._tasks: set[int] = set()  # graph tasks that have reached the forward
        self._roots, self.outputs = roots, roots | outputs

    def kept_nbytes(self, of_graph: int, batch: Sequence[Tensor]) -> int:
        """Return the bytes that the loop's variables keep of the forward after its backward.

        They are those of outputs that are still held, and those of `of_graph` that are not outputs. Inputs
        that require a gradient count too, with the gradient, unless they are in `batch`.

        Args:
            of_graph: bytes that the graph, and the tensors where backward starts, hold after backward.
            batch: tensors that count elsewhere.
        """
        held = sum(nbytes for ref, nbytes in self.outputs.items() if ref())
        alive = [tensor for ref in self._inputs if (tensor := ref()) is not None]
        inputs = [tensor for tensor in alive if not any(tensor is one for one in batch)]
        nbytes = sum(_held(tensor)[1] for tensor in with_memory([*inputs, *map(gradient_of, inputs)]))
        return nbytes + held + max(0, of_graph - sum(self._roots.values()))

    def __call__(self, _gradients: Any) -> None:
        if torch.compiler.is_compiling():  # compiled autograd traces this, for later steps too
            self.begun = True
            return
        task = private.current_graph_task_id()
        if task in self._tasks:
            return
        first = not self._tasks
        self._tasks.add(task)
        of_weights = nodes_of_weight_half() if first else []
        for node in of_weights[:1]:  # in between the forward waits again
            node.register_prehook(self)
        self.begun, self._halves = not of_weights, self._halves or bool(of_weights)
        if self.listener is None or (not first and (self._halves or current_split() is not None)):
            return
        self._created_graph |= torch.is_grad_enabled()
        self.listener(BackwardFacts(len(self._tasks), self._created_graph, forward=self))


def storages_of(tensors: Iterable[Tensor]) -> Storages:
    """Return the storages behind `tensors`."""
    return dict(_held(inner) for tensor in tensors for inner in below(tensor) if has_storage(inner))


def _held(tensor: Tensor) -> tuple[weakref.ref[Any], int]:
    """Return a weak reference to the storage of `tensor`, and the bytes of its block."""
    storage = tensor.untyped_storage()
    return weakref.ref(storage), rounded_bytes(storage.nbytes(), allocator_rounding(tensor.device))
