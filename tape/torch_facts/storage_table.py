"""Keep one entry for each storage for as long as the storage lives; views share it.

torch keeps the Python object of a storage, attributes included, for as long as the storage itself. So an
entry is an attribute of that object, under a name of the table's own: it is found without a search, it is
deleted with the storage, and it cannot be mistaken for that of another storage at the same address.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from autoac.tape.torch_facts.private import FakeTensor, FakeTensorMode, is_batched, is_functorch_wrapped

T = TypeVar("T")

_STRIDED = torch.strided


def has_storage(tensor: Tensor) -> bool:
    """Return True if `tensor` is a plain window on one storage.

    False for sparse and mkldnn layouts, nested and quantized tensors, subclasses and transforms of torch.func
    that wrap other tensors, and the zeros that forward-mode AD makes without any memory. Fake tensors, whose
    storages have no address, are windows in a fake step alone (`fakes_have_storages`).
    """
    kind = type(tensor)
    wraps = kind is not Tensor and kind is not Parameter and is_wrapper(tensor)
    if wraps and not (isinstance(tensor, FakeTensor) and tensor.fake_mode is _fakes.mode):
        return False
    if tensor.layout is not _STRIDED or tensor.is_nested or tensor.is_quantized:
        return False
    # What a transform wraps is not a parameter.
    return kind is Parameter or not (
        tensor._is_zerotensor() or is_functorch_wrapped(tensor) or is_batched(tensor)
    )


class _Fakes(threading.local):
    mode: FakeTensorMode | None = None


_fakes = _Fakes()


def fakes_with_storages() -> FakeTensorMode | None:
    """Return the mode whose tensors are windows on storages now, on this thread."""
    return _fakes.mode


@contextmanager
def fakes_have_storages(mode: FakeTensorMode) -> Iterator[None]:
    """Take the tensors of `mode`, on this thread, for windows on storages: a fake step runs."""
    before, _fakes.mode = _fakes.mode, mode
    try:
        yield
    finally:
        _fakes.mode = before


def is_wrapper(tensor: Tensor) -> bool:
    """Return True if `tensor` is of a subclass with its own dispatch."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


_numbers = itertools.count()

PRUNED_AT = 1024  # references to storages, before dead ones are removed for the first time


class StorageTable(Generic[T]):
    """A table from storages to entries. Any view finds the entry, which is deleted with its storage.

    Attributes:
        name: the attribute of storages that holds their entry, for code too hot for a call:
            `storage.__dict__.get(table.name)`.
        refs: of the storages that have an entry, and of some that had one: `put` leaves at most twice as many
            in all, or `PRUNED_AT`.
    """

    def __init__(self) -> None:
        self.name = f"_autoac_{next(_numbers)}"
        self.refs: list[weakref.ref[torch.UntypedStorage]] = []
        self._prune_at = PRUNED_AT

    def of(self, storage: torch.UntypedStorage) -> T | None:
        """Return the entry of `storage`, or None."""
        return storage.__dict__.get(self.name)

    def get(self, tensor: Tensor) -> T | None:
        """Return the entry of `tensor`'s storage, or None."""
        return tensor.untyped_storage().__dict__.get(self.name)

    def set(self, tensor: Tensor, value: T) -> None:
        """Set the entry of `tensor`'s storage."""
        self.put(tensor.untyped_storage(), value)

    def put(self, storage: torch.UntypedStorage, value: T) -> weakref.ref[torch.UntypedStorage]:
        """Set the entry of `storage`; return a weak reference to it."""
        ref = weakref.ref(storage)
        entries: dict[str, Any] = storage.__dict__
        known = self.name in entries
        entries[self.name] = value
        if not known:
            self.refs.append(ref)
            if len(self.refs) > self._prune_at:
                self._prune()
        return ref

    def drop(self, tensor: Tensor) -> None:
        """Delete the entry of `tensor`'s storage."""
        tensor.untyped_storage().__dict__.pop(self.name, None)

    def clear(self) -> None:
        """Delete all entries."""
        refs, self.refs = self.refs, []
        for ref in refs:
            storage = ref()
            if storage is not None:
                storage.__dict__.pop(self.name, None)

    def items(self) -> Iterator[tuple[torch.UntypedStorage, T]]:
        """Yield each storage with its entry."""
        for ref in self.refs:
            storage = ref()
            if storage is not None and self.name in storage.__dict__:
                yield storage, storage.__dict__[self.name]

    def _prune(self) -> None:
        alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for ref in self.refs:
            storage = ref()
            if storage is not None and self.name in storage.__dict__:
                alive[id(ref)] = ref  # by id: listed twice if its entry was deleted in between
        self.refs = list(alive.values())
        self._prune_at = max(PRUNED_AT, 2 * len(alive))

    def __del__(self) -> None:
        self.clear()


def _nothing(_storage: torch.UntypedStorage) -> None:
    """Stand in for a function that is to be called with each storage."""


@contextmanager
def watching_resizes(
    before: Callable[[torch.UntypedStorage], None] = _nothing,
    after: Callable[[torch.UntypedStorage], None] = _nothing,
) -> Iterator[None]:
    """Call `before` and `after` with each storage whose size Python code changes inside; do not nest."""
    resize, own = torch.UntypedStorage.resize_, vars(torch.UntypedStorage).get("resize_")

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if storage.nbytes() != nbytes:
            before(storage)
        out = resize(storage, nbytes)
        after(storage)
        return out

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del torch.UntypedStorage.resize_  # the method of its base class is left
        else:
            torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]
