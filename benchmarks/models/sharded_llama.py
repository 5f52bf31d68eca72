"""Llama as torchtitan trains it: sharded, in mixed precision, with torch's checkpoint around its blocks.

Build it inside of `fake_ranks`. Sizes are those of the published configurations. The Llama of transformers
has other ops: sines for complex numbers, and masks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of a Llama."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int = 128256


LLAMA_2_7B = Widths(32, 4096, 32, 32, 11008, 32000)
LLAMA_3_8B = Widths(32, 4096, 32, 8, 14336)
LLAMA_3_70B = Widths(80, 8192, 64, 8, 28672)


class Norm(nn.Module):
    """Root-mean-square norm in float32, op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Return `x` with each pair of numbers turned, as complex numbers of float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, w: Widths) -> None:
        super().__init__()
        self.size = w.width // w.heads
        self.copies = w.heads // w.key_heads
        self.wq = nn.Linear(w.width, w.width, bias=False)
        self.wk = nn.Linear(w.width, w.key_heads * self.size, bias=False)
        self.wv = nn.Linear(w.width, w.key_heads * self.size, bias=False)
        self.wo = nn.Linear(w.width, w.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], -1, self.size) for each in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        if self.copies > 1:
            k, v = (
                each[:, :, :, None].expand(-1, -1, -1, self.copies, -1).reshape(*x.shape[:2], -1, self.size)
                for each in (k, v)
            )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


class FeedForward(nn.Module):
    def __init__(self, w: Widths) -> None:
        super().__init__()
        self.w1 = nn.Linear(w.width, w.hidden, bias=False)
        self.w2 = nn.Linear(w.hidden, w.width, bias=False)
        self.w3 = nn.Linear(w.width, w.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, w: Widths, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(w), FeedForward(w)
        self.attention_norm, self.ffn_norm = norm(w.width), norm(w.width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, w: Widths, length: int, norm: Callable[[int], nn.Module] = Norm) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(w.vocabulary, w.width)
        self.register_buffer("turns", torch.empty(length, w.width // w.heads // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Block(w, norm) for _ in range(w.layers))
        self.norm = norm(w.width)
        self.output = nn.Linear(w.width, w.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.output(self.norm(x))


class Training(nn.Module):
    """A model and its cross-entropy, in float32 where `wide`, over `chunks` pieces of each sequence."""

    def __init__(
        self, model: nn.Module, chunks: int = 1, *, wide: bool = True, holds_logits: bool = False
    ) -> None:
        super().__init__()
        self.model, self.chunks, self.wide, self.holds_logits = model, chunks, wide, holds_logits

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self.model(tokens)
        parts = zip(logits.chunk(self.chunks, 1), labels.chunk(self.chunks, 1), strict=True)
        loss = sum(
            F.cross_entropy(
                (part.flatten(0, 1).float() if self.wide else part.flatten(0, 1)), words.flatten()
            )
            for part, words in parts
        )
        return (loss, logits.detach()) if self.holds_logits else loss


def sharded(
    model: Llama,
    ranks: int,
    tensor: int = 1,
    *,
    checkpoint: str = "none",
    reshard: str = "but the last",
    ends: bool = False,
) -> Llama:
    """Return `model` over `ranks` ranks, of which `tensor` share each layer, as `fully_shard` leaves it.

    Args:
        checkpoint: "full", "ops" for torchtitan's selective one, or "none".
        reshard: which blocks are freed after forward: "but the last", "always" or "never". The root is not,
            which torch before June 2025 never did.
        ends: embeddings are one unit more, and so are the last norm and the head.
    """
    mesh = init_device_mesh("cpu", (ranks // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        _parallelize(model, mesh["tensor"])
    ways = {"full": {}, "ops": {"context_fn": _selective}}
    shared: dict[str, Any] = {
        "mesh": mesh["data"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    last = len(model.layers) - 1
    for i, layer in enumerate(model.layers):
        if checkpoint != "none":
            layer = checkpoint_wrapper(layer, preserve_rng_state=False, **ways[checkpoint])  # type: ignore[arg-type]
            model.layers[i] = layer
        after = reshard == "always" or (reshard == "but the last" and (ends or i < last))
        fully_shard(layer, reshard_after_forward=after, **shared)
    if ends:
        fully_shard(model.tok_embeddings, reshard_after_forward=True, **shared)
        fully_shard([model.norm, model.output], reshard_after_forward=False, **shared)
    fully_shard(model, **shared)
    return model


def _parallelize(model: Llama, mesh: DeviceMesh) -> None:
    """Share each layer among the ranks of `mesh`, norms by sequence and the logits by words."""
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    whole = {
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    products: dict[str, ParallelStyle] = {f"attention.w{name}": column for name in "qkv"}
    products |= {"feed_forward.w1": column, "feed_forward.w3": column}
    products |= {"attention.wo": row, "feed_forward.w2": row}
    norms = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, {**norms, **whole, **products})


def _selective() -> Any:
    """Return the contexts of a checkpoint that saves attention and every second product."""
    products: dict[bool, int] = defaultdict(int)

    def policy(ctx: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if func == aten.mm.default:
            products[ctx.is_recompute] += 1
        saves = func in SAVED and not (func == aten.mm.default and products[ctx.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
