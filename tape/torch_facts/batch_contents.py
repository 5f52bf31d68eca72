"""Find the tensors of a batch, in containers, dataclasses and other objects, at any depth."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch import Tensor, nn

from autoac.tape.torch_facts.private import containers

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})


def batch_tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `items`, in containers, dataclasses and other objects, at any depth."""
    seen: set[int] = set()
    waiting: deque[Iterable[Any]] = deque([items])  # objects may form long chains
    while waiting:
        for leaf in _leaves(waiting.popleft()):
            if isinstance(leaf, Tensor):
                yield leaf
                continue
            for holder, content in _contents(leaf):
                if id(holder) not in seen:
                    seen.add(id(holder))
                    waiting.append(content)


def _leaves(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        kind = type(item)
        if kind is Tensor or isinstance(item, Tensor):
            yield item
        elif kind in _PLAIN:
            continue
        elif isinstance(item, (list, tuple)):
            yield from _leaves(item)
        elif kind is dict or kind is MappingProxyType:
            yield from _leaves(item.values())
        elif (container := containers.get(kind)) is not None:
            yield from _leaves(container.flatten_fn(item)[0])
        else:
            yield item


def _contents(item: Any) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Yield what holds the content of `item` (a dictionary, attributes, slots), and the content."""
    if isinstance(item, _OPAQUE_TYPES):
        return
    if isinstance(item, dict):
        yield item, item.values()
    attributes = getattr(item, "__dict__", None)
    if isinstance(attributes, dict):
        if attributes is not item:
            yield attributes, attributes.values()
    elif dataclasses.is_dataclass(item):  # with slots
        names = (field.name for field in dataclasses.fields(item))
        yield item, [getattr(item, name) for name in names if hasattr(item, name)]


_OPAQUE_TYPES = (type, nn.Module, ModuleType, FunctionType)
