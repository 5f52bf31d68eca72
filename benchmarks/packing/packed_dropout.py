"""Dropout that holds its mask for backward as one bit per element; the numbers are those of torch's dropout.

On a CPU `torch.nn.functional.dropout` makes a mask of the input's type with the values 0 and 1 / (1 - p), and
autograd saves it: 4 bytes per element in float32. Here two ops stand around the mask:

    mask_bits(mask) -> bits               1 bit per element, in the mask's order
    times_mask(x, bits, keep) -> x * mask

Autograd saves the bits. A plan saves them, or draws the mask again from the generator's state and packs it
again. Both ops work on `PIECE` elements at a time, so that their temporaries stay small.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

PIECE = 1 << 18  # elements

_GATHER = 0x0102040810204080  # eight bytes of 0 or 1, times this: their bits in the highest byte


@torch.library.custom_op("packing::mask_bits", mutates_args=())
def mask_bits(mask: Tensor) -> Tensor:
    """Return one bit for each element of `mask`: whether it is not 0."""
    flat = mask.reshape(-1)
    whole = flat.numel() // 8 * 8
    bits = torch.zeros(-(-flat.numel() // 8), dtype=torch.uint8, device=mask.device)
    for begin in range(0, whole, PIECE):
        piece = flat[begin : min(begin + PIECE, whole)]
        eights = piece.ne(0).view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56)
        bits[begin // 8 : begin // 8 + len(eights)].copy_(eights)  # the lowest byte of each
    for i in range(whole, flat.numel()):
        bits[-1] |= flat[i].ne(0).to(torch.uint8) << (i - whole)
    return bits


@torch.library.custom_op("packing::times_mask", mutates_args=())
def times_mask(x: Tensor, bits: Tensor, keep: float) -> Tensor:
    """Return `x` times the mask of `bits`, whose other value is 1 / `keep`."""
    flat = x.reshape(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat_out = out.view(-1)
    byte = torch.arange(256, device=x.device)
    table = byte[:, None].bitwise_right_shift(torch.arange(8, device=x.device)).bitwise_and_(1)
    values = table.to(x.dtype).div_(keep)  # by byte of bits: eight elements of the mask
    whole = flat.numel() // 8 * 8
    for begin in range(0, whole, PIECE):
        end = min(begin + PIECE, whole)
        piece = flat_out[begin:end]
        torch.index_select(values, 0, bits[begin // 8 : end // 8].int(), out=piece.view(-1, 8))
        piece.mul_(flat[begin:end])
    if whole < flat.numel():
        torch.mul(values[bits[-1].int(), : flat.numel() - whole], flat[whole:], out=flat_out[whole:])
    return out


class _PackedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: float) -> Tensor:
        bits = mask_bits(torch.empty_like(x).bernoulli_(keep).div_(keep))
        ctx.save_for_backward(bits)
        ctx.keep = keep
        out: Tensor = times_mask(x, bits, keep)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return times_mask(grad, bits, ctx.keep), None


torch_dropout = torch.nn.functional.dropout


class DropoutCalls:
    """Stand in for `torch.nn.functional.dropout` while a model runs forward, and count the calls.

    Args:
        packed: positions of the calls that hold bits, in the order of forward; None: all.

    Attributes:
        count: calls so far in this forward that drop anything.
    """

    def __init__(self, packed: Collection[int] | None = None) -> None:
        self._packed = packed
        self.count = 0

    def __call__(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Return what `torch.nn.functional.dropout` returns, and leave the generator as it does."""
        if not training or not 0 < p < 1 or inplace:
            return torch_dropout(input, p, training, inplace)
        position, self.count = self.count, self.count + 1
        if self._packed is not None and position not in self._packed:
            return torch_dropout(input, p)
        out: Tensor = _PackedDropout.apply(input, 1 - p)  # type: ignore[no-untyped-call]
        return out

    def begin(self, *_: object) -> None:
        """Take the place of torch's function; a forward begins."""
        self.count = 0
        torch.nn.functional.dropout = self

    def end(self, *_: object) -> None:
        """Give torch's function its place back."""
        torch.nn.functional.dropout = torch_dropout


def pack_masks(model: nn.Module, packed: Collection[int] | None = None) -> DropoutCalls:
    """Let the calls of dropout at these positions in each forward of `model` hold bits."""
    calls = DropoutCalls(packed)
    model.register_forward_pre_hook(calls.begin)
    model.register_forward_hook(calls.end, always_call=True)
    return calls
