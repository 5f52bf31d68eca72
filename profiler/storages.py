"""One entry for each storage, for as long as the storage lives; views share it.

torch keeps the Python object of a storage for as long as the storage itself, so a weak reference to it
tells whether an address still means the storage that it meant.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class StorageTable(Generic[T]):
    """What is known of each storage, found by any tensor that shows it."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def get(self, tensor: Tensor) -> T | None:
        """The entry of `tensor`'s storage, or None."""
        storage = tensor.untyped_storage()
        entry = self._entries.get(storage._cdata)
        if entry is None or entry[0]() is not storage:
            return None
        return entry[1]

    def set(self, tensor: Tensor, value: T) -> None:
        """Make `value` the entry of `tensor`'s storage."""
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = (weakref.ref(storage), value)

    def drop(self, tensor: Tensor) -> None:
        """Forget `tensor`'s storage."""
        self._entries.pop(tensor.untyped_storage()._cdata, None)

    def values(self) -> list[T]:
        """The entries of the storages that are alive."""
        return [value for ref, value in self._entries.values() if ref() is not None]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
