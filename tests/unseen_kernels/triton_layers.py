"""Train with a kernel of Triton, under its interpreter; exit with 1 if a way of ours changes a gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from unseen_kernels.four_ways import compare_four_ways

WIDTH = 32


@triton.jit
def silu_multiply(a: Any, b: Any, c: Any, n: Any, BLOCK: tl.constexpr) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(a + i, mask=inside)
    tl.store(c + i, x / (1 + tl.exp(-x)) * tl.load(b + i, mask=inside), mask=inside)


class SiluMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        c = torch.empty_like(a)
        silu_multiply[(triton.cdiv(a.numel(), 256),)](a, b, c, a.numel(), BLOCK=256)
        ctx.save_for_backward(a, b)
        return c

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        return g * b * (s * (1 + a * (1 - s))), g * a * s


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(SiluMultiply.apply(self.gate(h), self.up(h)))


if __name__ == "__main__":
    compare_four_ways(
        lambda: nn.Sequential(*(Gated() for _ in range(3))),
        lambda _: torch.linspace(-2, 2, 8 * WIDTH).view(8, WIDTH),
    )
