"""Describe how a tensor views its storage, and rebuild the tensor from a storage and that description."""

from __future__ import annotations

import torch
from torch import Tensor

from autoac.tape.torch_facts import private

Recipe = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, bool, bool]
"""A view of a storage: dtype, size, stride, offset, conjugate bit, negative bit.

The garbage collector stops looking at plain tuples of numbers, which a `torch.Size` is not.
"""

_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


def recipe_of(tensor: Tensor) -> Recipe:
    """Return dtype, size, stride, offset and flags of `tensor`: all but the storage that it views."""
    dtype = tensor.dtype
    return (
        dtype,
        tuple(tensor.shape),
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


def disjoint(a: Recipe, b: Recipe) -> bool:
    """Return True if it is certain that no byte is in both of two views of one storage.

    Chunks of a tensor along any dimension are disjoint: modulo the stride of the next outer dimension, each
    covers an interval, and the intervals do not meet. Try the stride of each dimension, and no stride.

    >>> left, right = map(recipe_of, torch.zeros(8, 4).chunk(2, dim=1))
    >>> disjoint(left, right), disjoint(left, left)
    (True, False)
    """
    if 0 in a[1] or 0 in b[1]:
        return True
    strides = {stride for recipe in (a, b) for size, stride in _dimensions(recipe) if size > 1}
    return any(_apart(a, b, period) for period in {0, *strides})


def _dimensions(recipe: Recipe) -> list[tuple[int, int]]:
    """Return the size of each dimension, and its stride in bytes."""
    dtype, size, stride = recipe[:3]
    return [(n, s * dtype.itemsize) for n, s in zip(size, stride, strict=True)]


def _apart(a: Recipe, b: Recipe, period: int) -> bool:
    """Return True if the views do not meet modulo `period`; 0 stands for no modulus."""
    first, second = _interval(a, period), _interval(b, period)
    if not period:
        return first[1] <= second[0] or second[1] <= first[0]
    distance = (second[0] - first[0]) % period  # from the start of `first` to the start of `second`
    return first[1] - first[0] <= distance and distance + second[1] - second[0] <= period


def _interval(recipe: Recipe, period: int) -> tuple[int, int]:
    """Return the bytes from the first to the last, without dimensions that repeat after `period`."""
    dtype, _, _, offset = recipe[:4]
    begin = offset * dtype.itemsize
    spans = ((n - 1) * s for n, s in _dimensions(recipe) if not period or s % period)
    return begin, begin + sum(spans) + dtype.itemsize
