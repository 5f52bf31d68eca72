"""Define kernels for the ops that torch fuses on a GPU: attention, cuDNN's, recurrent cells, RMS norm.

They compute with the CPU's math on the host, so that only their outputs are on the device, with the sizes,
types and strides that the kernels of a GPU return. What those kernels hold inside themselves is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.utils._pytree import tree_leaves, tree_map_only

device: Any = None  # the stand-in, set by who loads it

_aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")  # lives as long as the process


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register `function` as the kernel of the op of its name. A capture records it as one piece of work."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        index = next(one.device.index for one in given if isinstance(one, Tensor) and one.is_cuda)
        if not device.is_recorded(index):
            return function(*args, **kwargs)
        offset = device.generator_offset(index)
        before = device.set_in_kernel(True)
        try:
            out = function(*args, **kwargs)
        finally:
            device.set_in_kernel(before)
        arguments, into = tree_map_only(Tensor, _borrowed, ((args, kwargs), out))

        def again() -> None:
            args, kwargs = arguments
            found = function(*args, **kwargs)
            for to, tensor in zip(tree_leaves(into), tree_leaves(found), strict=True):
                if isinstance(to, Tensor):
                    to.copy_(tensor)

        device.record_call(again, index, offset)
        return out

    _library.impl(function.__name__, kernel, "CUDA")
    return function


def _borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory of the device, which does not own it; the host's is held."""
    return device.borrowed(tensor) if tensor.is_cuda else tensor


def _host(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.cpu() for tensor in tensors]


def _device(device: torch.device, *tensors: Tensor | None) -> tuple[Any, ...]:
    def moved(tensor: Tensor) -> Tensor:
        out = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        return out.copy_(tensor)

    return tuple(None if tensor is None else moved(tensor) for tensor in tensors)


_left_by_allocator = itertools.count(1)


def _seed(device: torch.device) -> int:
    """Return a seed for one kernel, and advance the generator of the device as such a kernel does."""
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    seed, offset = state.view(torch.int64).tolist()
    state.view(torch.int64)[1] = offset + 4
    generator.set_state(state)
    return int(seed * 1000003 + offset) % 2**62


# ---- attention


_How = tuple[Tensor | None, float, bool, float | None]  # bias, dropout, causal, scale


def _weights(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the weights of attention and the logarithm of their sum."""
    scores = query.float() @ _heads(key, query).transpose(-2, -1)
    scores = scores * (scale if scale is not None else query.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def _heads(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.float().repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _kept(weights: Tensor, dropout: float, seed: int) -> Tensor:
    """Return the factor of each weight: 0 if it is dropped."""
    if not dropout:
        return torch.ones_like(weights)
    drawn = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed))
    return (drawn >= dropout).float() / (1 - dropout)


def _attend(query: Tensor, key: Tensor, value: Tensor, how: _How, out: Tensor) -> tuple[Tensor, int]:
    """Fill `out`; return the logarithm of the sums, on the host, and the seed of the dropout.

    Without dropout, torch returns the seed as the allocator left it: another number each time.
    """
    bias, dropout, causal, scale = how
    seed = _seed(query.device) if dropout else next(_left_by_allocator)
    q, k, v, b = _host(query, key, value, bias)
    weights, sums = _weights(q, k, b, causal, scale)
    out.copy_((weights * _kept(weights, dropout, seed)) @ _heads(v, q))
    return sums, seed


def _attend_backward(grad: Tensor, *operands: Tensor, how: _How, seed: Tensor) -> list[Tensor]:
    """Return the gradients of query, key, value and bias on the host, in 32 bits."""
    bias, dropout, causal, scale = how
    g, q, k, v, b, s = _host(grad, *operands, bias, seed)
    weights, _ = _weights(q, k, b, causal, scale)
    kept = _kept(weights, dropout, int(s.view(torch.int64).reshape(-1)[0]))
    of_weights = (g.float() @ _heads(v, q).transpose(-2, -1)) * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    factor = scale if scale is not None else q.shape[-1] ** -0.5
    of_key = of_scores.transpose(-2, -1) @ q.float() * factor
    of_value = (weights * kept).transpose(-2, -1) @ g.float()

    def grouped(gradient: Tensor, like: Tensor) -> Tensor:
        return gradient.unflatten(1, (like.shape[1], -1)).sum(2)

    return [of_scores @ _heads(k, q) * factor, grouped(of_key, k), grouped(of_value, v), of_scores]


def _filled(gradients: Sequence[Tensor], *outs: Tensor) -> tuple[Tensor, ...]:
    return tuple(out.copy_(gradient) for gradient, out in zip(gradients, outs, strict=False))


def _given(rest: tuple[Any, ...], *defaults: Any) -> tuple[Any, ...]:
    """Return the arguments `rest` with the defaults of those left out at the end."""
    return *rest, *defaults[len(rest) :]


@_kernel
def _scaled_dot_product_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Any, ...]:
    dropout, causal, _ = _given(rest, 0.0, False, False)
    out = torch.empty_like(query)
    sums, seed = _attend(query, key, value, (None, dropout, causal, scale), out)
    state = torch.tensor([seed, 0]).view(torch.uint64)
    sums, state, unused, debug = _device(
        query.device, sums, state, state[0].clone(), query.new_empty(0).cpu()
    )
    return out, sums, None, None, query.shape[2], key.shape[2], state, unused, debug


@_kernel
def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    *_, dropout, causal, seed, _ = rest
    operands, how = (query, key, value), (None, dropout, causal, scale)
    return _filled(
        _attend_backward(grad_out, *operands, how=how, seed=seed), *map(torch.empty_like, operands)
    )


@_kernel
def _scaled_dot_product_cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Any, ...]:
    bias, keeps_sums, dropout, causal, _ = _given(rest, None, False, 0.0, False, False)
    out = torch.empty_like(query[..., : value.shape[-1]])
    sums, seed = _attend(query, key, value, (bias, dropout, causal, scale), out)
    drawn = torch.tensor(seed)
    sums, of_seed, offset = _device(query.device, sums[..., None], drawn, drawn)
    if not keeps_sums:
        sums = None
    return out, sums, None, None, query.shape[2], key.shape[2], of_seed, offset, None


@_kernel
def _scaled_dot_product_cudnn_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    _, _, seed, _, bias, *_, dropout, causal = rest
    operands, how = (query, key, value), (bias, dropout, causal, scale)
    return _filled(
        _attend_backward(grad_out, *operands, how=how, seed=seed), *map(torch.empty_like, operands)
    )


@_kernel
def _scaled_dot_product_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Any, ...]:
    bias, keeps_sums, dropout, causal = _given(rest, None, False, 0.0, False)
    batch, heads, length, _ = query.shape
    out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
    sums, seed = _attend(query, key, value, (bias, dropout, causal, scale), out)
    padded = torch.nn.functional.pad(sums, (0, -length % 32)) if keeps_sums else sums[..., :0]
    drawn = torch.tensor(seed)
    (sums,) = _device(query.device, padded.contiguous())
    return out, sums, drawn, drawn.clone()  # seed and offset stay on the host


@_kernel
def _scaled_dot_product_efficient_attention_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Any, ...]:
    bias, _, _, seed, _, dropout, wanted, causal = _given(rest, *[None] * 7, False)
    operands, how = (query, key, value), (bias, dropout, causal, scale)
    found = _attend_backward(grad_out_, *operands, how=how, seed=seed)
    outs = (t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in operands)
    gradients = _filled(found, *outs)
    if bias is None or not wanted[3]:
        return *gradients, None
    columns = bias.shape[-1]
    aligned = bias.new_empty(*bias.shape[:-1], columns + -columns % 16)[..., :columns]
    return *gradients, *_filled(found[3:], aligned)


# ---- norms, softmax and the grid sampler


@_kernel
def native_batch_norm(input: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Save the statistics in 32 bits, as on a GPU. The CPU saves them in the type of the weight."""
    out, *statistics = _batch_norm(input, *rest)
    return _device(input.device, out, *(t if t.dtype is torch.float64 else t.float() for t in statistics))


def _batch_norm(input: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Return output, mean and inverse deviation on the host, and write the running statistics."""
    *operands, training, momentum, eps = rest
    given = _host(input, *operands)
    found = _aten.native_batch_norm(*given, training, momentum, eps)
    if training:
        for to, written in zip(operands[2:], given[3:], strict=True):
            if to is not None:
                to.copy_(written)
    return found  # type: ignore[no-any-return]


@_kernel
def native_batch_norm_backward(grad_out: Tensor, input: Tensor, *rest: Any) -> tuple[Any, ...]:
    weight, mean, variance, save_mean, save_invstd, train, eps, mask = rest
    operands = _host(grad_out, input, weight, mean, variance)
    dtype = input.dtype if weight is None else weight.dtype
    saved = (None if t is None else t.to(dtype) for t in _host(save_mean, save_invstd))
    return _device(input.device, *_aten.native_batch_norm_backward(*operands, *saved, train, eps, list(mask)))


@_kernel
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Any, ...]:
    """Save the statistics in 32 bits, as on a GPU."""
    x, w, b = _host(input, weight, bias)
    out, mean, rstd = _aten.native_layer_norm(x, list(normalized_shape), w, b, eps)
    saved = (t if t.dtype is torch.float64 else t.float() for t in (mean, rstd))
    return _device(input.device, out, *saved)


@_kernel
def native_layer_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], *rest: Any
) -> tuple[Any, ...]:
    *operands, output_mask = rest
    g, x, m, r, w, b = _host(grad_out, input, *operands)
    dtype = x.dtype if w is None else w.dtype
    shape, mask = list(normalized_shape), list(output_mask)
    found = _aten.native_layer_norm_backward(g, x, shape, m.to(dtype), r.to(dtype), w, b, mask)
    return _device(input.device, *found)


@_kernel
def cudnn_batch_norm(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    running_mean, running_var, training, momentum, epsilon = rest
    out, saved_mean, saved_inverse = _batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, epsilon
    )
    return _device(input.device, out, saved_mean, saved_inverse, torch.empty(0, dtype=torch.uint8))


@_kernel
def cudnn_batch_norm_backward(input: Tensor, grad_output: Tensor, *rest: Any) -> tuple[Any, ...]:
    *operands, epsilon, _ = rest
    given = _host(grad_output, input, *operands)
    return _device(input.device, *_aten.native_batch_norm_backward(*given, True, epsilon, [True, True, True]))


@_kernel
def _fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Any, ...]:
    x, w = _host(input, weight)
    return _device(input.device, *decompositions._fused_rms_norm(x, list(normalized_shape), w, eps))


@_kernel
def _fused_rms_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], *rest: Any
) -> tuple[Any, ...]:
    *operands, output_mask = rest
    g, x, r, w = _host(grad_out, input, *operands)
    shape, mask = list(normalized_shape), list(output_mask)
    return _device(input.device, *decompositions._fused_rms_norm_backward(g, x, shape, r, w, mask))


@_kernel
def cudnn_grid_sampler(self: Tensor, grid: Tensor) -> Tensor:
    (out,) = _device(self.device, _aten.grid_sampler_2d(*_host(self, grid), 0, 0, True))
    return out


@_kernel
def cudnn_grid_sampler_backward(self: Tensor, grid: Tensor, grad_output: Tensor) -> tuple[Any, ...]:
    x, g, gradient = _host(self, grid, grad_output)
    return _device(self.device, *_aten.grid_sampler_2d_backward(gradient, x, g, 0, 0, True, [True, True]))


@_kernel
def _softmax(self: Tensor, dim: int, half_to_float: bool, op: Any = _aten._softmax) -> Tensor:
    x = self.cpu().float() if half_to_float else self.cpu()
    (out,) = _device(self.device, op(x, dim, False))
    return out


@_kernel
def _log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _softmax(self, dim, half_to_float, _aten._log_softmax)  # type: ignore[no-any-return]


@_kernel
def _softmax_backward_data(
    grad_output: Tensor, output: Tensor, dim: int, dtype: Any, op: Any = _aten._softmax_backward_data
) -> Tensor:
    g, y = _host(grad_output, output)
    (out,) = _device(output.device, op(g, y, dim, y.dtype).to(dtype))
    return out


@_kernel
def _log_softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, dtype: Any) -> Tensor:
    op = _aten._log_softmax_backward_data
    return _softmax_backward_data(grad_output, output, dim, dtype, op)  # type: ignore[no-any-return]


# ---- gradients that torch composes of other ops where a device has no kernel for them


def _gradient_of(name: str) -> None:
    def kernel(grad_output: Tensor, self: Tensor) -> Tensor:
        (out,) = _device(self.device, getattr(_aten, name)(*_host(grad_output, self)))
        return out

    kernel.__name__ = name
    _kernel(kernel)


_gradient_of("silu_backward")
_gradient_of("mish_backward")


# ---- recurrent cells


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


@_kernel
def _thnn_fused_lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Tensor | None
) -> tuple[Any, ...]:
    x, h, c, b_x, b_h = _host(input_gates, hidden_gates, cx, *_given(biases, None, None))
    i, f, g, o = (_biased(x, b_x) + _biased(h, b_h)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * c + i * g
    return _device(cx.device, o * cell.tanh(), cell, torch.cat([i, f, g, o], 1))


@_kernel
def _thnn_fused_lstm_cell_backward_impl(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Any, ...]:
    of_hidden, of_cell, c, cell, work = _host(grad_hy, grad_cy, cx, cy, workspace)
    of_hidden = torch.zeros_like(c) if of_hidden is None else of_hidden
    of_cell = torch.zeros_like(c) if of_cell is None else of_cell
    i, f, g, o = work.chunk(4, 1)
    tanh = cell.tanh()
    of_cell = of_cell + of_hidden * o * (1 - tanh * tanh)
    of_input, of_forget = of_cell * g * i * (1 - i), of_cell * c * f * (1 - f)
    gates = torch.cat([of_input, of_forget, of_cell * i * (1 - g * g), of_hidden * tanh * o * (1 - o)], 1)
    return _device(cx.device, gates, of_cell * f, gates.sum(0) if has_bias else None)


@_kernel
def _thnn_fused_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases: Tensor | None
) -> tuple[Any, ...]:
    x, h, before, b_x, b_h = _host(input_gates, hidden_gates, hx, *_given(biases, None, None))
    (r_x, z_x, n_x), (r_h, z_h, n_h) = _biased(x, b_x).chunk(3, 1), _biased(h, b_h).chunk(3, 1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return _device(hx.device, n + z * (before - n), torch.cat([r, z, n, before, n_h], 1))


@_kernel
def _thnn_fused_gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    gradient, work = _host(grad_hy, workspace)
    r, z, n, before, n_h = work.chunk(5, 1)
    of_n = gradient * (1 - z) * (1 - n * n)
    of_z = gradient * (before - n) * z * (1 - z)
    of_r = of_n * n_h * r * (1 - r)
    of_input = torch.cat([of_r, of_z, of_n], 1)
    of_hidden = torch.cat([of_r, of_z, of_n * r], 1)
    sums = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return _device(grad_hy.device, of_input, of_hidden, gradient * z, *sums)
