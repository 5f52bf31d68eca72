"""Run the ops that a GPU would run, for a step whose tensors only claim to be on the CPU.

Attention, dropout and recurrent layers are composite ops that look at the device before they choose their
kernels. While `gpu_kernels` is active, calls on fake tensors choose as on a GPU of 2020 or later (one with
flash attention), and calls on other tensors choose as usual. The kernels are registered with the
dispatcher, since models reach these ops by many Python functions. The registration is process-wide, so
every kernel checks its arguments.

Sources: `use_flash_attention` and `use_mem_efficient_attention` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; `is_fused_kernel_acceptable` in
aten/src/ATen/native/Dropout.cpp (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoac.profiler.errors import CannotFake
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.private import DispatchKey, FakeTensor, tree_leaves

_aten = torch.ops.aten

_FLASH_TYPES = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256
_MASK_ALIGNMENT = 8  # elements: the efficient kernel needs rows of a mask aligned to this


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Have composite ops on fake tensors run the kernels of a GPU inside."""
    with private.scoped_library("aten", "IMPL") as library:
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("lstm_cell", _lstm_cell, "AutogradCPU")
        for name in _CUDNN:
            library.impl(name, _refusal(name), "AutogradCPU")
        yield


_CUDNN = [f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")]


def _refusal(name: str) -> Callable[..., Any]:
    """Return a kernel that refuses fake tensors: on a GPU the op is cuDNN's, which has no fake kernel."""
    overload, _, kind = name.partition(".")
    op = getattr(getattr(_aten, overload), kind)

    def kernel(*args: Any) -> Any:
        if any(type(leaf) is FakeTensor for leaf in tree_leaves(args)):
            raise CannotFake(f"aten.{name}", "on a GPU it is one op of cuDNN: unroll it, as with nn.LSTMCell")
        return _composite(op, *args)

    return kernel


def _lstm_cell(
    x: Tensor,
    hx: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    if type(x) is not FakeTensor:
        return _composite(_aten.lstm_cell.default, x, hx, w_ih, w_hh, b_ih, b_hh)
    hidden, cell = hx
    gates = F.linear(x, w_ih), F.linear(hidden, w_hh)
    return _aten._thnn_fused_lstm_cell(*gates, cell, b_ih, b_hh)[:2]


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if type(x) is FakeTensor and train and 0 < p < 1 and x.numel():
        out: Tensor = _aten.native_dropout(x, p, train)[0]
        return out
    plain: Tensor = _composite(_aten.dropout.default, x, p, train)
    return plain


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    plain = type(query) is FakeTensor and query.dim() == 4 and key.dim() == 4 and value.dim() == 4
    if plain and attn_mask is None and _can_run_flash(query, key, value, is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if plain and query.shape[1] == key.shape[1] == value.shape[1]:
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    math: Tensor = _composite(
        _aten.scaled_dot_product_attention.default,
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return math


def _can_run_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    return (
        query.dtype in _FLASH_TYPES
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _LARGEST_FLASH_HEAD
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    head = query.shape[-1]
    scale = scale if scale is not None else head**-0.5
    if padding := -head % 8:  # the kernel needs heads of a multiple of 8
        query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
    out: Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head] if padding else out


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:
            none = torch.scalar_tensor(float("-inf"), dtype=query.dtype)
            mask = torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype), none)
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if padding := -mask.shape[-1] % _MASK_ALIGNMENT:
            mask = F.pad(mask, (0, padding))[..., : key.shape[2]]
    needs_gradient = any(t.requires_grad for t in (query, key, value))
    out: Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
