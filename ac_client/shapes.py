"""The shape of a batch: as a key that is made in microseconds at each forward, and in words.

Two batches of one key have one shape. What is in a container that neither Python nor torch's pytree
knows is not looked at: such an argument counts by its type.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from autoac.planner.policy_set import Leaf, Shape

_PLAIN = frozenset({int, float, complex, str, bytes})


def key_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """What tells the shapes of batches apart. Equal for equal shapes, and cheap."""
    key: list[Any] = [len(args)]
    for arg in args:
        _add(arg, key)
    for name, arg in kwargs.items():
        key.append(name)
        _add(arg, key)
    return tuple(key)


def _add(arg: Any, key: list[Any]) -> None:
    kind = type(arg)
    if kind is Tensor or kind is Parameter or isinstance(arg, Tensor):
        key.append(arg.dtype)
        key.append("nested" if arg.is_nested else arg.shape)
    elif arg is None or kind is bool:
        key.append(arg)
    elif kind in _PLAIN:
        key.append(kind)
    elif isinstance(arg, (list, tuple)):
        key += (list, len(arg))  # an empty one is not False
        for item in arg:
            _add(item, key)
    elif isinstance(arg, Mapping):
        key += (dict, len(arg))
        for name, item in arg.items():
            key.append(repr(name))
            _add(item, key)
    else:
        leaves = tree_leaves(arg)
        if len(leaves) == 1 and leaves[0] is arg:
            key.append(kind)
        else:
            key += (kind, len(leaves))
            for leaf in leaves:
                _add(leaf, key)


def shape_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shape:
    """The shape of a batch as a bucket names it: `{"0": "int64[4, 128]", "scale['by']": "float32[64]"}`."""
    return {
        leaf: kind if dims is None else f"{kind}{list(dims)}" for leaf, kind, dims in leaves_of(args, kwargs)
    }


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """The same before it is in words."""
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
        inside = tree_leaves(arg)
        if len(inside) == 1 and inside[0] is arg:
            leaves.append((path, type(arg).__name__, None))
        else:
            for i, leaf in enumerate(inside):
                _leaves(f"{path}.{i}", leaf, leaves)
