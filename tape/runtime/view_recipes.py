"""Describe how a tensor views its storage, and rebuild the tensor from a storage and that description."""

from __future__ import annotations

import torch
from torch import Tensor

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.storage_table import Window

Recipe = tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]
"""A view of a storage: dtype, size, stride, offset, conjugate bit, negative bit."""

_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


def recipe_of(tensor: Tensor) -> Recipe:
    """Return dtype, size, stride, offset and flags of `tensor`: all but the storage that it views."""
    dtype = tensor.dtype
    return (
        dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),  # type: ignore[return-value]
        tensor.is_conj() if dtype in _COMPLEX else False,
        tensor.is_neg(),
    )


def matches_recipe(tensor: Tensor, recipe: Recipe) -> bool:
    """Return True if `tensor` still views its storage as `recipe`, taken earlier, describes it."""
    dtype, size, stride, offset, conjugate, _ = recipe  # the negative bit only changes along with the dtype
    return (
        tensor.stride() == stride
        and tensor.shape == size
        and tensor.storage_offset() == offset
        and tensor.dtype is dtype
        and (dtype not in _COMPLEX or tensor.is_conj() is conjugate)
    )


def make_view(storage: torch.UntypedStorage, recipe: Recipe) -> Tensor:
    """Return a new tensor that views `storage` as `recipe` describes. Call it unrecorded."""
    dtype, size, stride, offset, conjugate, negative = recipe
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if conjugate:
        private.set_conj(tensor, True)
    if negative:
        private.set_neg(tensor, True)
    return tensor


def restrided(tensor: Tensor, recipe: Recipe) -> Tensor:
    """Return a view of the storage of `tensor` as `recipe` describes. Call it unrecorded."""
    dtype, size, stride, offset, _, negative = recipe
    if tensor.dtype is dtype and dtype not in _COMPLEX and not (negative or tensor.is_neg()):
        return tensor.as_strided(size, stride, offset)  # one op in place of two
    return make_view(tensor.untyped_storage(), recipe)


def window_of_recipe(recipe: Recipe) -> Window:
    """Return the bytes of its storage that a tensor with `recipe` covers."""
    dtype, size, stride, offset, _, _ = recipe
    return Window(offset * dtype.itemsize, dtype.itemsize, tuple(size), stride)
