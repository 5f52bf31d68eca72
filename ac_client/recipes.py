"""How a tensor shows its storage, and whether that storage was written since."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

Recipe = tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]
"""How a tensor shows its storage: dtype, size, stride, offset, conjugate, negative."""


def recipe_of(tensor: Tensor) -> Recipe:
    """How `tensor` shows its storage."""
    return (
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),  # type: ignore[return-value]
        tensor.is_conj(),
        tensor.is_neg(),
    )


def show(storage: torch.UntypedStorage, recipe: Recipe) -> Tensor:
    """The tensor that shows `storage` by `recipe`. Call below autograd."""
    dtype, size, stride, offset, conjugate, negative = recipe
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if conjugate:
        torch._C._set_conj(tensor, True)
    if negative:
        torch._C._set_neg(tensor, True)
    return tensor


class StaleError(RuntimeError):
    """What backward needs was written in place after forward had recorded it."""


class Guard:
    """Notices writes in place that happen outside of a region, where nothing is recorded.

    A version counter is shared by a tensor and its views. The base of a view is what lives longest.
    A base with a history is held weakly: held strongly it would keep alive the graph that we hang on.
    """

    __slots__ = ("_owner", "_settled", "_version", "_weak")

    def __init__(self, tensor: Tensor) -> None:
        base = tensor._base
        owner = tensor if base is None else base
        self._weak = owner.grad_fn is not None
        self._owner: Any = weakref.ref(owner) if self._weak else owner
        self._settled = False
        self._version = -1 if owner.is_inference() else owner._version

    def renew(self) -> None:
        """Take the version as it is now; what was written before was recorded."""
        owner = self._tensor()
        if owner is not None and self._version >= 0 and not self._settled:
            self._version = owner._version

    def settle(self) -> None:
        """A write since the last renewal was not recorded: if there was one, it stays an error."""
        owner = self._tensor()
        self._settled = owner is not None and 0 <= self._version != owner._version

    def check(self, what: str) -> None:
        """Raise if there was a write since.

        Raises:
            StaleError: names `what` and the tensor.
        """
        owner = self._tensor()
        if owner is None or self._version < 0 or owner._version == self._version:
            return
        raise StaleError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{owner.dtype} {list(owner.shape)}], which {what} reads, is at version {owner._version}; "
            f"expected version {self._version} instead. It was written after forward; keep it as it is until "
            "backward is over."
        )

    def _tensor(self) -> Tensor | None:
        owner: Tensor | None = self._owner() if self._weak else self._owner
        return owner
