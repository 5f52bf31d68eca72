"""Run the ops that a GPU would run, for a step whose tensors only claim to be on the CPU.

Attention, norms, dropout and recurrent layers are composite ops that look at the device before they choose
their kernels. While `gpu_kernels` is active, calls on fake tensors choose as on the given device, with its
version of cuDNN, and calls on other tensors choose as usual. The kernels are registered with the
dispatcher, since models reach these ops by many Python functions. The registration is process-wide, so
every kernel checks its arguments.

Sources, of torch 2.13, in aten/src/ATen/native: `_select_batch_norm_backend` in Normalization.cpp,
`rms_norm_symint` in layer_norm.cpp, `softmax` in SoftMax.cpp, `cond_cudnn_grid_sampler` in
GridSamplerUtils.h, `GRUCell` in RNN.cpp, `is_fused_kernel_acceptable` in Dropout.cpp. Attention has a file
of its own (gpu_attention.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoac.profiler.gpu_dispatch.gpu_attention import AttentionCall
from autoac.profiler.timing.roofline import Device
from autoac.tape.errors import CannotFake
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.private import (
    DispatchKey,
    FakeTensor,
    FunctionalTensor,
    from_functional_tensor,
    tree_leaves,
)

_aten = torch.ops.aten


def aten_op(name: str) -> Any:
    """Return the op of a name such as "softmax.int", or "dropout" for its overload "default"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


# Sizes of the first dimension up to which cuDNN normalizes a batch, and dimensions for MIOpen.
_LARGEST_BATCH = 65535
_LARGEST_TRAINED_BATCH = 880801
_LARGEST_MIOPEN_DIM = 5

_GRID_TYPES = (torch.float64, torch.float32, torch.float16)
_MOST_GRID_CHANNELS = 1024


@contextlib.contextmanager
def gpu_kernels(device: Device) -> Iterator[None]:
    """Have composite ops on fake tensors run the kernels of `device` inside."""
    kernels: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "scaled_dot_product_attention": partial(_attention, device),
        "batch_norm": partial(_batch_norm, device),
        "rms_norm": _rms_norm,
        "grid_sampler": partial(_grid_sampler, device),
        "softmax.int": partial(_softmax, _aten.softmax.int, _aten._softmax),
        "log_softmax.int": partial(_softmax, _aten.log_softmax.int, _aten._log_softmax),
        "lstm_cell": _lstm_cell,
        "gru_cell": _gru_cell,
        **{name: _refusal(name) for name in _RECURRENT},
    }
    with private.scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
        _forget_kernels(kernels)
        try:
            yield
        finally:
            _forget_kernels(kernels)


def _forget_kernels(names: Iterable[str]) -> None:
    """Have torch.compile look up the kernels of ops again: it remembers those of earlier traces."""
    for name in names:
        aten_op(name)._uncache_dispatch(DispatchKey.AutogradCPU)


def _is_fake(value: Any) -> bool:
    """Return True if `value` is a fake tensor, or wraps one while torch.compile traces ops of a fake step."""
    if type(value) is FunctionalTensor:
        value = from_functional_tensor(value.elem)
    return type(value) is FakeTensor


_RECURRENT = [
    f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
]


def _refusal(name: str) -> Callable[..., Any]:
    """Return a kernel that refuses fake tensors: on a GPU the op is cuDNN's, which has no fake kernel."""
    op = aten_op(name)

    def kernel(*args: Any) -> Any:
        if any(_is_fake(leaf) for leaf in tree_leaves(args)):
            raise CannotFake(f"aten.{name}", "on a GPU it is one op of cuDNN; use a loop over nn.LSTMCell")
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
    if not _is_fake(x):
        return _composite(_aten.lstm_cell.default, x, hx, w_ih, w_hh, b_ih, b_hh)
    hidden, cell = hx
    gates = F.linear(x, w_ih), F.linear(hidden, w_hh)
    return _aten._thnn_fused_lstm_cell(*gates, cell, b_ih, b_hh)[:2]


def _gru_cell(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Any:
    if not _is_fake(x):
        return _composite(_aten.gru_cell.default, x, h, w_ih, w_hh, b_ih, b_hh)
    return _aten._thnn_fused_gru_cell(x @ w_ih.t(), h @ w_hh.t(), h, b_ih, b_hh)[0]


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    if _is_fake(x) and train and 0 < p < 1 and x.numel():
        return _aten.native_dropout(x, p, train)[0]
    return _composite(_aten.dropout.default, x, p, train)


def _attention(device: Device, *args: Any, **kwargs: Any) -> Any:
    if _is_fake(args[0]):
        return AttentionCall(*args, **kwargs).run(device)
    return _composite(_aten.scaled_dot_product_attention.default, *args, **kwargs)


def _batch_norm(
    device: Device,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if not (
        _is_fake(x)
        and cudnn_enabled
        and x.numel()
        and weight is not None
        and bias is not None
        and ((mean is None) == (variance is None) and (mean is not None or training))
        and _norm_of_library(device, x, weight, training)
    ):
        op = _aten.batch_norm.default
        return _composite(op, x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled)
    norm = _aten.cudnn_batch_norm if device.cudnn else _aten.miopen_batch_norm
    operands = _dense(x), *(t if t is None else t.contiguous() for t in (weight, bias, mean, variance))
    return norm(*operands, training, momentum, eps)[0]


def _norm_of_library(device: Device, x: Tensor, weight: Tensor, training: bool) -> bool:
    """Return True if cuDNN or MIOpen normalizes `x`, and not a kernel of torch's own."""
    if torch.bfloat16 in (x.dtype, weight.dtype) or (x.dtype is torch.half and weight.dtype is torch.half):
        return False
    if device.cudnn:
        return x.dim() >= 3 and x.shape[0] <= (_LARGEST_TRAINED_BATCH if training else _LARGEST_BATCH)
    return device.capability is None and x.dim() <= _LARGEST_MIOPEN_DIM and x.dtype is not torch.double


def _dense(x: Tensor) -> Tensor:
    """Return `x`, or a copy unless it is dense as it is or with its channels last."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if channels_last is not None and x.is_contiguous(memory_format=channels_last):
        return x
    return x.contiguous()


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    fused = _is_fake(x) and not x.is_complex() and (weight is None or weight.dtype is x.dtype)
    if not fused or (_dense(x) is x and not x.is_contiguous()):  # with channels last it is composed
        return _composite(_aten.rms_norm.default, x, shape, weight, eps)
    # Without a kernel for the CPU, torch would decompose it before autograd sees it.
    return _aten._fused_rms_norm.default._op_dk(DispatchKey.Autograd, x, shape, weight, eps)[0]


def _softmax(op: Any, kernel: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if _is_fake(x) and x.dtype is torch.half and dtype is torch.float32:
        return kernel(x, dim, True)  # casts on the way
    return _composite(op, x, dim, dtype)


def _grid_sampler(
    device: Device, x: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool
) -> Any:
    if (
        _is_fake(x)
        and device.cudnn
        and private.get_cudnn_enabled()
        and all(t.dtype in _GRID_TYPES and t.numel() for t in (x, grid))
        and (interpolation, padding, align_corners) == (0, 0, True)
        and x.dim() == 4
        and x.shape[1] <= _MOST_GRID_CHANNELS
    ):
        return _aten.cudnn_grid_sampler(x, grid)
    return _composite(_aten.grid_sampler.default, x, grid, interpolation, padding, align_corners)


def _composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
