"""Return outputs without memory for ops of a GPU, where torch has no fake kernel or one with other outputs.

Sources of the sizes, of torch 2.13, in aten/src/ATen/native: cudnn/GridSampler.cpp; RNN.cu, Normalization.cu
and layer_norm_kernel.cu in cuda; attention.cu in transformers/cuda; GroupedMMUtils.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _efficient_attention(
    query: Tensor, _key: Tensor, value: Tensor, _bias: Any, saves_sums: bool, *_rest: Any, **_options: Any
) -> tuple[Tensor, ...]:
    """Leave out the seed and the offset of the dropout, which are on the host."""
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    padded = length + -length % 32 if saves_sums else 0
    sums = query.new_empty(batch, heads, padded, dtype=torch.float32)
    return out, sums, *(query.new_empty(0, dtype=torch.int64) for _ in range(2))


def _grid_sampler(x: Tensor, grid: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], *grid.shape[1:3])


def _grid_sampler_backward(x: Tensor, grid: Tensor, _gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(grid)


def _gru_cell(_x: Tensor, _h_gates: Tensor, h: Tensor, *_biases: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), h.new_empty(h.shape[0], 5 * h.shape[1])


def _gru_cell_backward(gradient: Tensor, _workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    rows, width = gradient.shape
    gates = [gradient.new_empty(rows, 3 * width) for _ in range(2)]
    biases = [gradient.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(gradient), *biases


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Save the statistics of a batch in 32 bits; the CPU's kernel saves them in the type of its input."""
    saved = [x.new_empty(x.shape[1] if training else 0, dtype=_statistics(x)) for _ in range(2)]
    return torch.empty_like(x), *saved


def _cudnn_batch_norm(*args: Any) -> tuple[Tensor, ...]:
    return *_batch_norm(*args), args[0].new_empty(0, dtype=torch.uint8)


def _layer_norm(x: Tensor, shape: Sequence[int], *_rest: Any) -> tuple[Tensor, ...]:
    """Save the statistics of a row in 32 bits; the CPU's kernel saves them in the type of its input."""
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    saved = [x.new_empty(rows, dtype=_statistics(x)) for _ in range(2)]
    return x.new_empty(x.shape), *saved


def _statistics(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype is torch.float64 else torch.float32


def _grouped_mm(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, _bias: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Take every type; torch's own fake kernel takes bfloat16 only. Rows are padded to 16 bytes."""
    rows, columns = a.shape[-2], b.shape[-1]
    groups = [] if a.dim() + b.dim() == 5 else [len(offsets) if offsets is not None else len(a)]
    unit = 16 // a.element_size()
    padded = a.new_empty(*groups, rows, columns + -columns % unit, dtype=dtype or a.dtype)
    return padded[..., :columns]


GPU_FAKE_KERNELS: Mapping[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    _aten.cudnn_grid_sampler.default: _grid_sampler,
    _aten.cudnn_grid_sampler_backward.default: _grid_sampler_backward,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    _aten.miopen_batch_norm.default: _batch_norm,
    _aten._grouped_mm.default: _grouped_mm,
}
