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


class _Key(weakref.ref):  # type: ignore[type-arg]
    """A storage, held weakly, with the address under which its table knows it."""

    __slots__ = ("address",)

    address: int


class StorageTable(Generic[T]):
    """What is known of each storage, found by any tensor that shows it; forgotten when the storage goes."""

    __slots__ = ("__weakref__", "_forget", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[_Key, T]] = {}  # open to those who have no time for a call
        entries = self.entries

        def forget(key: _Key) -> None:
            entry = entries.get(key.address)
            if entry is not None and entry[0] is key:
                del entries[key.address]

        self._forget = forget

    def get(self, tensor: Tensor) -> T | None:
        """The entry of `tensor`'s storage, or None."""
        entry = self.entries.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: T) -> None:
        """Make `value` the entry of `tensor`'s storage."""
        self.put(tensor.untyped_storage(), value)

    def put(self, storage: torch.UntypedStorage, value: T) -> None:
        """Make `value` the entry of `storage`."""
        key = _Key(storage, self._forget)
        key.address = address = storage._cdata
        self.entries[address] = (key, value)

    def drop(self, tensor: Tensor) -> None:
        """Forget `tensor`'s storage."""
        self.entries.pop(tensor.untyped_storage()._cdata, None)

    def values(self) -> list[T]:
        """The entries of the storages that are alive."""
        return [value for _, value in self.entries.values()]

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
