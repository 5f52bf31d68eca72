"""Hold the references of one Python object, to restore them later: one class for each kind of object."""

from __future__ import annotations

import enum
import random
import sys
import threading
import types
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from operator import is_not
from typing import Any

import numpy
import torch
from torch import Tensor, nn

MOST_COPIED_NBYTES = 64 * 2**20
"""Numpy arrays up to this size are copied; larger ones are only compared."""

_ABSENT: Any = object()


class Holder:
    """An object that refers to others, with the references that it has now.

    Attributes:
        owner, key: the holder through which the walk came here, and the key of the reference.
    """

    owner: Holder | None = None
    key: Any = None

    def items(self) -> Iterable[tuple[Any, Any]]:
        """Return the references, each with its key."""
        return ()

    def restore(self) -> None:
        """Restore the references, without calling a method of the user's."""

    def replace(self, key: Any, value: Any) -> bool:
        """Set the reference at `key` to `value`; return False if it cannot be set."""
        return False

    def name_of(self, key: Any) -> str:
        """Return the expression for the item at `key`, such as `[0]` or `.cache`."""
        return f"[{key!r}]" if isinstance(key, (int, str)) else "[...]"

    def path(self, key: Any) -> str:
        """Return the expression for the item at `key`, starting at the model."""
        names, holder = [self.name_of(key)], self
        while holder.owner is not None:
            names.append(holder.owner.name_of(holder.key))
            holder = holder.owner
        return "".join(reversed(names)).lstrip(".")


class Attributes(Holder):
    """The `__dict__` of a module or an object."""

    def __init__(self, attributes: dict[str, Any], path: str = "") -> None:
        self._attributes, self._content = attributes, dict(attributes)
        self._path = path  # of a module of the model

    def items(self) -> Iterable[tuple[Any, Any]]:
        return self._content.items()

    def restore(self) -> None:
        now, content = self._attributes, self._content
        if len(now) == len(content) and not any(map(is_not, now.values(), content.values())):
            return
        for name in [name for name in now if name not in content]:
            del now[name]
        for name, value in content.items():
            if now.get(name, _ABSENT) is not value:
                now[name] = value

    def changed(self) -> bool:
        """Return True if an attribute was set, added or deleted."""
        now = self._attributes
        return now.keys() != self._content.keys() or any(now[k] is not v for k, v in self._content.items())

    def replace(self, key: Any, value: Any) -> bool:
        self._attributes[key] = value
        return True

    def name_of(self, key: Any) -> str:
        return f"{self._path}.{key}"


class Slots(Holder):
    """An object with `__slots__`, as a holder of the objects in these slots."""

    def __init__(self, thing: Any, slots: Sequence[Any]) -> None:
        self._thing, self._slots = thing, slots
        self._content = [_slot(slot, thing) for slot in slots]

    def items(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._content)

    def restore(self) -> None:
        for slot, value in zip(self._slots, self._content, strict=True):
            now = _slot(slot, self._thing)
            if now is value:
                continue
            if value is _ABSENT:
                slot.__delete__(self._thing)
            else:
                slot.__set__(self._thing, value)

    def replace(self, key: Any, value: Any) -> bool:
        self._slots[key].__set__(self._thing, value)
        return True

    def name_of(self, key: Any) -> str:
        return f".{self._slots[key].__name__}"


def _slot(slot: Any, thing: Any) -> Any:
    try:
        return slot.__get__(thing, type(thing))
    except AttributeError:
        return _ABSENT


class ClassAttributes(Holder):
    """A class of the user's code, as a holder of its class attributes."""

    def __init__(self, kind: type) -> None:
        self._kind, self._content = kind, dict(vars(kind))

    def items(self) -> Iterable[tuple[Any, Any]]:
        return self._content.items()

    def restore(self) -> None:
        now = vars(self._kind)
        for name in [name for name in now if name not in self._content]:
            type.__delattr__(self._kind, name)
        for name, value in self._content.items():
            if now.get(name, _ABSENT) is not value:
                type.__setattr__(self._kind, name, value)

    def replace(self, key: Any, value: Any) -> bool:
        type.__setattr__(self._kind, key, value)
        return True

    def name_of(self, key: Any) -> str:
        return f" {self._kind.__name__}.{key}"


class _List(Holder):
    """A list or a deque, or an object of a derived class."""

    def __init__(self, value: Any, base: Any) -> None:
        self._value, self._base = value, base
        self._content = list(base.__iter__(value))

    def items(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._content)

    def restore(self) -> None:
        value, base = self._value, self._base
        if base.__len__(value) == len(self._content) and not any(
            map(is_not, base.__iter__(value), self._content)
        ):
            return
        if base is deque:
            deque.clear(value)
        else:
            base.__delitem__(value, slice(None))
        base.extend(value, self._content)

    def replace(self, key: Any, value: Any) -> bool:
        self._base.__setitem__(self._value, key, value)
        return True


class _PythonArray(Holder):
    """A bytearray, or an array of Python's."""

    def __init__(self, value: Any, base: Any) -> None:
        self._value, self._base, self._content = value, base, value[:]

    def restore(self) -> None:
        if not self._base.__eq__(self._value, self._content):
            self._base.__setitem__(self._value, slice(None), self._content)


class _Dict(Holder):
    """A dictionary, or an object of a derived class."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self._value = value
        self._base = OrderedDict if isinstance(value, OrderedDict) else dict
        self._content = list(self._base.items(value))

    def items(self) -> Iterable[tuple[Any, Any]]:
        return self._content

    def restore(self) -> None:
        value, base = self._value, self._base
        if len(self._content) == dict.__len__(value) and all(
            a is b and c is d for (a, c), (b, d) in zip(base.items(value), self._content, strict=True)
        ):
            return
        base.clear(value)
        for key, item in self._content:
            base.__setitem__(value, key, item)

    def replace(self, key: Any, value: Any) -> bool:
        self._base.__setitem__(self._value, key, value)
        return True


class _Set(Holder):
    """A set, or an object of a derived class."""

    def __init__(self, value: set[Any]) -> None:
        self._value, self._content = value, set(set.__iter__(value))

    def items(self) -> Iterable[tuple[Any, Any]]:
        return ((None, item) for item in self._content)

    def restore(self) -> None:
        set.intersection_update(self._value, self._content)
        set.update(self._value, self._content)


class ClosureCells(Holder):
    """The variables that a function closes over."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self._cells = function.__closure__ or ()
        self._content = [_content(cell) for cell in self._cells]

    def items(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._content)

    def restore(self) -> None:
        for cell, value in zip(self._cells, self._content, strict=True):
            if _content(cell) is value:
                continue
            if value is _ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = value

    def replace(self, key: Any, value: Any) -> bool:
        self._cells[key].cell_contents = value
        return True

    def name_of(self, key: Any) -> str:
        return f" {self._function.__qualname__}: {self._function.__code__.co_freevars[key]}"


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


class FixedParts(Holder):
    """A tuple, a bound method or the defaults of a function: fixed references to objects that may change."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def items(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._parts)


class _RandomState(Holder):
    """A generator of random numbers, which can restore its own state."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore  # type: ignore[method-assign]


class NumpyArray(Holder):
    """The numbers of a numpy array: a copy, or a checksum of a large one."""

    def __init__(self, value: numpy.ndarray[Any, Any]) -> None:
        self._value = value.view(numpy.ndarray)
        large = value.nbytes > MOST_COPIED_NBYTES
        self._copy = None if large else self._value.copy()
        self._checksum = self._sum() if large else 0

    def _sum(self) -> int:
        return zlib.crc32(numpy.ascontiguousarray(self._value).view(numpy.uint8).data)

    def items(self) -> Iterable[tuple[Any, Any]]:
        if self._value.dtype.hasobject:
            yield from enumerate(self._value.ravel().tolist())

    def restore(self) -> None:
        if self._copy is not None:
            self._value[...] = self._copy

    def changed(self) -> bool:
        """Return True if a large array, which cannot be restored, was written."""
        return self._copy is None and self._sum() != self._checksum


class Treatment(enum.Enum):
    """Treatment of the objects of one type by the walk."""

    PLAIN = enum.auto()
    ITERATOR = enum.auto()
    FUNCTION = enum.auto()
    OBJECT = enum.auto()
    CONTAINER = enum.auto()


_PLAIN = (int, float, complex, str, bytes, type, types.ModuleType, enum.Enum, Tensor, torch.Size, range)
_CONTAINERS: tuple[tuple[type, Callable[[Any], Holder]], ...] = (
    (list, lambda value: _List(value, list)),
    (deque, lambda value: _List(value, deque)),
    (bytearray, lambda value: _PythonArray(value, bytearray)),
    (array, lambda value: _PythonArray(value, array)),
    (dict, _Dict),
    (set, _Set),
    (tuple, lambda value: FixedParts(tuple(tuple.__iter__(value)))),
    (types.MethodType, lambda value: FixedParts((value.__self__, value.__func__))),
    (types.BuiltinFunctionType, lambda value: FixedParts((value.__self__,))),
    (types.MethodWrapperType, lambda value: FixedParts((value.__self__,))),
    (partial, lambda value: FixedParts((value.func, *value.args, value.keywords))),
    ((staticmethod, classmethod), lambda value: FixedParts((value.__func__,))),  # type: ignore[assignment]
    (property, lambda value: FixedParts((value.fget, value.fset))),
    (types.MappingProxyType, lambda value: FixedParts(tuple(value.values()))),
    (numpy.random.RandomState, lambda value: _RandomState(partial(value.set_state, value.get_state()))),
    (numpy.random.Generator, lambda value: _bit_generator(value.bit_generator)),
    (numpy.random.BitGenerator, lambda value: _bit_generator(value)),
    (random.Random, lambda value: _RandomState(partial(value.setstate, value.getstate()))),
    (numpy.ndarray, NumpyArray),
)


def _bit_generator(generator: Any) -> Holder:
    return _RandomState(partial(setattr, generator, "state", generator.state))


NOT_FOLLOWED = (sys.stdlib_module_names - {"types", "argparse", "collections"}) | {
    "builtins",
    "torch",
    "numpy",
    "ac_client",
    "autoac",
}
"""Packages whose objects are not followed. The three of the standard library only hold the user's objects."""

THREADS = (threading.Thread, Executor)


def kind_of(cls: type) -> tuple[Treatment, Callable[[Any], Holder] | None]:
    """Return how the walk treats objects of `cls`, and how a container of that type is held."""
    if issubclass(cls, _PLAIN) or cls is type(None) or issubclass(cls, numpy.memmap):
        return Treatment.PLAIN, None
    for base, holder in _CONTAINERS:
        if issubclass(cls, base):
            return Treatment.CONTAINER, holder
    root = top_package(cls)
    if issubclass(cls, types.FunctionType):
        return Treatment.FUNCTION, None
    if issubclass(cls, Iterator) and root in ("builtins", "itertools", "torch"):
        return Treatment.ITERATOR, None
    if root in NOT_FOLLOWED and not issubclass(cls, nn.Module):
        return Treatment.PLAIN, None
    return Treatment.OBJECT, None


def top_package(thing: Any) -> str:
    """Return the top-level package in which a class or function is defined."""
    module = getattr(thing, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object, without calling a method of the user's."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict and attributes is not value else None
