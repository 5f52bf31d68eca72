"""A Llama whose norms, rotations, activations and loss are Functions around kernels, as Liger's are."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.unseen_kernels.functions import LinearCrossEntropy, RMSNorm, Rope, SwiGLUOverSaved


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return RMSNorm.apply(x, self.weight)


class LigerLikeBlock(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k = (Rope.apply(linear(h), cosines, sines) for linear in (self.q, self.k))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, self.v(h)))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(SwiGLUOverSaved.apply(self.gate(h), self.up(h)))


class LigerLikeLlama(nn.Module):
    """Blocks, and a loss that is fused with the head; the forward returns the loss."""

    def __init__(self, blocks: int = 4, width: int = 128, heads: int = 4, vocabulary: int = 512) -> None:
        super().__init__()
        self.heads = heads
        self.embedding, self.norm = nn.Embedding(vocabulary, width), Norm(width)
        self.blocks = nn.ModuleList(LigerLikeBlock(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        half = x.shape[-1] // self.heads // 2
        rates = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * rates
        cosines, sines = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cosines, sines)
        x = self.norm(x)[:, :-1].flatten(0, 1)
        return LinearCrossEntropy.apply(x, self.head.weight, tokens[:, 1:].flatten())
