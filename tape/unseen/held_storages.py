"""See when forward lets go of a storage that a region of `ac_client` still holds.

In training without a region the storage would be free then. The region counts its own tensors on a storage;
when they are the only references left, forward has let go of it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from torch import Tensor

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.storage_table import has_storage


class HeldStorages:
    """Count the tensors by which a region holds storages.

    Args:
        number_of: returns the number of the storage of a tensor; None if the storage is not followed.
        let_go: called with the number of a storage, when only the region's tensors refer to it.
        was_temporary: called with a tensor on a storage that is not followed, if only the region's tensors
            refer to it when the next op runs: a number that became a tensor, as in `x[0] = 1`.
    """

    def __init__(
        self,
        number_of: Callable[[Tensor], int | None],
        let_go: Callable[[int], None],
        was_temporary: Callable[[Tensor], None],
    ) -> None:
        self._number_of = number_of
        self._let_go = let_go
        self._was_temporary = was_temporary
        self._counts: dict[int, int] = {}  # tensors of the region, by address of the storage
        self._numbers: dict[int, int] = {}  # of storages that are followed, by address
        # Tensors by id, with the address of their storage: by id, since tensors compare by their elements.
        self._refs: dict[int, weakref.ref[Tensor]] = {}
        self._new: list[tuple[int, weakref.ref[Tensor]]] = []  # whose op may not be recorded yet

    def note(self, tensor: Tensor, *, saved: bool = False) -> None:
        """Count `tensor`, which only the region refers to, for as long as it lives.

        Args:
            saved: in place of autograd. What forward did not make, autograd would hold in its place.
        """
        if not has_storage(tensor) or (saved and self._number_of(tensor) is None):
            return
        address = tensor.untyped_storage()._cdata
        self._counts[address] = self._counts.get(address, 0) + 1

        def died(ref: weakref.ref[Tensor]) -> None:
            del self._refs[id(ref)]
            self._look(address)
            if self._counts[address] == 1:
                del self._counts[address]
                self._numbers.pop(address, None)
            else:
                self._counts[address] -= 1

        ref = weakref.ref(tensor, died)
        self._refs[id(ref)] = ref
        if address not in self._numbers:
            self._new.append((address, ref))

    def look(self) -> None:
        """Report the storages that only the region's tensors refer to."""
        new, self._new = self._new, []
        for address, ref in new:
            tensor = ref()
            if tensor is None:
                continue
            if (number := self._number_of(tensor)) is not None:
                self._numbers[address] = number
            elif private.storage_use_count(address) <= 1 + self._counts[address]:
                self._was_temporary(tensor)
        use_count, counts = private.storage_use_count, self._counts
        for address in [address for address in self._numbers if use_count(address) <= 1 + counts[address]]:
            self._look(address)

    def _look(self, address: int) -> None:
        number = self._numbers.get(address)
        # The storage's own Python object counts as well.
        if number is not None and private.storage_use_count(address) <= 1 + self._counts[address]:
            del self._numbers[address]
            self._let_go(number)


class _Recorded(threading.local):
    held: HeldStorages | None = None  # of the step that is recorded on this thread


recorded = _Recorded()
