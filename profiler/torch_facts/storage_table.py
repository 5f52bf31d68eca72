"""One entry for each storage, for as long as the storage lives; views share it.

torch keeps the Python object of a storage for as long as the storage itself, attributes included. So an
entry is an attribute there, under the table's own name: it is found without a search, goes with the
storage, and no address can come to mean another one.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from autoac.profiler.torch_facts.private import FakeTensor

T = TypeVar("T")

_STRIDED = torch.strided


def has_storage(tensor: Tensor) -> bool:
    """Whether `tensor` is a plain window on one storage, so that storage and recipe say all about it.

    Not so: sparse and mkldnn layouts, nested and quantized tensors, subclasses that wrap other tensors, the
    zeros that forward-mode AD makes without any memory, and the fake tensors with which torch traces: their
    storages have no address.
    """
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter and (kind is FakeTensor or is_wrapper(tensor)):
        return False
    return _is_window(tensor)


def has_storage_or_fake(tensor: Tensor) -> bool:
    """As `has_storage`, for a step on fake tensors: one has a storage of the right size like any other."""
    if type(tensor) is FakeTensor:
        return _is_window(tensor)
    return has_storage(tensor)


def _is_window(tensor: Tensor) -> bool:
    return (
        tensor.layout is _STRIDED
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
    )


def is_wrapper(tensor: Tensor) -> bool:
    """Whether `tensor` is a subclass with a dispatch of its own."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


class Window(NamedTuple):
    """The bytes of its storage that a tensor shows."""

    offset: int  # of the first element, in bytes
    itemsize: int
    size: tuple[int, ...]
    stride: tuple[int, ...]  # in elements


def window_of(tensor: Tensor) -> Window:
    """Return the window of `tensor` on its storage."""
    itemsize = tensor.itemsize
    return Window(tensor.storage_offset() * itemsize, itemsize, tuple(tensor.size()), tuple(tensor.stride()))  # type: ignore[arg-type]


def disjoint(a: Window, b: Window) -> bool:
    """Return True if it is certain that no byte is in both windows of one storage.

    Chunks of a tensor along any dimension are: modulo the stride of the next outer dimension, each covers an
    interval, and the intervals do not meet. The stride may be that of any dimension; without one, the
    windows lie one behind the other.

    >>> left, right = Window(0, 4, (8, 2), (4, 1)), Window(8, 4, (8, 2), (4, 1))
    >>> disjoint(left, right), disjoint(left, left)
    (True, False)
    """
    if 0 in a.size or 0 in b.size:
        return True
    return any(_apart(a, b, period) for period in {0, *_steps(a), *_steps(b)})


def _steps(window: Window) -> Iterable[int]:
    return (s * window.itemsize for n, s in zip(window.size, window.stride, strict=True) if n > 1)


def _apart(a: Window, b: Window, period: int) -> bool:
    """Return True if the windows do not meet modulo `period`; 0: as they are."""
    first, second = _interval(a, period), _interval(b, period)
    if not period:
        return first[1] <= second[0] or second[1] <= first[0]
    behind = (second[0] - first[0]) % period  # of `second`, seen from the beginning of `first`
    return first[1] - first[0] <= behind and behind + second[1] - second[0] <= period


def _interval(window: Window, period: int) -> tuple[int, int]:
    """The bytes from the first to the last, those left out that repeat after `period`."""
    dimensions = zip(window.size, window.stride, strict=True)
    steps = [(n, s * window.itemsize) for n, s in dimensions if not period or s * window.itemsize % period]
    return window.offset, window.offset + sum((n - 1) * s for n, s in steps) + window.itemsize


_names = (f"_autoac_{number}" for number in itertools.count())

PRUNED_AT = 64  # notes of storages, before those that are gone are forgotten for the first time


class StorageTable(Generic[T]):
    """What is known of each storage, found by any tensor that shows it; forgotten when the storage goes.

    Attributes:
        name: of the attribute of storages that holds their entry: `storage.__dict__.get(table.name)` is for
            those who have no time for a call.
    """

    __slots__ = ("__weakref__", "_noted", "_prune_at", "name")

    def __init__(self) -> None:
        self.name = next(_names)
        self._noted: list[weakref.ref[torch.UntypedStorage]] = []
        self._prune_at = PRUNED_AT

    def of(self, storage: torch.UntypedStorage) -> T | None:
        """The entry of `storage`, or None."""
        return storage.__dict__.get(self.name)

    def get(self, tensor: Tensor) -> T | None:
        """The entry of `tensor`'s storage, or None."""
        return tensor.untyped_storage().__dict__.get(self.name)

    def set(self, tensor: Tensor, value: T) -> None:
        """Make `value` the entry of `tensor`'s storage."""
        self.put(tensor.untyped_storage(), value)

    def put(self, storage: torch.UntypedStorage, value: T) -> None:
        """Make `value` the entry of `storage`."""
        entries: dict[str, Any] = storage.__dict__
        known = self.name in entries
        entries[self.name] = value
        if not known:
            self._noted.append(weakref.ref(storage))
            if len(self._noted) > self._prune_at:
                self._prune()

    def drop(self, tensor: Tensor) -> None:
        """Forget `tensor`'s storage."""
        tensor.untyped_storage().__dict__.pop(self.name, None)

    def values(self) -> list[T]:
        """The entries of the storages that are alive."""
        self._prune()
        found = []
        for ref in self._noted:
            storage = ref()
            if storage is not None:
                found.append(storage.__dict__[self.name])
        return found

    def clear(self) -> None:
        """Forget everything."""
        noted, self._noted = self._noted, []
        for ref in noted:
            storage = ref()
            if storage is not None:
                storage.__dict__.pop(self.name, None)

    def __len__(self) -> int:
        """About how many storages have an entry: never less, up to `PRUNED_AT` or twice as many."""
        return len(self._noted)

    def _prune(self) -> None:
        kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for ref in self._noted:
            storage = ref()
            if storage is not None and self.name in storage.__dict__:
                kept[id(ref)] = ref  # noted twice if it was dropped between: a storage has one such reference
        self._noted = list(kept.values())
        self._prune_at = max(PRUNED_AT, 2 * len(kept))

    def __del__(self) -> None:
        self.clear()
