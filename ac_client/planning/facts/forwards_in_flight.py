"""Forwards whose backward has not begun, and what a backward shows of the training loop.

A plan is made for one form of loop (`autoac.profiler.Loop`). The form says how many forwards run before one
backward goes through all of them, if backward frees what it has used, and which outputs the loop holds. A
loop of another form needs more memory or less. The outputs of the model show the form, at almost no cost:

- The autograd node of an output holds a prehook of ours. While the hook lives and has not been called, the
  forward is in flight: autograd holds what it saved, even under a plan that recomputes nothing.
- When the hook is called, a backward has reached the model. It is the first one, or an earlier backward has
  retained the graph. If grad mode is on, gradients of gradients may follow. Weak references to the storages
  of the outputs show which outputs are still held.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoac.planner.units import rounded_bytes
from autoac.profiler.static_memory import allocator_rounding
from autoac.tape.distributed.wrapped_tensors import below, with_memory
from autoac.tape.runtime.split_backward import current_split
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.gradients import gradient_of, roots_of
from autoac.tape.torch_facts.storage_table import has_storage


class BackwardFacts(NamedTuple):
    """Facts about a backward at the moment at which it reaches the graph of a forward. Sizes are in bytes."""

    passes: int = 1  # of backward that have reached the forward, this one included
    creates_graph: bool = False  # it does, or an earlier one did
    dropped: frozenset[int] = frozenset()  # outputs that the loop has let go of, by position among all
    dropped_nbytes: int = 0  # of these, without what backward starts from
    nbytes_outside: int = 0  # made between the model and the loss; on a CPU by differentiable ops
    held_nbytes: int = 0  # of outputs that only the loop can hold, and that the plan counts as dropped
    nbytes_live: int = 0  # that the plan counts between forward and backward
    graphs: int = 1  # of forwards, created since the last backward that freed one

    @property
    def first(self) -> bool:
        """Return True if no earlier backward has reached the forward."""
        return self.passes == 1


Listener = Callable[[BackwardFacts], None]


class ForwardsInFlight:
    """The forwards of one model that wait for their backward."""

    def __init__(self) -> None:
        self._forwards: list[weakref.ref[_InFlight]] = []
        self._last: weakref.ref[_InFlight] | None = None

    def waiting(self) -> int:
        """Return how many forwards have not been differentiated yet, and still may be."""
        self._forwards = [
            ref for ref in self._forwards if (forward := ref()) is not None and not forward.begun
        ]
        return len(self._forwards)

    def waiting_elements(self) -> int:
        """Return how many elements the batches of these forwards have."""
        self.waiting()
        return sum(forward.elements for ref in self._forwards if (forward := ref()) is not None)

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
        inside, roots = (list(chain.from_iterable(map(below, each))) for each in (tensors, roots_of(out)))
        forward = _InFlight(batch, inside, roots, listener)
        for node in nodes:
            node.register_prehook(forward)
            node.metadata[_MODEL] = True  # type: ignore[index]  # torch's stub takes the property for a method
        self._last = weakref.ref(forward)
        self._forwards.append(self._last)

    def ended(self) -> _InFlight | None:
        """Return the last forward if its graph is still there after a backward, and no forward waits."""
        forward = self._last() if self._last is not None else None
        return None if forward is None or not forward.begun or self.waiting() else forward

    def forget(self) -> None:
        """Stop watching all forwards."""
        for ref in self._forwards:
            if (forward := ref()) is not None:
                forward.listener = None
        self._forwards.clear()


_MODEL = "autoac: made by a planned model"  # in the metadata of autograd nodes


class _InFlight:
    """One forward. Only the autograd nodes of its outputs hold it, as their hook."""

    __slots__ = (
        "__weakref__",
        "_batch",
        "_created_graph",
        "_outputs",
        "_roots",
        "_tasks",
        "begun",
        "elements",
        "listener",
    )

    def __init__(
        self, batch: Sequence[Tensor], tensors: Sequence[Tensor], roots: Sequence[Tensor], listener: Listener
    ) -> None:
        self._batch = [weakref.ref(tensor) for tensor in batch if tensor.requires_grad]
        self.elements = sum(tensor.numel() for tensor in batch if not tensor.is_nested)
        self._created_graph = False
        self.listener: Listener | None = listener
        self.begun = False
        self._tasks: set[int] = set()  # graph tasks that have reached the forward
        self._roots = dict(_held(root) for root in roots if has_storage(root))
        held = [_held(tensor) if has_storage(tensor) else (None, 0) for tensor in tensors]
        self._outputs = [(ref, 0 if ref in self._roots else nbytes) for ref, nbytes in held]

    def kept_nbytes(self, of_graph: int, batch: Sequence[Tensor]) -> int:
        """Return the bytes that the loop's variables keep of the forward after its backward.

        They are those of outputs that are still held, and those of `of_graph` that are not outputs. Inputs
        that require a gradient count too, with the gradient, unless they are in `batch`.

        Args:
            of_graph: bytes that the graph, and the tensors where backward starts, hold after backward.
            batch: tensors that count elsewhere.
        """
        outputs = (*self._outputs, *self._roots.items())
        held = {id(ref): nbytes for ref, nbytes in outputs if ref is not None and ref()}
        alive = [tensor for ref in self._batch if (tensor := ref()) is not None]
        inputs = [tensor for tensor in alive if not any(tensor is one for one in batch)]
        nbytes = sum(_held(tensor)[1] for tensor in with_memory([*inputs, *map(gradient_of, inputs)]))
        return nbytes + sum(held.values()) + max(0, of_graph - sum(self._roots.values()))

    def __call__(self, _gradients: Any) -> None:
        if torch.compiler.is_compiling():  # compiled autograd traces this, for later steps too
            self.begun = True
            return
        task = private.current_graph_task_id()
        if task in self._tasks:
            return
        self._tasks.add(task)
        first, self.begun = not self.begun, True
        if self.listener is None or (not first and current_split() is not None):
            return
        gone = [i for i, (ref, _) in enumerate(self._outputs) if ref is not None and ref() is None]
        nbytes = sum({id(self._outputs[i][0]): self._outputs[i][1] for i in gone}.values())
        outside = _outside_nbytes() if first else 0
        self._created_graph |= torch.is_grad_enabled()
        passes = len(self._tasks)
        self.listener(BackwardFacts(passes, self._created_graph, frozenset(gone), nbytes, outside))


def _held(tensor: Tensor) -> tuple[weakref.ref[Any], int]:
    """Return a weak reference to the storage of `tensor`, and the bytes of its block."""
    storage = tensor.untyped_storage()
    return weakref.ref(storage), rounded_bytes(storage.nbytes(), allocator_rounding(tensor.device))


def _outside_nbytes() -> int:
    """Return the bytes made between the model and the backward that runs, with the largest gradients.

    They are read from the frame that called the engine, if it is on this thread, as on a CPU.
    """
    frame = _frame_of(private.engine_run_backward.__code__)
    if frame is None:
        return 0
    roots = frame.f_locals.get("t_outputs", ())
    del frame
    nodes = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    sizes = [_output_nbytes(node) for node in _outside(nodes)]
    return sum(sizes) + 2 * max(sizes, default=0)


def _frame_of(code: CodeType) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


MOST_NODES = 10_000  # of autograd that are looked at between a model and a loss


def _outside(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield the autograd nodes from `nodes` on, up to those that a planned model made."""
    seen: set[Any] = set()
    waiting = [node for node in nodes if node is not None]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node in seen or _MODEL in node.metadata:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions if following is not None]


_VIEWS = (
    "View", "Alias", "Transpose", "TBackward", "Permute", "Slice", "Select", "Expand", "Squeeze", "Unsqueeze",
    "AsStrided", "Split", "Unbind", "Narrow", "Diagonal", "Unfold", "Detach", "Chunk", "Accumulate",
)  # fmt: skip


def _output_nbytes(node: Any) -> int:
    """Return the bytes of what the op behind `node` returned; 0 if they share other memory."""
    name = node.name().rpartition("::")[2].removeprefix("Unsafe").removeprefix("Reshape")
    if name.startswith(_VIEWS):
        return 0
    total = 0
    for made in getattr(node, "_input_metadata", ()):
        numel = 1
        for size in made.shape:
            numel *= int(size)
        total += numel * made.dtype.itemsize
    return total
