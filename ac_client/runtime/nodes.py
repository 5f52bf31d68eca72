"""Recorded ops and the values they made: all that backward needs to make one again.

NOTE [ What is tracked ]

Only what may be recomputed is tracked. An op whose outputs are saved leaves no node: to everything
downstream its outputs are what parameters and inputs are, sources held from outside. So saving an op
costs nothing beyond asking the policy, and the graph ends at saved values by itself.

    Value    one version of one storage that an unsaved op made; knows its node
    Source   one version of a storage from outside, held by the nodes that read it
    Node     an unsaved op with its arguments; in place of a tensor stands its Value, if it is the one that
             the op returned, or a Ref = (Value, recipe); or its Source, if it is the first that was read of
             it, or a Held = (Source, which of its tensors)
    Packed   what autograd holds in place of a tensor: a Value and a recipe

Ownership runs from autograd to the past: Packed -> Value -> Node -> Value or Source -> ... Nothing points
forward except by weak reference, so when autograd lets go of its last Packed, everything behind it is
freed at once, without the garbage collector. A recipe is what makes a tensor out of a storage, so views
cost nothing and need no node. The region's table knows each storage by its Value or, weakly, its Source.

Uses (rule 4 of the design; rules c to f of NOTE [ Rules of the schedule ] in planner/memory/schedule.py): a
Value has one use for each Packed that shows it and one for each node that reads it and has itself an
output with a use. `Value.uses` counts them over all of autograd's graph; a `Pass` counts down its own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ac_client.runtime.global_flags import ambient
from ac_client.runtime.view_recipes import (
    Guard,
    Recipe,
    StaleError,
    is_shown_by,
    recipe_of,
    show,
    version_of,
    without_history,
)
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.rng import GeneratorState


class Source:
    """A storage from outside the tracked ops: a parameter, an input, a saved value."""

    __slots__ = ("__weakref__", "_first", "_recipe", "guard", "nbytes", "tensors")

    def __init__(self, tensor: Tensor) -> None:
        self.tensors: list[Tensor] = []  # as nodes read it: bare, on the same storage, without a history
        self._first: weakref.ref[Tensor] | None = None  # whose like tensors[0] is
        self._recipe: Recipe | None = None  # of that, once it was asked for
        self.nbytes = tensor.untyped_storage().nbytes()
        historic = tensor.grad_fn is not None or tensor._base is not None
        self.guard: Guard | None = Guard(without_history(tensor) if historic else tensor)

    def hold(self, tensor: Tensor) -> Source | Held:
        """What stands for `tensor` among the arguments of a node."""
        if not self.tensors:
            self._first = weakref.ref(tensor)
        if _modes():
            unseen = private.DisableTorchDispatch()  # by modes around ours
            self.tensors.append(tensor.data)
            del unseen
        else:
            self.tensors.append(tensor.data)
        if self.guard is not None and self.guard.blind:
            self.keep_copy()  # a later write could not be noticed
        return Held(self, len(self.tensors) - 1) if len(self.tensors) > 1 else self

    def is_first(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the one that was read first, and as it was: `tensor.data = ...` runs no op."""
        if self._first is None or self._first() is not tensor:
            return False
        if self._recipe is None:
            self._recipe = recipe_of(self.tensors[0])
        return is_shown_by(tensor, self._recipe)

    def keep_copy(self) -> None:
        """Hold a private copy from now on, because the storage is about to be written."""
        storage = self.tensors[0].untyped_storage().clone()
        self.tensors = [show(storage, recipe_of(tensor)) for tensor in self.tensors]
        self.guard = None

    def read(self, at: int, reader: str) -> Tensor:
        """The tensor, for the node called `reader` that runs again.

        Raises:
            StaleError: it was written, freed or resized since.
        """
        tensor = self.tensors[at]
        if self.guard is not None:
            self.guard.check(reader)
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes != self.nbytes:
                raise StaleError(
                    f"the storage of a {tensor.dtype} {list(tensor.shape)}, which {reader} reads, has "
                    f"{nbytes} bytes instead of {self.nbytes}: it was freed or resized after forward. Keep "
                    "it until backward is over, or save what is computed from it."
                )
        return tensor


_modes = private.len_dispatch_stack

_serials = itertools.count()


@final
class Value:
    """One version of a storage that an unsaved op made."""

    __slots__ = (
        "__weakref__",
        "as_memory",
        "node",
        "packs",
        "recipe",
        "serial",
        "shown_by",
        "uses",
        "version",
    )

    def __init__(self, node: Node, shown_by: Tensor, *, as_memory: bool = False) -> None:
        self.node = node
        self.as_memory = as_memory  # made again, it is some tensor on its memory, not what the op returned
        self.shown_by = weakref.ref(shown_by)  # the tensor that the op returned or wrote
        self.recipe: Recipe | None = None  # of that tensor, once it was asked for
        self.serial = next(_serials)  # identity for those who must not keep it alive
        self.uses = 0
        self.packs: list[weakref.ref[Any]] = []  # what autograd was given for it, alive or not
        self.version: int | None = None  # of `shown_by`, once the mode was off: it may be written unseen

    def note_version(self) -> bool:
        """Take down the version that the tensor has; False if its counter cannot be reached."""
        tensor = self.shown_by()
        if tensor is not None:
            self.version = version_of(tensor)
        elif not self.as_memory:
            self.version = 0  # nothing has written it
        else:
            return False
        return self.version >= 0

    def recipe_if_made(self, tensor: Tensor) -> Recipe | None:
        """The recipe of `tensor` if it is the one that the op returned, as it was: nearly always."""
        if self.shown_by() is not tensor:
            return None
        if self.recipe is None:
            self.recipe = recipe_of(tensor)
        elif not is_shown_by(tensor, self.recipe):
            return None  # `tensor.data = ...` runs no op
        return self.recipe


class Ref(NamedTuple):
    """Another tensor on a Value as an argument of a node."""

    value: Value
    recipe: Recipe


class Held(NamedTuple):
    """Another tensor on a Source as an argument of a node."""

    source: Source
    at: int


class Undescribed(Exception):
    """An argument is a tensor that storage and recipe do not describe, so it could change unnoticed."""


class Node:
    """An unsaved op, ready to run again."""

    __slots__ = (
        "ambient",
        "args",
        "func",
        "insists",
        "kwargs",
        "name",
        "order",
        "outs",
        "random",
        "reads",
        "rewrites",
        "used_outs",
        "writes_sources",
    )

    def __init__(
        self,
        order: int,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: tuple[Value, ...],
        random: GeneratorState | None,
    ) -> None:
        self.order = order  # in forward
        self.name = name
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.reads = reads  # distinct
        self.random = random
        self.ambient = ambient()
        self.outs: tuple[weakref.ref[Value] | None, ...] = ()  # by output tensor
        self.rewrites: tuple[tuple[Value, Callable[[], Value | None]], ...] = ()  # old version, new version
        self.insists = ""  # who insisted that it is run again
        self.writes_sources = False  # replay those on copies
        self.used_outs = 0  # outputs with a use


class OfShape:
    """An op whose output must have one shape: a mask or an index sets it, which was made again as well."""

    __slots__ = ("_func", "_name", "_shape")

    def __init__(self, func: Callable[..., Any], name: str, shape: torch.Size) -> None:
        self._func = func
        self._name = name
        self._shape = shape

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the op.

        Raises:
            RuntimeError: its output has another shape.
        """
        out: Tensor = self._func(*args, **kwargs)
        if out.shape != self._shape:
            raise RuntimeError(
                f"{self._name} must return {list(self._shape)} as it did in forward, got {list(out.shape)} "
                "when it was run again: the mask or index that it reads has changed. Save the op that makes "
                'it, for example with ac_client.pin(module, "must_save")'
            )
        return out


def add_use(value: Value) -> None:
    """One more use of `value`; if it is the first of its node, one of each value that the node reads.

    The forward that is recording needs no lock for this, though a backward on another thread may take uses
    away: a count and what follows from it change between two calls, so no other thread comes in between,
    and the steps of both may come in any order.
    """
    stack = [value]
    while stack:
        value = stack.pop()
        value.uses += 1
        if value.uses == 1:
            node = value.node
            node.used_outs += 1
            if node.used_outs == 1:
                for read in node.reads:
                    if read.uses:
                        read.uses += 1
                    else:
                        stack.append(read)


def take_use(value: Value) -> None:
    """One use of `value` less; undoes `add_use`."""
    stack = [value]
    while stack:
        value = stack.pop()
        value.uses -= 1
        if value.uses == 0:
            node = value.node
            node.used_outs -= 1
            if node.used_outs == 0:
                stack.extend(node.reads)


def hold(value: Value, tensor: Tensor, order: int) -> None:
    """From now on `value` is what `tensor` holds, kept from outside; its node no longer makes it."""
    before, uses = value.node, value.uses
    if uses:
        value.uses = 1
        take_use(value)
    before.outs = tuple(None if ref is not None and ref() is value else ref for ref in before.outs)
    before.rewrites = tuple((old, _gone if new() is value else new) for old, new in before.rewrites)
    # It reads no value, so it may come before all others.
    node = Node(-order, "held", _itself, (Source(tensor).hold(tensor),), {}, (), None)
    node.outs = (weakref.ref(value),)
    value.node = node
    value.as_memory = True
    if uses:
        add_use(value)
        value.uses = uses


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _gone() -> None:
    """In place of a reference to what is not made any more."""


def alive(node: Node) -> list[Value]:
    """The values that `node` made and that something still refers to."""
    values = [ref() for ref in node.outs if ref is not None] + [new() for _, new in node.rewrites]
    return [value for value in values if value is not None]
