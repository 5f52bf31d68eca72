"""The batch of a profiled step: each forward finds it as it was, and so does the user afterwards.

A step is profiled by several forwards, and a forward may write over its inputs (`ids[ids < 0] = 0`), pop
from a dictionary that it was given, or set an attribute of a dataclass. So each gets containers of its own;
its tensors are among the originals (originals.py).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from autoac.profiler.modules import forget_cached
from autoac.profiler.ops import has_storage
from autoac.profiler.originals import Originals

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})


def batch_tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among `items`, in containers, dataclasses and other objects that hold tensors."""
    yield from _tensors(items, set())


def _tensors(items: Iterable[Any], seen: set[int]) -> Iterator[Tensor]:
    for item in items:
        kind = type(item)
        if kind is Tensor or isinstance(item, Tensor):
            yield item
        elif kind in _PLAIN:
            continue
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item, seen)
        elif isinstance(item, Mapping):
            yield from _tensors(item.values(), seen)
        elif len(leaves := tree_leaves(item)) != 1 or leaves[0] is not item:
            yield from _tensors(leaves, seen)
        elif id(item) not in seen:
            seen.add(id(item))
            yield from _tensors(_attributes(item).values(), seen)


def _attributes(item: Any) -> Mapping[str, Any]:
    """What an object of a batch holds: a dataclass's fields; or attributes, if tensors are among them."""
    if isinstance(item, (type, nn.Module)):
        return {}
    if dataclasses.is_dataclass(item):
        names = [field.name for field in dataclasses.fields(item)]
        return {name: getattr(item, name) for name in names if hasattr(item, name)}
    held = getattr(item, "__dict__", {})
    return held if any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(held.values()))) else {}


class _Returned(torch.autograd.Function):
    """What a leaf holds, as an op returns it: unlike a leaf it may be written in place."""

    @staticmethod
    def forward(_ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Batch:
    """The arguments of a model, for one forward after the other.

    Args:
        args, kwargs: as the user passes them.
        of_input: from a tensor of theirs to what stands in for it, without a gradient of its own.
        originals: are told of the tensors that the model works on itself.

    Attributes:
        leaves: what stands in for tensors that want a gradient; the same in each forward.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        of_input: Callable[[Tensor], Tensor],
        originals: Originals,
    ) -> None:
        self._given = tuple(args), dict(kwargs)
        self._of_input = of_input
        self.leaves: list[Tensor] = []
        self._own_of: dict[int, Tensor] = {}  # what stands in, by identity of the user's
        self._held: Any = None  # what the last forward was called with: the user holds that through the step
        # Addresses of storages that the model works on itself.
        self._shared = frozenset(
            tensor.untyped_storage()._cdata
            for tensor in batch_tensors((*args, *kwargs.values()))
            if originals.share(tensor, self._own(tensor))
        )

    def made(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a forward, which it may change as it likes."""
        self.let_go()
        own: dict[int, Any] = {}  # by identity of the user's: what is one object stays one

        def of(item: Any) -> Any:
            if type(item) in _PLAIN:
                return item
            if id(item) not in own:
                own[id(item)] = self._stand_in(item) if isinstance(item, Tensor) else item
                if isinstance(item, MutableMapping):  # one that is no node of torch's pytree
                    own[id(item)] = held = copy.copy(item)
                    for name, value in item.items():
                        held[name] = tree_map(of, value)
                elif not isinstance(item, Tensor) and (attributes := _attributes(item)):
                    own[id(item)] = held = copy.copy(item)
                    for name, value in attributes.items():
                        object.__setattr__(held, name, tree_map(of, value))
            return own[id(item)]

        args, kwargs = self._held = tree_map(of, self._given)
        return args, kwargs

    def let_go(self) -> None:
        """Hold the arguments of the last forward no longer."""
        self._held = None

    def _stand_in(self, tensor: Tensor) -> Tensor:
        own = self._own(tensor)
        if tensor.requires_grad:
            return own if tensor.is_leaf else cast(Tensor, _Returned.apply(own))  # type: ignore[no-untyped-call]
        if not has_storage(tensor) or tensor.untyped_storage()._cdata not in self._shared:
            return own
        own = own.detach()  # an op may have given the last one a history
        return own.view_as(own) if tensor._is_view() else own

    def _own(self, tensor: Tensor) -> Tensor:
        own = self._own_of.get(id(tensor))
        if own is None:
            own = self._of_input(tensor)
            if tensor._is_view():
                own = own.view_as(own)  # autocast keeps casts of leaves, not of views
            if tensor.requires_grad:
                self.leaves.append(own.requires_grad_())
            self._own_of[id(tensor)] = own
        return own


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A forward of the model on its batch, as often as one likes."""

    model: nn.Module
    batch: Batch
    originals: Originals
    before: Callable[[], None]

    def __call__(self) -> Any:
        self.before()
        self.originals.restore()
        forget_cached()
        args, kwargs = self.batch.made()
        return self.model(*args, **kwargs)
