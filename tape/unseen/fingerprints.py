"""Fingerprint the bytes of a tensor, to compare contents instead of assuming who wrote them.

A kernel that PyTorch does not dispatch (Triton, pybind, ctypes) writes through a pointer: no op shows the
write, and no version counter moves. So code that relies on contents takes a fingerprint when a visible op
has written them and another when they are read. If the two differ, an unseen kernel wrote in between.

On a device, a fingerprint is a sum, modulo 2**64, of the elements times one random odd weight for each
position. So a permutation, a change of sign and a swap of two halves all change the fingerprint; a plain sum
or an exclusive or would miss some. Elements are the bytes as integers: payloads of NaN and the sign of zero
count.

Of more than 2**18 elements, the sums of the rows and of the columns of a table are weighted in their place:
a dozen kernels without large temporaries, for any size. (A product of each element and its weight in pieces
that small took millions of kernels in the first step of a model of 1B.) Missed are changes that leave every
row's sum and every column's, such as adding one to two corners of a rectangle and subtracting it from two.

On a device, fingerprints are computed in its current stream. They stay there until they are read, so taking
one does not synchronize, unless several streams are used. On the CPU, xxHash reads the bytes where they are,
as fast as memory; it depends on positions, too.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.streams import has_streams, streams_seen

Fingerprint = Tensor | int
"""An int64 scalar on a device, or a number."""

_ROW = 1 << 10  # elements
_MOST_ROWS = 1 << 8  # at once; temporaries take 2 MiB then

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_STEP = 0x5851F42D4C957F2D  # odd; from one chunk to the next, weights are multiplied by it
_UNITS = {8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes that divide all sizes


def can_compare(tensor: Tensor) -> bool:
    """Return True if `tensor` has contents: False on the meta device, and for fake tensors."""
    return tensor.device.type != "meta" and type(tensor) is not private.FakeTensor


class Comparison:
    """Say whether contents are compared at all. Benchmarks switch it off to see what it finds."""

    enabled = True


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of the elements that `tensor` views.

    `tensor` must be a plain window on one storage.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return _of_bytes(tensor.data_ptr(), tensor.nbytes)
    with _unseen():
        elements = _elements(tensor)
        if elements.device.type == "cpu":
            return _of_bytes(elements.data_ptr(), elements.nbytes)
        return _settled_sum(elements)


def fingerprint_of(storage: torch.UntypedStorage) -> Fingerprint:
    """Return the fingerprint of all bytes of `storage`."""
    if storage.device.type == "cpu":
        return _of_bytes(storage.data_ptr(), storage.nbytes())
    with _unseen():
        return _settled_sum(_window(storage, 0, storage.nbytes()))


def shows_whole_storage(tensor: Tensor) -> bool:
    """Return True if `fingerprint` of `tensor` is `fingerprint_of` its storage."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and tensor.is_contiguous()


def _of_bytes(address: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address)) if nbytes else 0


def same_contents(first: Fingerprint, second: Fingerprint) -> bool:
    """Return True if two fingerprints on one device are equal. Waits for the device."""
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    with _unseen():
        return bool(first == second)


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide the ops inside from dispatch modes and from autograd."""
    hidden = private.DisableTorchDispatch()  # in force until it is deleted
    try:
        with torch.no_grad(), private.AutoDispatchBelowAutograd():
            yield
    finally:
        del hidden


def _elements(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as a flat tensor of integers."""
    itemsize, storage = tensor.itemsize, tensor.untyped_storage()
    dimensions = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1 and s != 0]
    expected = 1
    for size, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if stride != expected:
            break
        expected *= size
    else:  # dense: the elements are one stretch of memory, in any order of dimensions
        nbytes = expected * itemsize if tensor.numel() else 0
        return _window(storage, int(tensor.storage_offset()) * itemsize, nbytes)
    parts = 2 if itemsize == 16 else 1  # complex128 as two integers
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(itemsize, torch.int64)
    sizes, strides = [n for n, _ in dimensions], [s * parts for _, s in dimensions]
    window = torch.empty(0, dtype=dtype, device=storage.device)
    window.set_(storage, tensor.storage_offset() * parts, (*sizes, parts), (*strides, 1))
    dense = window.contiguous().view(-1)
    return dense.view(torch.int32) if dtype is torch.int64 else dense


def _window(storage: torch.UntypedStorage, offset: int, nbytes: int) -> Tensor:
    """Return `nbytes` of `storage` from byte `offset` on as a flat tensor of integers."""
    unit = next(unit for unit in (4, 2, 1) if offset % unit == 0 and nbytes % unit == 0)
    window = torch.empty(0, dtype=_UNITS[unit], device=storage.device)
    return window.set_(storage, offset // unit, (nbytes // unit,), (1,))


_streams: set[int] = set()  # on which fingerprints were taken in this process


def _settled_sum(elements: Tensor) -> Tensor:
    """Return `_sum`. With several streams, wait for all of them: another stream may write the tensor."""
    if has_streams():
        _streams.add(private.current_stream())
    if len(_streams) < 2 and not streams_seen.several:
        return _sum(elements)
    device = torch.get_device_module(elements.device)
    device.synchronize(elements.device)
    total = _sum(elements)
    device.synchronize(elements.device)
    return total


def _sum(elements: Tensor) -> Tensor:
    if elements.numel() <= _ROW * _MOST_ROWS:
        return _weighted_sum(elements)
    units = 8 // elements.itemsize  # in an int64, whose sums need no cast, and so no temporaries
    if elements.storage_offset() % units:
        elements = elements.clone()
    last = elements.numel() // (units * _ROW) * units * _ROW
    table = elements[:last].view(torch.int64).view(-1, _ROW)
    total = _weighted_sum(table.sum(0))
    for part in (table.sum(1), elements[last:]):
        total = total * _STEP + _weighted_sum(part)
    return total


def _weighted_sum(elements: Tensor) -> Tensor:
    weights = _weights(elements.device)
    whole = elements.numel() // _ROW
    rows = elements[: whole * _ROW].view(whole, _ROW)
    total = (elements[whole * _ROW :] * weights[: elements.numel() - whole * _ROW]).sum()
    for chunk in rows.split(_MOST_ROWS):
        of_rows = (chunk * weights).sum(1)
        total = total * _STEP + (of_rows * weights[: len(chunk)]).sum()
    return total


class KeptWeights:
    """Keep the weights that fingerprints use, for further fingerprints, while this object lives.

    Without such an object, weights are made again each time, so that no memory of the device stays in use.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._tables: dict[torch.device, tuple[Tensor, int]] = {}  # with the number of entries that are taken
        _keepers.add(self)

    def release(self) -> None:
        """Release the weights, and the tables of fingerprints. An entry in use keeps its table alive."""
        self.tensors.clear()
        self._tables.clear()

    def keep(self, value: Fingerprint) -> Fingerprint:
        """Copy a fingerprint into a shared table on the device, and return the entry.

        An entry takes 8 bytes. As a tensor of its own, a fingerprint takes 512, the allocator's smallest
        block. If several streams are in use, wait for the device and return a Python number instead: a kernel
        of one stream must not read an entry that another stream is still writing.
        """
        if isinstance(value, int):
            return value
        with _unseen():
            if len(_streams) > 1 or streams_seen.several:
                return int(value)
            table, taken = self._tables.get(value.device, (value, _ROW))
            if taken == _ROW:
                table, taken = torch.empty(_ROW, dtype=torch.int64, device=value.device), 0
            self._tables[value.device] = table, taken + 1
            return table[taken].copy_(value)


_keepers: weakref.WeakSet[KeptWeights] = weakref.WeakSet()
_weights_alive: weakref.WeakValueDictionary[tuple[torch.device, int], Tensor] = weakref.WeakValueDictionary()


def _weights(device: torch.device) -> Tensor:
    """Return odd numbers that look random (the finalizer of splitmix64), one for each position in a row."""
    key = (device, private.current_stream() if device.type != "cpu" and has_streams() else 0)
    weights = _weights_alive.get(key)
    if weights is None:
        weights = torch.empty(_ROW, dtype=torch.int64, device=device)
        weights = torch.arange(1, _ROW + 1, out=weights).mul_(_GOLDEN)
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            weights = weights.bitwise_xor_(weights >> shift).mul_(factor)
        weights = weights.bitwise_xor_(weights >> 31).bitwise_or_(1)
        _weights_alive[key] = weights
        for keeper in list(_keepers):
            keeper.tensors.append(weights)
    return weights
