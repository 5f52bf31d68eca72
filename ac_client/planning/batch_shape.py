"""The shape of a batch: as a key that each forward makes in microseconds, and in words.

Two batches with the same key have the same shape. An object that neither Python nor torch's pytree unpacks
counts by its type and by the tensors in its attributes, at any depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter

from autoac.planner.formats.policy_set import Leaf, Shape
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.private import tree_leaves

_PLAIN = frozenset({int, float, complex, str, bytes})


Key = tuple[tuple[Any, ...], tuple[int, ...]]
"""The structure of a batch, and the dimensions of all its tensors in the order of its leaves."""


class ModelCall(NamedTuple):
    """A model, with the arguments of one call of it."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors of the batch."""
        return list(batch_tensors((*self.args, *self.kwargs.values())))

    @property
    def shape(self) -> Shape:
        """Return the shape of the batch, in words."""
        return shape_of(self.args, self.kwargs)


def key_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key:
    """Return the key of a batch: equal for equal shapes, and cheap."""
    structure: list[Any] = [len(args)]
    dims: list[int] = []
    if args:
        _add(args, structure, dims)
    if kwargs:
        structure += kwargs
        _add(kwargs.values(), structure, dims)
    return tuple(structure), tuple(dims)


def _add(items: Iterable[Any], structure: list[Any], dims: list[int]) -> None:
    for item in items:
        kind = type(item)
        if kind is Tensor or kind is Parameter or isinstance(item, Tensor):
            structure.append(item.dtype)
            if item.is_nested:
                structure.append("nested")
            else:
                shape = item.shape
                structure.append(len(shape))
                dims += shape
        elif kind is list or kind is tuple or isinstance(item, (list, tuple)):
            structure += (list, len(item))  # an empty one is not False
            _add(item, structure, dims)
        elif kind is dict or isinstance(item, Mapping):
            structure += (dict, len(item))
            for name in item:
                structure.append(name if type(name) is str else (repr(name),))
            _add(item.values(), structure, dims)
        elif item is None or kind is bool:
            structure.append(item)
        elif kind in _PLAIN:
            structure.append(kind)
        else:
            inside = _inside(item)
            structure += (kind, len(inside))
            _add(inside, structure, dims)


def shape_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shape:
    """Return the shape of a batch in words: `{"0": "int64[4, 128]", "scale['by']": "float32[64]"}`."""
    return {
        leaf: kind if dims is None else f"{kind}{list(dims)}" for leaf, kind, dims in leaves_of(args, kwargs)
    }


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """Return name, type, and dimensions of each leaf of a batch."""
    leaves: list[Leaf] = []
    for i, arg in enumerate(args):
        _leaves(str(i), arg, leaves)
    for name, arg in kwargs.items():
        _leaves(name, arg, leaves)
    return leaves


def _leaves(path: str, arg: Any, leaves: list[Leaf]) -> None:
    if isinstance(arg, Tensor):
        if arg.is_nested:
            leaves.append((path, "nested", None))
        else:
            leaves.append((path, str(arg.dtype).removeprefix("torch."), arg.shape))
    elif arg is None or isinstance(arg, bool):
        leaves.append((path, str(arg), None))
    elif isinstance(arg, (list, tuple)):
        for i, item in enumerate(arg):
            _leaves(f"{path}[{i}]", item, leaves)
    elif isinstance(arg, Mapping):
        for name, item in arg.items():
            _leaves(f"{path}[{name!r}]", item, leaves)
    else:
        inside = _inside(arg)
        if not inside:
            leaves.append((path, type(arg).__name__, None))
        for i, leaf in enumerate(inside):
            _leaves(f"{path}.{i}", leaf, leaves)


def _inside(item: Any) -> list[Any]:
    """Return the leaves of a container of torch's pytree, or the tensors that an object holds."""
    leaves = tree_leaves(item)
    if len(leaves) == 1 and leaves[0] is item:
        return list(batch_tensors((item,)))
    return leaves
