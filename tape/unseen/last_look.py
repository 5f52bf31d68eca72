"""Look at a storage for a last time when the model has let go of it.

A kernel may write to a tensor that no visible op reads any more but that autograd has saved. Plain autograd
then hands backward the later contents. So each storage is held a little longer than the model holds it: until
the next op, which compares it and lets it go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

from autoac.tape.torch_facts import private
from autoac.tape.unseen.held_storages import note_held

Version = TypeVar("Version")

_OURS = 2  # references to a storage that only we hold: our alias, and the storage's Python object


class LastLook(Generic[Version]):
    """The storages that are watched, each with the version that a recorded op has given it."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, Version]] = {}

    def hold(self, tensor: Tensor, version: Version) -> None:
        """Watch the storage of `tensor`, which has `version` from here on."""
        hidden = private.DisableTorchDispatch()  # in force until it is deleted
        alias = tensor.detach()
        note_held(alias)
        self._held[tensor.untyped_storage()._cdata] = alias, version
        del hidden

    def released(self, *, everything: bool = False) -> Iterator[tuple[Tensor, Version]]:
        """Let go of storages that nobody else holds, or of all; yield a tensor on each, and its version."""
        held, use_count = self._held, private.storage_use_count
        for address in [address for address in held if everything or use_count(address) <= _OURS]:
            yield held.pop(address)
