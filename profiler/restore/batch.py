"""The batch of a profiled step: each forward finds it as it was, and so does the user afterwards.

A step is profiled by several forwards, and a forward may write over its inputs (`ids[ids < 0] = 0`), pop
from a dictionary that it was given, set an attribute of a dataclass, or add to a cache of keys and values.
So each gets containers of its own; objects it gets as they are, at any depth, with their attributes as they
were; and tensors are among the originals (written_tensors.py).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from autoac.profiler.restore.backward_hooks import BackwardHooks
from autoac.profiler.restore.module_state import forget_cached
from autoac.profiler.restore.written_tensors import Originals
from autoac.profiler.torch_facts.batch_contents import content_of, reached_items
from autoac.profiler.torch_facts.private import tree_map
from autoac.profiler.torch_facts.storage_table import has_storage


def _put(holder: Any, content: Mapping[Any, Any]) -> None:
    """Have it hold this and nothing else. No method of the user's is called.

    One that does already is left alone: a batch may lead to objects that other threads use.
    """
    now = content_of(holder)
    if len(now) == len(content) and all(
        a is b and c is d for (a, c), (b, d) in zip(now.items(), content.items(), strict=True)
    ):
        return
    if not isinstance(holder, dict):
        for name, value in content.items():
            object.__setattr__(holder, name, value)
        return
    kind = OrderedDict if isinstance(holder, OrderedDict) else dict
    kind.clear(holder)
    for name, value in content.items():
        kind.__setitem__(holder, name, value)


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
        self._objects: list[tuple[Any, dict[Any, Any]]] = []  # what holds their content, and that
        shared: set[int] = set()
        for thing in reached_items((*args, *kwargs.values())):
            if not isinstance(thing, Tensor):
                self._objects.append((thing, dict(content_of(thing))))
            elif originals.share(thing, self._own(thing)):
                shared.add(thing.untyped_storage()._cdata)
        self._shared = frozenset(shared)  # addresses of storages that the model works on itself

    def made(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a forward, which it may change as it likes."""
        self.let_go()
        stand_ins: dict[int, Tensor] = {}  # by identity of the user's: what is one tensor stays one

        def of(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            if id(item) not in stand_ins:
                stand_ins[id(item)] = self._stand_in(item)
            return stand_ins[id(item)]

        for holder, content in self._objects:
            _put(holder, {name: tree_map(of, value) for name, value in content.items()})
        args, kwargs = self._held = tree_map(of, self._given)
        return args, kwargs

    def let_go(self) -> None:
        """Hold the arguments of the last forward no longer. The user's objects are as they were."""
        self._held = None
        for holder, content in self._objects:
            _put(holder, content)

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
    hooks: BackwardHooks

    def __call__(self) -> Any:
        self.before()
        self.originals.restore()
        forget_cached()
        args, kwargs = self.batch.made()
        return self.model(*args, **kwargs)
