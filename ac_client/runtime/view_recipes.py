"""How a tensor shows its storage, and whether that storage was written since."""

from __future__ import annotations

import torch
from torch import Tensor

from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.storage_table import Window, is_wrapper

Recipe = tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]
"""How a tensor shows its storage: dtype, size, stride, offset, conjugate, negative."""


def recipe_of(tensor: Tensor) -> Recipe:
    """How `tensor` shows its storage."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),  # type: ignore[return-value]
        tensor.is_conj() if tensor.dtype in _COMPLEX else False,
        tensor.is_neg(),
    )


def is_shown_by(tensor: Tensor, recipe: Recipe) -> bool:
    """Whether `tensor`, which once did, still shows its storage by `recipe`."""
    dtype, size, stride, offset, conjugate, _ = recipe  # negated it is only in another dtype
    return (
        tensor.stride() == stride
        and tensor.shape == size
        and tensor.storage_offset() == offset
        and tensor.dtype is dtype
        and (dtype not in _COMPLEX or tensor.is_conj() is conjugate)
    )


_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


def show(storage: torch.UntypedStorage, recipe: Recipe) -> Tensor:
    """The tensor that shows `storage` by `recipe`. Call below autograd."""
    dtype, size, stride, offset, conjugate, negative = recipe
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if conjugate:
        private.set_conj(tensor, True)
    if negative:
        private.set_neg(tensor, True)
    return tensor


def window_by(recipe: Recipe) -> Window:
    """The bytes of its storage that a tensor of `recipe` shows."""
    dtype, size, stride, offset, _, _ = recipe
    return Window(offset * dtype.itemsize, dtype.itemsize, tuple(size), stride)


def without_history(tensor: Tensor) -> Tensor:
    """`tensor` detached, with the version counter of `tensor`. Seen by no dispatch mode."""
    if is_wrapper(tensor):
        return _with_counter(tensor)  # only its own dispatch knows how
    unseen = private.DisableTorchDispatch()  # from here on, not only in a with-block
    alias = _with_counter(tensor) if private.dispatch_key_is_excluded(_COUNTS) else tensor.detach()
    del unseen
    return alias


def _with_counter(tensor: Tensor) -> Tensor:
    # Inside a dispatch mode the key that shares the version counter is excluded.
    with private.SetExcludeDispatchKeyGuard(_COUNTS, False):
        return tensor.detach()


_COUNTS = private.DispatchKey.ADInplaceOrView


class StaleError(RuntimeError):
    """What backward needs was written in place after forward had recorded it."""


def version_of(tensor: Tensor) -> int:
    """Its version counter; -1 if it has none, being an inference tensor."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


class Guard:
    """Holds a tensor, and notices writes in place to it that happen where nothing is recorded.

    The tensor must be without history, else it would keep alive the graph that we hang on. An inference
    tensor has no version counter, so writes to it go unnoticed (`blind`).
    """

    __slots__ = ("_settled", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._settled = False
        self._version = version_of(tensor)

    @property
    def blind(self) -> bool:
        return self._version < 0

    def renew(self) -> None:
        """Take the version as it is now; what was written before was recorded."""
        if self._version >= 0 and not self._settled:
            self._version = self.tensor._version

    def settle(self) -> None:
        """A write since the last renewal was not recorded: if there was one, it stays an error."""
        self._settled = 0 <= self._version != self.tensor._version

    def check(self, what: str) -> None:
        """Raise if there was a write since.

        Raises:
            StaleError: names `what` and the tensor.
        """
        owner = self.tensor
        if self._version < 0 or owner._version == self._version:
            return
        raise StaleError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{owner.dtype} {list(owner.shape)}], which {what} reads, is at version {owner._version}; "
            f"expected version {self._version} instead. It was written after forward; keep it as it is until "
            "backward is over."
        )
