"""Define the models that are trained on GPUs: two decoders, a vision transformer, a ResNet, and custom parts.

They are written here so that a machine needs nothing but torch. Between them they have what differs most
between devices: causal and full attention, grouped heads, dropout, three kinds of norm, convolution with
batch norm, writes in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the models and of their batches."""

    layers: int
    width: int
    heads: int
    tokens: int
    vocabulary: int
    batch: int  # sequences of the decoders
    image: int  # pixels of a side
    images: int
    stages: tuple[int, ...]  # of the ResNet: blocks in each
    channels: int  # of its first stage


TINY = Size(2, 32, 4, 32, 64, batch=2, image=64, images=8, stages=(1, 1), channels=8)
"""Steps of milliseconds on a CPU."""

FULL = Size(12, 768, 12, 1024, 32_000, batch=4, image=224, images=32, stages=(3, 4, 6, 3), channels=64)
"""Steps with a few GB of activations."""

SIZES = {"tiny": TINY, "full": FULL}

CARD = Size(24, 2048, 16, 2048, 32_000, batch=1, image=224, images=1, stages=(1,), channels=64)
"""A decoder of 1.3 billion parameters."""

LAYER = replace(CARD, layers=1, width=4096, heads=32, tokens=8192)
"""One layer as wide as that of an 8B Llama: its run times are those of large kernels."""


class Attention(nn.Module):
    """Self-attention, with fewer heads for keys and values if `groups` is above 1."""

    def __init__(self, size: Size, *, causal: bool, dropout: float = 0.0, groups: int = 1) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.q = nn.Linear(size.width, size.width)
        self.kv = nn.Linear(size.width, 2 * size.width // groups)
        self.out = nn.Linear(size.width, size.width)
        self.causal, self.dropout, self.grouped = causal, dropout, groups > 1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = (self.q(x), *self.kv(x).chunk(2, dim=-1))
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in projected)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, self.causal, enable_gqa=self.grouped)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class GeluBlock(nn.Module):
    """A block of GPT-2 or of a vision transformer."""

    def __init__(self, size: Size, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size, causal=causal, dropout=dropout)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class SwigluBlock(nn.Module):
    """A block of Llama: RMS norms, grouped heads, a gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = Attention(size, causal=True, groups=size.heads // 4 if size.heads > 4 else 2)
        self.gate, self.up = (nn.Linear(size.width, 3 * size.width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    """Embeddings, blocks, a head and the loss of the next token."""

    def __init__(self, size: Size, make_block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.tokens, size.width)
        self.blocks = nn.ModuleList(make_block() for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class VisionTransformer(nn.Module):
    """Patches, blocks without a mask, and a classifier."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, 16, stride=16)
        self.blocks = nn.ModuleList(GeluBlock(size, causal=False, dropout=0.0) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), labels)


class Bottleneck(nn.Module):
    """A block of ResNet-50, with a larger stride where it begins a stage."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        out = 4 * channels
        self.layers = nn.Sequential(
            *(
                nn.Conv2d(channels_in, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
            ),
            nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
            *(nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        shortcut = (nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Sequential(*shortcut) if channels_in != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """A stem, stages of bottlenecks, and a classifier."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        channels = size.channels
        stem = (nn.Conv2d(3, channels, 7, 2, padding=3, bias=False), nn.BatchNorm2d(channels))
        self.stem = nn.Sequential(*stem, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
        blocks, width = [], channels
        for stage, count in enumerate(size.stages):
            for i in range(count):
                blocks.append(Bottleneck(width, channels << stage, 2 if stage and not i else 1))
                width = 4 * (channels << stage)
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), labels)


class FusedLoss(torch.autograd.Function):
    """Cross-entropy of a linear head that computes its gradients in forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        chances = (x @ weight.t()).float().log_softmax(-1)
        loss = F.nll_loss(chances, labels)
        slopes = (chances.exp() - F.one_hot(labels, len(weight))) / len(labels)
        ctx.save_for_backward(slopes.to(x.dtype) @ weight, slopes.t().to(x.dtype) @ x)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        of_x, of_weight = ctx.saved_tensors
        return of_x * gradient, of_weight * gradient, None


class CustomParts(nn.Module):
    """Blocks with a frozen 8-bit weight, and a fused loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        codes = torch.arange(size.width**2, dtype=torch.uint8).reshape(size.width, size.width)
        self.frozen = nn.Parameter(codes, requires_grad=False)
        self.blocks = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(size.layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids[:, :-1])
        for block in self.blocks:
            x = x + F.gelu(F.linear(block(x), self.frozen.to(x.dtype) / (255 * len(self.frozen))))
        labels = ids[:, 1:].flatten()
        return FusedLoss.apply(x.flatten(0, 1), self.tokens.weight, labels)  # type: ignore[no-untyped-call]


def _ids(size: Size) -> dict[str, Tensor]:
    ids = torch.arange(size.batch * size.tokens) * 7919 % size.vocabulary
    return {"ids": ids.reshape(size.batch, size.tokens)}


def _images(size: Size) -> dict[str, Tensor]:
    images = torch.rand(size.images, 3, size.image, size.image, generator=torch.Generator().manual_seed(0))
    return {"images": images, "labels": torch.arange(size.images) % 10}


@dataclass(frozen=True, slots=True)
class Sample:
    """A model to train on a GPU: functions that make the model and a batch for it."""

    name: str
    make: Callable[[Size], nn.Module]  # with `blocks`
    batch: Callable[[Size], dict[str, Tensor]]


SAMPLES = (
    Sample(
        "GPT-2-like",
        lambda size: Decoder(size, lambda: GeluBlock(size, causal=True, dropout=0.1)),
        _ids,
    ),
    Sample("Llama-like", lambda size: Decoder(size, lambda: SwigluBlock(size)), _ids),
    Sample("ViT-like", VisionTransformer, _images),
    Sample("ResNet-50-like", ResNet, _images),
    Sample("Custom parts", CustomParts, _ids),
)
