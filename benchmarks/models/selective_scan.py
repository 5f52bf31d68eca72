"""Declare Mamba's selective scan as one op, like its CUDA kernel: shapes and saved tensors, no arithmetic.

The fallback of `transformers` is a loop over the sequence. Sources: `selective_scan_fwd` and
`selective_scan_bwd` in csrc/selective_scan/selective_scan.cpp, and `SelectiveScanFn` in
mamba_ssm/ops/selective_scan_interface.py (state-spaces/mamba 2.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

CHUNK = 2048  # positions between two states that forward keeps for backward


@torch.library.custom_op("autoac_bench::selective_scan", mutates_args=())
def scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gated output, the output, and the states at the ends of chunks."""
    raise NotImplementedError("this selective scan only computes shapes: call it on meta or fake tensors")


@scan.register_fake
def _(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, width, length = u.shape
    chunks = -(-length // CHUNK)
    states = u.new_empty((batch, width, chunks, 2 * a.shape[1]), dtype=a.dtype)
    return torch.empty_like(z), torch.empty_like(delta), states


@torch.library.custom_op("autoac_bench::selective_scan_backward", mutates_args=())
def scan_backward(
    gradient: Tensor,
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    z: Tensor,
    bias: Tensor,
    out: Tensor,
    states: Tensor,
) -> list[Tensor]:
    """Return the gradients of the scan's arguments, in order."""
    raise NotImplementedError("this selective scan only computes shapes: call it on meta or fake tensors")


@scan_backward.register_fake
def _(gradient: Tensor, *saved: Tensor) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in saved[:8]]


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the other outputs have no gradients
    ctx.save_for_backward(*inputs, output[1], output[2])


def _backward(ctx: Any, gradient: Tensor, *_unused: Tensor) -> tuple[Tensor, ...]:
    return tuple(scan_backward(gradient, *ctx.saved_tensors))


scan.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.autoac_bench.selective_scan)
def _scan_flops(u: Any, delta: Any, a: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return 9 FLOPs for each position, channel and state (Mamba paper, appendix on efficiency)."""
    batch, width, length = u
    return int(9 * batch * width * length * a[1])


@register_flop_formula(torch.ops.autoac_bench.selective_scan_backward)
def _scan_backward_flops(gradient: Any, u: Any, delta: Any, a: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of forward's states and of the gradients, which take twice as many."""
    return 3 * _scan_flops(u, delta, a)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    **_options: Any,
) -> Tensor:
    """Replace the function `mamba_selective_scan` of `transformers`."""
    out: Tensor = scan(u, delta, a, b, c, D, z, delta_bias)[0]
    return out
