"""Decoders with LoRA on queries and values, as litgpt trained them in October 2023.

Everything else is frozen. Parameters are bf16. Norms and rotations compute in float32. The head runs over
chunks of tokens, and Lightning Fabric makes its output float32 (`convert_output` of its precision plugin).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

RANK, DROPOUT, CHUNK = 8, 0.05, 128


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a decoder. With `neox`, attention and MLP read one residual, with biases and LayerNorm."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    neox: bool = False
    one_norm: bool = False  # for attention and MLP
    rotated: float = 1.0  # part of a head


PHI_1_5 = Config(24, 2048, 32, 8192, 51200, neox=True, one_norm=True, rotated=0.5)
STABLELM_3B = Config(16, 4096, 32, 16384, 50688, neox=True, rotated=0.25)
LLAMA_2_7B = Config(32, 4096, 32, 11008, 32000)
LLAMA_2_13B = Config(40, 5120, 40, 13824, 32000)


class RmsNorm(nn.Module):
    """Root-mean-square norm in float32, op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * y).to(x.dtype)


class Products(nn.Module):
    """Queries, keys and values of one frozen product, and LoRA on queries and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.frozen = nn.Linear(width, 3 * width, bias=config.neox)
        self.down = nn.Parameter(torch.empty(2 * RANK, width))
        self.up = nn.Parameter(torch.empty(2 * width, RANK))
        columns = torch.arange(3 * width)
        self.columns = torch.cat([columns[:width], columns[2 * width :]])
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self.dropout(x), self.down).transpose(-2, -1)
        high = F.conv1d(low, self.up.unsqueeze(-1), groups=2).transpose(-2, -1).transpose(0, 1)
        padded = high.new_zeros(*high.shape[:-1], self.frozen.out_features).flatten(0, 1)
        padded = padded.index_copy(1, self.columns, high.reshape(-1, high.shape[-1]))
        padded = padded.unflatten(0, high.shape[:-1]).transpose(0, 1)
        return self.frozen(x) + padded * 2.0


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.size = config.heads, config.width // config.heads
        self.rotated = int(config.rotated * self.size)
        self.qkv = Products(config)
        self.out = nn.Linear(config.width, config.width, bias=config.neox)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, self.heads, 3, self.size).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(batch, -1, length, self.size) for part in qkv.split((1, 1, 1), dim=2))
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(y.reshape(batch, length, width))

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = x[..., : self.rotated]
        half = self.rotated // 2
        turned = torch.cat([-part[..., half:], part[..., :half]], -1)
        turned = ((part * cos) + (turned * sin)).type_as(x)
        return torch.cat([turned, x[..., self.rotated :]], -1)


class Mlp(nn.Module):
    """A gated MLP, or one with GELU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden, bias=config.neox)
        self.gate = None if config.neox else nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=config.neox)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = F.gelu(y) if self.gate is None else F.silu(y) * self.gate(x)
        return self.down(y)


class Block(nn.Module):
    """Attention and MLP, one after the other or side by side."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        norm = nn.LayerNorm if config.neox else RmsNorm
        self.norm, self.attention = norm(config.width), Attention(config)
        self.second = None if config.one_norm else norm(config.width)
        self.mlp, self.neox = Mlp(config), config.neox

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm(x)
        h = self.attention(normed, cos, sin)
        if self.neox:
            return self.mlp(normed if self.second is None else self.second(x)) + h + x
        assert self.second is not None
        x = h + x
        return self.mlp(self.second(x)) + x


class LoraGpt(nn.Module):
    """A decoder and its loss, of which LoRA alone trains."""

    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = (nn.LayerNorm if config.neox else RmsNorm)(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=config.one_norm)
        self.to(torch.bfloat16)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith(("qkv.down", "qkv.up")))
        size = int(config.rotated * config.width / config.heads)
        self.register_buffer("cos", torch.empty(length, size), persistent=False)
        self.register_buffer("sin", torch.empty(length, size), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> CausalLMOutput:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        reduced = [self.head(part) for part in self.norm(x).split(CHUNK, dim=1)]
        logits = [part.float() for part in reduced]
        del reduced
        logits[-1] = logits[-1][..., :-1, :]
        flat = [part.reshape(-1, part.shape[-1]) for part in logits]
        parts = targets[..., 1:].split(CHUNK, dim=1)
        losses = [
            F.cross_entropy(part, target.reshape(-1), ignore_index=-1, reduction="none")
            for part, target in zip(flat, parts, strict=True)
        ]
        return CausalLMOutput(
            loss=torch.cat(losses).mean(), logits=logits
        )  # both are held until backward is over
