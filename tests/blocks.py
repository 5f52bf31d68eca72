"""Small models: blocks of a transformer without attention, and chains of layers with dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class BlockNet(nn.Module):
    """Blocks between other ops, a batch norm, and a loss; `between` is called after each block."""

    def __init__(self, blocks: int = 4, between: Callable[[], None] = int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.statistics, self.between = nn.BatchNorm1d(32), between

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x)).exp()
        for block in self.blocks:
            x = block(x)
            self.between()
        return torch.tanh(self.statistics(x)).exp().square().mean()


class Layers(nn.Sequential):
    """Linear layers of one width with dropout."""

    def __init__(self, width: int = 32) -> None:
        torch.manual_seed(0)
        layers = [(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        super().__init__(*(module for layer in layers for module in layer))


class WithLoss(Layers):
    """The same, and its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()  # type: ignore[no-any-return]


class Body(nn.Module):
    """A layer, a parameter, buffers and a generator of its own, for the ops of `body`."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)
        for name, size in {"cache": (8, 4), "counts": (4, 4), "steps": ()}.items():
            self.register_buffer(name, torch.zeros(size))
        self.generator = torch.Generator().manual_seed(3)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)
