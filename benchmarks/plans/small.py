"""Steps of at most 40 ops, for Checkmate: a layer or two at the widths of the large models."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.plans.models import Batch, Case, images, tokens, weightless


def gpt2_layer() -> tuple[nn.Module, Batch]:
    """One layer of GPT-2 XL with dropout, and a small vocabulary, so that logits are not all there is."""
    config = transformers.GPT2Config(n_embd=1600, n_layer=1, n_head=25, vocab_size=512, use_cache=False)
    with weightless():
        return transformers.GPT2LMHeadModel(config).train(), tokens(8, 1024)


def vit_layers() -> tuple[nn.Module, Batch]:
    """Two layers of ViT-H/14."""
    config = transformers.ViTConfig(
        hidden_size=1280,
        num_hidden_layers=2,
        num_attention_heads=16,
        intermediate_size=5120,
        patch_size=14,
        image_size=224,
        num_labels=1000,
    )
    with weightless():
        return transformers.ViTForImageClassification(config).train(), images(64)


class Residual(nn.Module):
    """Layers of `x + down(gelu(up(norm(x))))`, each with its own width inside."""

    def __init__(self, width: int, inside: tuple[int, ...]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in inside)
        self.ups = nn.ModuleList(nn.Linear(width, n) for n in inside)
        self.downs = nn.ModuleList(nn.Linear(n, width) for n in inside)

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x.float().square().mean()


def residual_mlp() -> tuple[nn.Module, Batch]:
    """Six residual layers of 2,048, whose insides are one, two, four times as wide."""
    with weightless():
        x: Any = torch.empty(16384, 2048)
        return Residual(2048, (2048, 8192, 4096, 8192, 2048, 8192)).train(), {"x": x}


class Plain(nn.Module):
    """Convolutions with a ReLU between, at ever smaller sizes."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        pairs = itertools.pairwise(channels)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            if i % 2:
                x = F.max_pool2d(x, 2)
        return x.float().mean()


def plain_convolutions() -> tuple[nn.Module, Batch]:
    """Eight convolutions in the likeness of VGG, the network of Checkmate's paper."""
    with weightless():
        x: Any = torch.empty(32, 3, 224, 224)
        return Plain((3, 64, 64, 128, 128, 256, 256, 512, 512)).train(), {"x": x}


SMALL = {
    "small_gpt2": Case("one layer of GPT-2 XL with dropout, 8 x 1024 tokens", gpt2_layer),
    "small_vit": Case("two layers of ViT-H/14, 64 images", vit_layers),
    "small_mlp": Case("six residual layers, 16,384 rows of 2,048", residual_mlp),
    "small_vgg": Case("eight convolutions, 32 images of 224 x 224", plain_convolutions),
}
