"""Build the two models of autoac.toml, whose policies `autoac regenerate` keeps up to date.

    autoac regenerate --config examples/regenerate/autoac.toml --check

Neither needs a GPU: their policies are planned by the datasheet of one, and nothing is allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        after: Tensor = hidden + self.mlp(hidden)
        return after


class Decoder(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def decoder() -> dict[str, object]:
    """Build a decoder in bfloat16 with AdamW on the meta device, where it takes no memory."""
    with torch.device("meta"):
        model = Decoder(vocabulary=8192, width=1024, layers=8, heads=16).to(torch.bfloat16)
    tokens = torch.ones(8, 2048, dtype=torch.int64)
    return {"model": model, "args": (tokens,), "optimizer": torch.optim.AdamW(model.parameters())}


def convnet() -> tuple[nn.Module, tuple[Tensor], dict[str, Tensor], Callable[[Tensor], Tensor]]:
    """Build a convolutional network with its own batch and loss."""
    channels = (3, 64, 128, 256)
    stages = [
        nn.Sequential(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )
        for before, after in itertools.pairwise(channels)
    ]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 1000))
    images = torch.empty(64, 3, 224, 224, device="meta")
    labels = torch.zeros(64, dtype=torch.int64)

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels)

    return model, (images,), {}, loss
