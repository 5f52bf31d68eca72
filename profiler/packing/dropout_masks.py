"""Hold the mask of a dropout on a CPU as one bit per element, and restore it bit for bit.

On a CPU torch.nn.functional.dropout fills new memory with `bernoulli_(1 - p)` and scales it by `div_(1 - p)`.
So each element is 0 or one constant, in the type of the input. `DrawnMasks` recognizes these two ops.

NumPy packs and unpacks, `PIECE` elements at a time. It takes its temporaries, a few bytes per element of a
piece, from elsewhere than torch's allocator. So the bits and the mask are the only memory that torch counts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoac.profiler.torch_facts.private import FakeTensor

DRAW: Final = "aten.bernoulli_.float"
SCALE: Final = "aten.div_.Scalar"
PIECE: Final = 1 << 16  # elements that are packed at a time; a multiple of 8
LEAST_ELEMENTS: Final = 1024  # of a mask that is worth packing

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element


class MaskKind(NamedTuple):
    """The number of elements of a mask, and the bytes of one. Masks of one kind take equal time to pack."""

    elements: int
    itemsize: int

    @property
    def packed_nbytes(self) -> int:
        """Return the bytes of the bits."""
        return -(-self.elements // 8)


class DrawnMasks:
    """Recognize the mask of a dropout while its ops run: drawn, then scaled, and not written in between.

    A version counter moves only after a dispatch mode has returned. So in the op that scales, it is higher by
    one than in the op that drew, unless something else has written to the memory.
    """

    __slots__ = ("_counter", "_drawn")

    def __init__(self) -> None:
        self._drawn: weakref.ref[torch.UntypedStorage] | None = None
        self._counter = -1

    def note_draw(self, mask: Tensor) -> None:
        """Remember `mask`, which a call of `DRAW` is about to fill or has just filled."""
        self._drawn = weakref.ref(mask.untyped_storage())
        self._counter = mask._version

    def kind_of(self, args: Sequence[Any]) -> MaskKind | None:
        """Return the kind of mask that a call of `SCALE` with `args` makes; None if it makes none.

        The tensor must be drawn, fill its storage, be on the CPU, and be worth packing.
        """
        mask, divisor = args[:2]
        if (
            self._drawn is None
            or type(mask) not in (Tensor, FakeTensor)
            or self._drawn() is not mask.untyped_storage()
            or mask._version != self._counter + 1
            or not 0 < divisor < math.inf
            or mask.device.type != "cpu"
            or mask.itemsize not in _INTEGERS
            or mask.numel() < LEAST_ELEMENTS
            or mask.untyped_storage().nbytes() != mask.numel() * mask.itemsize
        ):
            return None
        return MaskKind(mask.numel(), mask.itemsize)


class PackedMask:
    """The bits of a mask, and the constant that is not 0, as an integer with the same bytes."""

    __slots__ = ("_bits", "_constant", "_kind")

    def __init__(self, mask: Tensor) -> None:
        """Pack `mask`, which fills its storage. Each element is 0 or one positive constant."""
        self._kind = MaskKind(mask.numel(), mask.itemsize)
        elements = torch.empty(0, dtype=_INTEGERS[mask.itemsize]).set_(mask.untyped_storage()).numpy()
        self._bits = torch.empty(self._kind.packed_nbytes, dtype=torch.uint8)
        bits = self._bits.numpy()
        self._constant = elements[:0].dtype.type(0)
        for begin in range(0, len(elements), PIECE):
            piece = elements[begin : begin + PIECE]
            self._constant = max(self._constant, piece.max())
            packed = np.packbits(piece != 0)
            bits[begin // 8 : begin // 8 + len(packed)] = packed

    def unpack(self) -> Tensor:
        """Return new memory with the contents of the mask's storage, as integers."""
        count, itemsize = self._kind
        mask = torch.empty(count, dtype=_INTEGERS[itemsize])
        elements, bits = mask.numpy(), self._bits.numpy()
        for begin in range(0, count, PIECE):
            out = elements[begin : begin + PIECE]
            piece = bits[begin // 8 : -(-(begin + len(out)) // 8)]
            np.multiply(np.unpackbits(piece, count=len(out)), self._constant, out=out)
        return mask
