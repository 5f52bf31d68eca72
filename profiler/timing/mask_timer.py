"""Measure how long it takes to pack and unpack a dropout mask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Set

import torch

from autoac.profiler.packing.dropout_masks import MaskKind, PackedMask
from autoac.profiler.timing.cache import OpTime
from autoac.profiler.timing.op_timer import SAMPLES, host_clock, median_and_deviation

_FLOATS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by size of an element


def pack_signature(kind: MaskKind) -> Hashable:
    """Return the pseudo-signature of packing a mask."""
    return ("pack a mask", *kind)


def unpack_signature(kind: MaskKind) -> Hashable:
    """Return the pseudo-signature of unpacking a mask."""
    return ("unpack a mask", *kind)


def mask_signatures(kinds: Collection[MaskKind]) -> Set[Hashable]:
    """Return the pseudo-signatures of masks."""
    return {signature(kind) for kind in kinds for signature in (pack_signature, unpack_signature)}


def mask_moves(kinds: Collection[MaskKind], copy_us: Callable[[int], float]) -> dict[Hashable, float]:
    """Return estimated times to pack and unpack masks, by pseudo-signature: those of moving the bytes."""
    return {
        signature: copy_us(kind.elements * kind.itemsize + kind.packed_nbytes)
        for kind in kinds
        for signature in mask_signatures([kind])
    }


def mask_times(
    kinds: Collection[MaskKind], known: Callable[[Set[Hashable]], Mapping[Hashable, OpTime]] | None = None
) -> dict[Hashable, OpTime]:
    """Return the times to pack and unpack masks, by pseudo-signature; measure those that are not `known`."""
    signatures = mask_signatures(kinds)
    found = dict(known(signatures)) if kinds and known is not None else {}
    found = {key: time for key, time in found.items() if key in signatures}
    for kind in sorted(kinds):
        if pack_signature(kind) not in found or unpack_signature(kind) not in found:
            found |= _measured(kind)
    return found


def _measured(kind: MaskKind) -> dict[Hashable, OpTime]:
    now_ns = host_clock(torch.device("cpu"))
    mask = torch.ones(kind.elements, dtype=_FLOATS[kind.itemsize])
    pack_us, unpack_us = [], []
    for _ in range(SAMPLES):
        begin = now_ns()
        packed = PackedMask(mask)
        middle = now_ns()
        packed.unpack()
        pack_us.append((middle - begin) / 1e3)
        unpack_us.append((now_ns() - middle) / 1e3)
    found: dict[Hashable, OpTime] = {}
    for key, samples in ((pack_signature(kind), pack_us), (unpack_signature(kind), unpack_us)):
        median, spread = median_and_deviation(samples)
        found[key] = (round(median, 3), round(spread, 3), len(samples))
    return found
