"""Test that masks of dropouts are recognized, and restored bit for bit without temporaries of torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.profiler import profile
from autoac.profiler.packing.dropout_masks import PIECE, PackedMask


def drawn(elements: int, dtype: torch.dtype = torch.float32, p: float = 0.1) -> Tensor:
    return torch.empty(elements, dtype=dtype).bernoulli_(1 - p).div_(1 - p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [1, 1031, PIECE, PIECE + 9])
def test_mask_is_restored_bit_for_bit(dtype: torch.dtype, elements: int) -> None:
    for p in (0.1, 0.5, 1 / 3, 0.999):
        mask = drawn(elements, dtype, p)
        assert PackedMask(mask).unpack().view(dtype).equal(mask)


def test_mask_that_drops_everything_is_restored() -> None:
    mask = torch.zeros(2000)
    assert PackedMask(mask).unpack().view(torch.float32).equal(mask)


def test_layout_of_the_mask_is_that_of_its_storage() -> None:
    mask = drawn(60).view(5, 12).t()
    assert PackedMask(mask).unpack().view(torch.float32).equal(mask.t().flatten())


def test_packing_takes_only_the_bits_and_unpacking_only_the_mask() -> None:
    mask = drawn(3 * PIECE + 17)
    with AllocatorTimeline() as timeline:
        packed = PackedMask(mask)
        timeline.mark("unpack")
        restored = packed.unpack()
    bits = -(-mask.numel() // 8)
    assert timeline.peak_bytes - timeline.peak_since("unpack") == 0
    assert timeline.peak_since("unpack") == bits + restored.nbytes


class Scaled(nn.Module):
    """A linear layer, then a product with a mask."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(40, 40), make

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y * self.make(y)).square().mean()


scale = torch.ops.aten.div_.Scalar


def bits(y: Tensor) -> Tensor:
    return torch.empty_like(y).bernoulli_(0.9)


def plus_one(y: Tensor) -> Tensor:
    mask = bits(y)
    mask[0] += 1
    return scale(mask, 0.9)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda y: scale(bits(y), 0.9), 1),
        (lambda y: F.dropout(torch.ones_like(y), 0.1), 1),
        (plus_one, 0),
        (lambda y: scale(bits(y), -0.9), 0),
        (lambda y: bits(y).mul_(2), 0),
        (lambda y: scale(bits(y)[:, :20], 0.9).repeat(1, 2), 0),
        (lambda y: scale(torch.rand_like(y), 0.9), 0),
    ],
    ids=["mask", "dropout", "three values", "negative", "not divided", "part of its storage", "uniform"],
)
def test_profile_lists_masks_of_two_values(make: Callable[[Tensor], Tensor], count: int) -> None:
    packable = profile(Scaled(make), torch.randn(40, 40)).packable
    assert len(packable) == count
    assert all(nbytes == 200 for nbytes in packable.nbytes)
    assert all(us > 0 for us in packable.pack_us + packable.unpack_us)
