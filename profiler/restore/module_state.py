"""Put back the state that a model keeps in Python objects, after forwards that must not count.

A step is profiled by several forwards. A module that counts its calls, averages its inputs or fills a cache
would do so in each of them, and the first real step would then compute with the wrong count. So the state is
noted before, and put back after.

NOTE [ What is put back ]
Start at the modules and follow every reference: attributes, slots, items of containers, closures, defaults
of functions, bound methods, hooks, and the attributes of the user's own classes. Note what each of these
holds; that is one reference for each, not a copy. Copied are the numbers of numpy arrays and the states of
random generators. Tensors that are written in place are the business of written_tensors.py.

Not followed: modules of Python, objects of the standard library and of torch (locks, queues, optimizers),
and objects that hold a running thread, since what another thread does must not be undone.

What cannot be put back is refused. An iterator (a generator, `zip`, `itertools.count`) cannot be moved back,
so `ModuleState.guarded` puts a stand-in in its place, which raises CannotProfile when it is read. A large
array is not copied, and compared by a checksum.
"""

from __future__ import annotations

import enum
import logging
import random
import sys
import threading
import types
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from operator import is_not
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from autoac.profiler.errors import CannotProfile
from autoac.profiler.torch_facts.storage_table import has_storage

log = logging.getLogger("autoac.profiler")

MOST_HOLDERS = 200_000
"""Containers and objects that are followed in one model; a warning says where there are more."""

MOST_COPIED_NBYTES = 64 * 2**20
"""Numpy arrays up to this size are copied; larger ones are only compared."""

_ABSENT: Any = object()


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


class _Holder:
    """Something that refers to others, as it is now.

    Attributes:
        owner, key: where the walk found it: the holder that refers to it, and by what.
    """

    owner: _Holder | None = None
    key: Any = None

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield what it refers to, each with its key."""
        raise NotImplementedError

    def restore(self) -> None:
        """Have it refer to that and nothing else. Calls no method of the user's."""

    def replace(self, key: Any, value: Any) -> bool:
        """Put `value` at `key`; return False where that cannot be done."""
        return False

    def name_of(self, key: Any) -> str:
        """Return how the item at `key` is written."""
        return f"[{key!r}]" if isinstance(key, (int, str)) else "[...]"

    def path(self, key: Any) -> str:
        """Return the name of the item at `key`, from the model on."""
        names, holder = [self.name_of(key)], self
        while holder.owner is not None:
            names.append(holder.owner.name_of(holder.key))
            holder = holder.owner
        return "".join(reversed(names)).lstrip(".")


class _Attributes(_Holder):
    """The `__dict__` of a module or an object."""

    def __init__(self, attributes: dict[str, Any], path: str = "") -> None:
        self._attributes, self._content = attributes, dict(attributes)
        self._path = path  # of the module, where it is one of the model's

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from self._content.items()

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
        now = self._attributes
        return now.keys() != self._content.keys() or any(now[k] is not v for k, v in self._content.items())

    def replace(self, key: Any, value: Any) -> bool:
        self._attributes[key] = value
        return True

    def name_of(self, key: Any) -> str:
        return f"{self._path}.{key}"


class _Slots(_Holder):
    """The slots of an object."""

    def __init__(self, thing: Any, slots: Sequence[Any]) -> None:
        self._thing, self._slots = thing, slots
        self._content = [_slot(slot, thing) for slot in slots]

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(self._content)

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


class _Class(_Holder):
    """The attributes of one of the user's classes."""

    def __init__(self, kind: type) -> None:
        self._kind, self._content = kind, dict(vars(kind))

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from self._content.items()

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


class _List(_Holder):
    """A list, a deque, a bytearray or an array, or what is derived from one of them."""

    def __init__(self, value: Any, base: Any) -> None:
        self._value, self._base = value, base
        self._content = list(base.__iter__(value))

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(self._content)

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


class _Numbers(_Holder):
    """A bytearray, or an array of Python's."""

    def __init__(self, value: Any, base: Any) -> None:
        self._value, self._base, self._content = value, base, value[:]

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from ()

    def restore(self) -> None:
        if not self._base.__eq__(self._value, self._content):
            self._base.__setitem__(self._value, slice(None), self._content)


class _Dict(_Holder):
    """A dictionary, or what is derived from one."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self._value = value
        self._base = OrderedDict if isinstance(value, OrderedDict) else dict
        self._content = list(self._base.items(value))

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from self._content

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


class _Set(_Holder):
    """A set, or what is derived from one."""

    def __init__(self, value: set[Any]) -> None:
        self._value, self._content = value, set(set.__iter__(value))

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from ((None, item) for item in self._content)

    def restore(self) -> None:
        set.intersection_update(self._value, self._content)
        set.update(self._value, self._content)


class _Cells(_Holder):
    """The cells that a function closes over."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        self._cells = function.__closure__ or ()
        self._content = [_content(cell) for cell in self._cells]

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(self._content)

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


class _Parts(_Holder):
    """A tuple, a bound method or a function's defaults: fixed, with references to things that change."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(self._parts)


class _Restored(_Holder):
    """A generator of random numbers, which has a method that puts it back."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore  # type: ignore[method-assign]

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from ()


class _Array(_Holder):
    """The numbers of a numpy array."""

    def __init__(self, value: numpy.ndarray[Any, Any]) -> None:
        self._value = value.view(numpy.ndarray)
        large = value.nbytes > MOST_COPIED_NBYTES
        self._copy = None if large else self._value.copy()
        self._checksum = self._sum() if large else 0

    def _sum(self) -> int:
        return zlib.crc32(numpy.ascontiguousarray(self._value).view(numpy.uint8).data)

    def items(self) -> Iterator[tuple[Any, Any]]:
        if self._value.dtype.hasobject:
            yield from enumerate(self._value.ravel().tolist())

    def restore(self) -> None:
        if self._copy is not None:
            self._value[...] = self._copy

    def changed(self) -> bool:
        return self._copy is None and self._sum() != self._checksum


class _Sort(enum.Enum):
    """How things of one type are kept."""

    PLAIN = enum.auto()
    ITERATOR = enum.auto()
    FUNCTION = enum.auto()
    OBJECT = enum.auto()
    CONTAINER = enum.auto()


_PLAIN = (int, float, complex, str, bytes, type, types.ModuleType, enum.Enum, Tensor, torch.Size, range)
_CONTAINERS: tuple[tuple[type, Callable[[Any], _Holder]], ...] = (
    (list, lambda value: _List(value, list)),
    (deque, lambda value: _List(value, deque)),
    (bytearray, lambda value: _Numbers(value, bytearray)),
    (array, lambda value: _Numbers(value, array)),
    (dict, _Dict),
    (set, _Set),
    (tuple, lambda value: _Parts(tuple(tuple.__iter__(value)))),
    (types.MethodType, lambda value: _Parts((value.__self__, value.__func__))),
    (types.BuiltinFunctionType, lambda value: _Parts((value.__self__,))),
    (types.MethodWrapperType, lambda value: _Parts((value.__self__,))),
    (partial, lambda value: _Parts((value.func, *value.args, value.keywords))),
    ((staticmethod, classmethod), lambda value: _Parts((value.__func__,))),  # type: ignore[assignment]
    (property, lambda value: _Parts((value.fget, value.fset))),
    (types.MappingProxyType, lambda value: _Parts(tuple(value.values()))),
    (numpy.random.RandomState, lambda value: _Restored(partial(value.set_state, value.get_state()))),
    (numpy.random.Generator, lambda value: _bits(value.bit_generator)),
    (numpy.random.BitGenerator, lambda value: _bits(value)),
    (random.Random, lambda value: _Restored(partial(value.setstate, value.getstate()))),
    (numpy.ndarray, _Array),
)


def _bits(generator: Any) -> _Holder:
    return _Restored(partial(setattr, generator, "state", generator.state))


_OF_OTHERS = (sys.stdlib_module_names - {"types", "argparse", "collections"}) | {
    "builtins",
    "torch",
    "numpy",
    "ac_client",
    "autoac",
}
"""Packages whose objects are not followed. Of the standard library, three only hold what they are given."""

_THREADS = (threading.Thread, Executor)


def _sort_of(kind: type) -> tuple[_Sort, Callable[[Any], _Holder] | None]:
    if issubclass(kind, _PLAIN) or kind is type(None) or issubclass(kind, numpy.memmap):
        return _Sort.PLAIN, None
    for base, holder in _CONTAINERS:
        if issubclass(kind, base):
            return _Sort.CONTAINER, holder
    root = _root(kind)
    if issubclass(kind, types.FunctionType):
        return _Sort.FUNCTION, None
    if issubclass(kind, Iterator) and root in ("builtins", "itertools", "torch"):
        return _Sort.ITERATOR, None
    if root in _OF_OTHERS and not issubclass(kind, nn.Module):
        return _Sort.PLAIN, None
    return _Sort.OBJECT, None


def _root(thing: Any) -> str:
    module = getattr(thing, "__module__", None)
    return module.partition(".")[0] if isinstance(module, str) else ""


class ModuleState:
    """The present state of `model` and all that it refers to: counters, caches, `training`.

    Parameters, buffers, submodules and hooks that a forward registers go when it is put back.
    See NOTE [ What is put back ].

    Args:
        model: the root.
        copied: copies the numbers of a tensor that is an attribute of a module.
    """

    def __init__(self, model: nn.Module, copied: Callable[[Tensor], Tensor] = _cloned) -> None:
        self._name = type(model).__name__
        self._holders: list[_Holder] = []
        self._left_alone: list[tuple[_Attributes, _Holder | None, Any]] = []  # of what other threads change
        self._iterators: list[tuple[_Holder, Any, Any]] = []  # by whom they are held, and where
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        self._sorts: dict[type, tuple[_Sort, Callable[[Any], _Holder] | None]] = {}
        self._classes: dict[type, Sequence[Any]] = {}  # those that were met, with their slots
        self._seen: set[int] = set()
        modules = dict(model.named_modules())
        self._seen.update(map(id, modules.values()))
        for path, module in modules.items():
            self._add(_Attributes(module.__dict__, path), None, None)
            self._meet(type(module))
            for value in module.__dict__.values():
                if isinstance(value, Tensor) and has_storage(value) and not value.is_inference():
                    self._tensors.append((value, copied(value), value._version))
        at = 0
        while at < len(self._holders):
            self._follow(self._holders[at])
            at += 1
        if at > MOST_HOLDERS:
            log.warning(
                "%s refers to more than %d objects: what a forward changes in others than these stays "
                "changed after a profile",
                self._name,
                MOST_HOLDERS,
            )

    def _follow(self, holder: _Holder) -> None:
        seen, sorts = self._seen, self._sorts
        for key, value in holder.items():
            kind = type(value)
            sort, make = sorts.get(kind) or sorts.setdefault(kind, _sort_of(kind))
            if sort is _Sort.PLAIN or id(value) in seen:
                continue
            if len(self._holders) > MOST_HOLDERS:
                return
            seen.add(id(value))
            if make is not None:
                self._add(make(value), holder, key)
                if kind.__module__ not in ("builtins", "collections"):
                    self._meet_object(value, holder, key)  # derived from a container: it may have attributes
            elif sort is _Sort.OBJECT:
                self._meet_object(value, holder, key)
            elif sort is _Sort.FUNCTION:
                self._meet_function(value, holder, key)
            else:
                self._iterators.append((holder, key, value))

    def _add(self, made: _Holder, owner: _Holder | None, key: Any) -> None:
        made.owner, made.key = owner, key
        self._holders.append(made)

    def _meet_object(self, value: Any, holder: _Holder, key: Any) -> None:
        slots = self._meet(type(value))
        attributes = _attributes_of(value)
        if attributes is not None:
            made = _Attributes(attributes)
            if any(isinstance(item, _THREADS) for item in attributes.values()):
                self._left_alone.append((made, holder, key))
                return
            self._add(made, holder, key)
        if slots:
            self._add(_Slots(value, slots), holder, key)

    def _meet_function(self, value: types.FunctionType, holder: _Holder, key: Any) -> None:
        if _root(value) in _OF_OTHERS:
            return
        if value.__closure__:
            self._add(_Cells(value), holder, key)
        if value.__dict__:
            self._add(_Attributes(value.__dict__), holder, key)
        if value.__defaults__ or value.__kwdefaults__:
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            self._add(_Parts(defaults), holder, key)

    def _meet(self, kind: type) -> Sequence[Any]:
        """Note the attributes of a class and those that it derives from; return its slots."""
        known = self._classes.get(kind)
        if known is not None:
            return known
        slots: list[Any] = []
        self._classes[kind] = slots
        for base in kind.__mro__:
            if "__slots__" in vars(base):
                slots += [d for d in vars(base).values() if type(d) is types.MemberDescriptorType]
            if id(base) not in self._seen and _root(base) not in _OF_OTHERS:
                self._seen.add(id(base))
                self._add(_Class(base), None, None)
        return slots

    def restore(self) -> None:
        """Put it back."""
        for holder in self._holders:
            holder.restore()
        for tensor, numbers, version in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(numbers)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse what forwards inside do and `restore` cannot undo. Ends before `restore`.

        Raises:
            CannotProfile: from what runs inside, where it reads an iterator; at the end, where a large array
                has changed.
        """
        for holder, key, value in self._iterators:
            guard = _Guard(self._name, holder.path(key), type(value).__name__)
            while not holder.replace(key, guard) and holder.owner is not None:
                holder, key = holder.owner, holder.key
        yield
        for holder in self._holders:
            if isinstance(holder, _Array) and holder.changed():
                assert holder.owner is not None
                raise CannotProfile(
                    self._name,
                    f"its forward writes to {holder.owner.path(holder.key)}, a numpy array of more than "
                    f"{MOST_COPIED_NBYTES >> 20} MiB, and a profile takes several forwards",
                    "keep these numbers in a tensor",
                )
        for attributes, owner, key in self._left_alone:
            if attributes.changed():
                where = owner.path(key) if owner is not None else self._name
                log.warning(
                    "%s: %s holds a thread, so what was changed in it while the step was profiled is not put "
                    "back: what a forward counts there counts several times",
                    self._name,
                    where,
                )


class _Guard:
    """Stands in for an iterator that a profiled forward must not read."""

    def __init__(self, model: str, path: str, kind: str) -> None:
        self.__where = model, path, kind

    def __iter__(self) -> NoReturn:
        self.__refuse()

    def __next__(self) -> NoReturn:
        self.__refuse()

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self.__refuse()

    def __getitem__(self, _key: Any) -> NoReturn:
        self.__refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__refuse()

    def __refuse(self) -> NoReturn:
        model, path, kind = self.__where
        raise CannotProfile(
            model,
            f"its forward reads {path}, a {kind}, which cannot be moved back, and a profile takes several "
            "forwards",
            "keep the items in a list with a position, or pass them in the batch",
        )


def _attributes_of(value: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict and attributes is not value else None


@contextmanager
def modules_restored(model: nn.Module) -> Iterator[None]:
    """Leave all that `model` keeps as it was, as `ModuleState` does.

    Raises:
        CannotProfile: what runs inside changes something that cannot be put back.
    """
    before = ModuleState(model)
    try:
        with before.guarded():
            yield
    finally:
        before.restore()


@contextmanager
def nothing_cached() -> Iterator[None]:
    """Put aside what `torch.nn.utils.parametrize.cached` holds: it is not made of the parameters inside."""
    before = dict(parametrize._cache)
    try:
        yield
    finally:
        forget_cached()
        parametrize._cache.update(before)


def forget_cached() -> None:
    """Have parametrized weights computed again."""
    parametrize._cache.clear()
