"""Look at a storage for a last time when the model has let go of it.

A kernel may write to a tensor that no visible op reads any more but that autograd has saved. Plain autograd
then hands backward the later contents. So each storage is held a little longer than the model holds it: until
the next op, which compares it and lets it go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from autoac.profiler.torch_facts import private

T = TypeVar("T")

_OURS = 2  # references to a storage that only we hold: our alias, and the storage's Python object


class LastLook(Generic[T]):
    """The storages that are watched, each with the version that a recorded op has given it.

    Args:
        look: called with a tensor on a storage, and its version, when nobody else holds the storage.
    """

    def __init__(self, look: Callable[[Tensor, T], None]) -> None:
        self._look = look
        self._held: dict[int, tuple[Tensor, T]] = {}

    def hold(self, tensor: Tensor, version: T) -> None:
        """Watch the storage of `tensor`, which has `version` from here on."""
        hidden = private.DisableTorchDispatch()  # in force until it is deleted
        self._held[tensor.untyped_storage()._cdata] = tensor.detach(), version
        del hidden

    def release(self, *, everything: bool = False) -> None:
        """Look at the storages that nobody else holds, or at everything, and let them go."""
        for address, (tensor, version) in list(self._held.items()):
            if everything or private.storage_use_count(address) <= _OURS:
                del self._held[address]
                self._look(tensor, version)
