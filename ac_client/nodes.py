"""Recorded ops and the values they made: all that backward needs to make one again.

NOTE [ What is tracked ]

Only what may be recomputed is tracked. An op whose outputs are saved leaves no node: to everything
downstream its outputs are what parameters and inputs are, sources held from outside. So saving an op
costs nothing beyond asking the policy, and the graph ends at saved values by itself.

    Value    one version of one storage that an unsaved op made; knows its node
    Source   one version of a storage from outside, held while some node reads it
    Node     an unsaved op with its arguments; tensors are replaced by a Ref = (Value | Source, recipe)
    Packed   what autograd holds in place of a tensor: a Ref

Ownership runs from autograd to the past: Packed -> Value -> Node -> Value or Source -> ... Nothing points
forward except by weak reference, so when autograd lets go of its last Packed, everything behind it is
freed at once, without the garbage collector. A recipe is what makes a tensor out of a storage, so views
cost nothing and need no node.

Uses (rule 4 of the design; rules c to f of NOTE [ Rules of the schedule ] in planner/schedule.py): a
Value has one use for each Packed that shows it and one for each node that reads it and has itself an
output with a use. `Value.uses` counts them over all of autograd's graph; a `Pass` counts down its own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ac_client.recipes import Guard, Recipe, recipe_of
from autoac.profiler.randomness import GeneratorState


class Source:
    """A storage from outside the tracked ops: a parameter, an input, a saved value."""

    __slots__ = ("guard", "read", "storage")

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.guard: Guard | None = Guard(tensor)
        self.read = False  # a node reads it

    def keep_copy(self) -> None:
        """Hold a private copy from now on, because the storage is about to be written."""
        self.storage = self.storage.clone()
        self.guard = None


_serials = itertools.count()


class Value:
    """One version of a storage that an unsaved op made."""

    __slots__ = ("__weakref__", "node", "packs", "serial", "uses")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.serial = next(_serials)  # identity for those who must not keep it alive
        self.uses = 0
        self.packs = 0  # how often it was packed; never counts down


class Ref(NamedTuple):
    """A tensor as an argument of a node or as autograd saved it."""

    origin: Value | Source
    recipe: Recipe


class Opaque(NamedTuple):
    """A tensor that storage and recipe do not describe, held as it is."""

    tensor: Tensor


class Node:
    """An unsaved op, ready to run again."""

    __slots__ = (
        "args",
        "func",
        "grad_enabled",
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
        self.grad_enabled = torch.is_grad_enabled()
        self.outs: list[weakref.ref[Value] | None] = []  # by output tensor
        self.rewrites: list[tuple[Value, weakref.ref[Value]]] = []  # old version, new version
        self.writes_sources = False  # replay those on copies
        self.used_outs = 0  # outputs with a use


def add_use(value: Value) -> None:
    """One more use of `value`; if it is the first of its node, one of each value that the node reads."""
    stack = [value]
    while stack:
        value = stack.pop()
        value.uses += 1
        if value.uses == 1:
            node = value.node
            node.used_outs += 1
            if node.used_outs == 1:
                stack.extend(node.reads)


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


def alive(node: Node) -> list[Value]:
    """The values that `node` made and that something still refers to."""
    values = [ref() for ref in node.outs if ref is not None] + [new() for _, new in node.rewrites]
    return [value for value in values if value is not None]


def as_argument(
    arg: Any, origin_of: Callable[[Tensor], Value | Source | None], reads: dict[Value, None]
) -> Any:
    """`arg` with its tensors replaced by Refs; the Values among them are added to `reads`."""
    if isinstance(arg, Tensor):
        origin = origin_of(arg)
        if origin is None:
            return Opaque(arg.detach())
        if type(origin) is Value:
            reads[origin] = None
        else:
            origin.read = True  # type: ignore[union-attr]
        return Ref(origin, recipe_of(arg))
    if type(arg) is list or type(arg) is tuple:
        for item in arg:
            if isinstance(item, Tensor):
                return type(arg)(as_argument(item, origin_of, reads) for item in arg)
    return arg


def as_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], origin_of: Callable[[Tensor], Value | Source | None]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Value, ...]]:
    """Arguments of a node, and the distinct Values that it reads."""
    reads: dict[Value, None] = {}
    flat = tuple(as_argument(arg, origin_of, reads) for arg in args)
    named = {name: as_argument(arg, origin_of, reads) for name, arg in kwargs.items()} if kwargs else {}
    return flat, named, tuple(reads)
