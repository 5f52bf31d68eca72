"""Define calls that run other ops on a GPU than on a CPU, or might: the cases of test_op_streams.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HALF, BRAIN = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """The size and type of an operand, with strides if it is a transposed tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    transposed: bool = False  # [batch, length, heads, width] in memory

    def made(self, device: str) -> Tensor:
        if self.dtype is torch.bool:
            return torch.ones(self.size, device=device, dtype=torch.bool)
        torch.manual_seed(0)
        size = self.size
        if self.transposed:
            size = (size[0], size[2], size[1], size[3])
        made = torch.randn(size).to(device, self.dtype).requires_grad_()
        return made.transpose(1, 2) if self.transposed else made


Case = tuple[Callable[..., Any], Sequence[Sizes]]


def of(*size: int, dtype: torch.dtype = torch.float32) -> Sizes:
    return Sizes(size, dtype)


def _norm(*operands: Tensor) -> Tensor:
    return F.batch_norm(operands[0], None, None, *operands[1:], training=True)


def _heads(grad: bool = True, **options: Any) -> Callable[..., Tensor]:
    def call(
        q: Tensor, k: Tensor | None = None, v: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        k, v = q if k is None else k, q if v is None else v
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return call


IMAGE = of(2, 4, 8, 8)
PER_CHANNEL = (of(4), of(4))

CALLS: dict[str, Case] = {
    "rms_norm f32": (lambda x, w: F.rms_norm(x, (8,), w), [of(4, 8), of(8)]),
    "rms_norm bf16": (lambda x, w: F.rms_norm(x, (8,), w), [of(4, 8, dtype=BRAIN), of(8, dtype=BRAIN)]),
    "batch_norm f32": (_norm, [IMAGE, *PER_CHANNEL]),
    "batch_norm f16 with f32": (_norm, [of(2, 4, 8, 8, dtype=HALF), *PER_CHANNEL]),
    "batch_norm bf16": (_norm, [of(2, 4, 8, 8, dtype=BRAIN), *(of(4, dtype=BRAIN) for _ in range(2))]),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), [IMAGE, *PER_CHANNEL]),
    "gru_cell": (
        lambda *tensors: torch.gru_cell(*tensors),
        [of(4, 8), of(4, 8), of(24, 8), of(24, 8), of(24), of(24)],
    ),
    "lstm_cell": (
        lambda x, h, c, *weights: torch.lstm_cell(x, (h, c), *weights),
        [of(4, 8), of(4, 8), of(4, 8), of(32, 8), of(32, 8), of(32), of(32)],
    ),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=True), [IMAGE, of(2, 8, 8, 2)]),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), [of(8, 4), of(8, 1)]),
    "linear 3d": (F.linear, [of(2, 3, 8), of(8, 8), of(8)]),
    "linear 3d without bias": (F.linear, [of(2, 3, 8), of(8, 8)]),
    "layer_norm bf16": (
        lambda x, w, b: F.layer_norm(x, (8,), w, b),
        [of(4, 8, dtype=BRAIN), of(8, dtype=BRAIN), of(8, dtype=BRAIN)],
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [IMAGE, *PER_CHANNEL]),
    "dropout": (lambda x: F.dropout(x, 0.1, True), [of(4, 8)]),
    "dropout2d": (lambda x: F.dropout2d(x, 0.1, True), [IMAGE]),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.1, True), [of(4, 8)]),
    "attention f32": (_heads(is_causal=True), [of(1, 2, 16, 16)]),
    "attention bf16": (_heads(is_causal=True), [of(1, 2, 16, 16, dtype=BRAIN)]),
    "multi_head_attention": (
        lambda x, a, b, c, d: F.multi_head_attention_forward(
            x, x, x, 8, 2, a, b, None, None, False, 0.0, c, d, need_weights=False
        )[0],
        [of(4, 2, 8), of(24, 8), of(24), of(8, 8), of(8)],
    ),
    "softmax of bf16 in f32": (
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        [of(4, 8, dtype=BRAIN)],
    ),
    "log_softmax of bf16 in f32": (
        lambda x: F.log_softmax(x, -1, dtype=torch.float32),
        [of(4, 8, dtype=BRAIN)],
    ),
}


def _ctc(x: Tensor) -> Tensor:
    targets = torch.ones(2, 3, dtype=torch.long, device=x.device)
    return F.ctc_loss(x.log_softmax(-1), targets, torch.tensor([10, 10]), torch.tensor([3, 3]))


CTC_LOSS: Case = (_ctc, [of(10, 2, 5)])  # sizes depend on lengths


def _qkv(
    heads: int = 4,
    shared: int | None = None,
    width: int = 16,
    keys: int = 16,
    queries: int = 16,
    values: int | None = None,
    dtype: torch.dtype = BRAIN,
) -> list[Sizes]:
    shared = heads if shared is None else shared
    values = width if values is None else values
    sizes = ((heads, queries, width), (shared, keys, width), (shared, keys, values))
    return [Sizes((2, *size), dtype, transposed=True) for size in sizes]


MASK = Sizes((2, 1, 16, 16), torch.bool)

ATTENTION: dict[str, Case] = {
    "as in Llama: grouped, causal": (_heads(is_causal=True, enable_gqa=True), _qkv(shared=2)),
    "as in GPT-2: dropout of 0.1": (_heads(is_causal=True, dropout_p=0.1), _qkv()),
    "dropout of 1/8": (_heads(is_causal=True, dropout_p=0.125), _qkv()),
    "f16": (_heads(), _qkv(dtype=HALF)),
    "f32": (_heads(), _qkv(dtype=torch.float32)),
    "f32 with dropout": (_heads(dropout_p=0.1), _qkv(dtype=torch.float32)),
    "bool mask": (_heads(), [*_qkv(), MASK]),
    "bool mask, f32": (_heads(), [*_qkv(dtype=torch.float32), MASK]),
    "bool mask of 2 dimensions": (_heads(), [*_qkv(), Sizes((16, 16), torch.bool)]),
    "mask of 13 columns": (_heads(), [*_qkv(keys=13), Sizes((2, 1, 16, 13), torch.bool)]),
    "trained mask": (_heads(), [*_qkv(), of(2, 1, 16, 16, dtype=BRAIN)]),
    "grouped with a mask": (_heads(enable_gqa=True), [*_qkv(shared=2), MASK]),
    "one head of the key": (_heads(enable_gqa=True), _qkv(shared=1)),
    "more queries than keys, causal": (_heads(is_causal=True), _qkv(queries=24)),
    "one key": (_heads(), _qkv(keys=1)),
    "head of 12": (_heads(), _qkv(width=12)),
    "head of 12, f32": (_heads(), _qkv(width=12, dtype=torch.float32)),
    "head of 13, f32": (_heads(), _qkv(width=13, dtype=torch.float32)),
    "head of 136": (_heads(), _qkv(width=136)),
    "heads of 192 and 128": (_heads(), _qkv(width=192, values=128)),
    "head of 200": (_heads(), _qkv(width=200)),
    "head of 256": (_heads(), _qkv(width=256)),
    "head of 256 with dropout": (_heads(dropout_p=0.125), _qkv(width=256)),
    "head of 264": (_heads(), _qkv(width=264)),
    "3 dimensions": (_heads(), [of(4, 16, 16, dtype=BRAIN)]),
}
