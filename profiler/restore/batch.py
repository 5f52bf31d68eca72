"""Give each forward of a profiled step the batch as the user passed it, and leave the user's objects
unchanged.

A step is profiled by several forwards. A forward may write over its inputs (`ids[ids < 0] = 0`), pop from a
dictionary of the batch, set an attribute of a dataclass, or add to a cache of keys and values. So each
forward gets new containers. Other objects it gets as they are, at any depth, with their attributes
restored. Tensors are fake, or copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from autoac.tape.torch_facts.batch_contents import content_of, reached_items
from autoac.tape.torch_facts.gradients import output_of_leaf
from autoac.tape.torch_facts.private import tree_map
from autoac.tape.torch_facts.storage_table import has_storage


def _set_content(holder: Any, content: Mapping[Any, Any]) -> None:
    """Replace what `holder` holds by `content`, without calling a method of the user's.

    A holder with this content already is not touched: other threads may use objects of the batch.
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


class Batch:
    """The arguments of a model, for one forward after another.

    Args:
        args, kwargs: as the user passes them.
        of_input: returns the alias of a tensor; the alias need not require a gradient.

    Attributes:
        leaves: aliases of the tensors that require a gradient; the same in each forward.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        of_input: Callable[[Tensor], Tensor],
    ) -> None:
        self._user_arguments = tuple(args), dict(kwargs)
        self._of_input = of_input
        self.leaves: list[Tensor] = []
        self._aliases: dict[int, Tensor] = {}  # by id of the user's tensor
        self._latest: Any = None  # arguments of the latest forward: a user holds those through the step
        self._objects: list[tuple[Any, dict[Any, Any]]] = []  # objects of the user's, each with its content
        for item in reached_items((*args, *kwargs.values())):
            if not isinstance(item, Tensor):
                self._objects.append((item, dict(content_of(item))))
            else:
                self._alias_of(item)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for a forward, which may change them."""
        self.release()
        stand_ins: dict[int, Tensor] = {}  # by id of the user's tensor, so that one tensor stays one

        def stand_in_of(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            if id(item) not in stand_ins:
                stand_ins[id(item)] = self._stand_in(item)
            return stand_ins[id(item)]

        for holder, content in self._objects:
            _set_content(holder, {name: tree_map(stand_in_of, value) for name, value in content.items()})
        args, kwargs = self._latest = tree_map(stand_in_of, self._user_arguments)
        return args, kwargs

    def release(self) -> None:
        """Release the arguments of the latest forward, and restore the user's objects."""
        self._latest = None
        for holder, content in self._objects:
            _set_content(holder, content)

    def holds(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is a window on the memory of an argument."""
        return has_storage(tensor) and any(
            has_storage(alias) and alias.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            for alias in self._aliases.values()
        )

    def _stand_in(self, tensor: Tensor) -> Tensor:
        alias = self._alias_of(tensor)
        return output_of_leaf(alias) if tensor.requires_grad and not tensor.is_leaf else alias

    def _alias_of(self, tensor: Tensor) -> Tensor:
        alias = self._aliases.get(id(tensor))
        if alias is None:
            alias = self._of_input(tensor)
            if tensor._is_view():
                alias = alias.view_as(alias)  # autocast caches casts of leaves, not of views
            if tensor.requires_grad:
                self.leaves.append(alias.requires_grad_())
            self._aliases[id(tensor)] = alias
        return alias
