"""Autograd Functions around unseen kernels, as Liger, unsloth, flash-attn and bitsandbytes write theirs.

What each does with its inputs, its outputs and its context is the point; docstrings name it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from unseen_kernels.library import launch


class Scale(Function):
    """Fill an `empty_like`, save nothing, and take a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        x = x.contiguous()
        y = torch.empty_like(x)
        launch("scale", x.dtype, y, x, x.numel(), factor)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * ctx.factor, None


class SquareWithSetup(Function):
    """Use `setup_context`; write over what a visible op made."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        y = x * x
        launch("affine_window", y.dtype, y, 1, y.numel(), 0, 1, 0.5, 0.25)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy * x


def _normed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.contiguous(), weight.to(x.dtype)
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    y, rstd = torch.empty_like(x), torch.empty(rows, dtype=x.dtype, device=x.device)
    launch("rms_norm", x.dtype, y, rstd, x, weight, rows, columns)
    return y, x, weight, rstd


def _norm_backward(dx: Tensor, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dweight = torch.empty_like(weight)
    launch("rms_norm_backward", x.dtype, dx, dweight, dy, x, weight, rstd, len(rstd), x.shape[-1])
    return dx, dweight.float()


class RMSNorm(Function):
    """Save an input and a statistic that the kernel wrote; write the gradient over the incoming one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y, *kept = _normed(x, weight)
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        kept = ctx.saved_tensors
        dx = dy.clone(memory_format=torch.contiguous_format)
        return _norm_backward(dx, dx, *kept)


class RMSNormInAttributes(Function):
    """Keep tensors as attributes of the context, where no hook of saved tensors sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y, *kept = _normed(x, weight)
        ctx.tensors = [tensor.detach() for tensor in kept]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _norm_backward(torch.empty_like(ctx.tensors[0]), dy.contiguous(), *ctx.tensors)


class SwiGLU(Function):
    """Save both inputs; the output is new."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        launch("swiglu", gate.dtype, y, gate, up, gate.numel())
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        launch("swiglu_backward", gate.dtype, dgate, dup, dy.contiguous(), gate, up, gate.numel())
        return dgate, dup


class SwiGLUOverSaved(SwiGLU):
    """Write the gradients over the saved inputs in backward, as Liger does."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        launch("swiglu_backward", gate.dtype, gate, up, dy.contiguous(), gate, up, gate.numel())
        return gate, up


def _turn(x: Tensor, cosines: Tensor, sines: Tensor, sign: float) -> None:
    rows, half = x.numel() // x.shape[-1], cosines.shape[-1]
    launch("rotate", x.dtype, x, cosines, sines, rows, x.shape[-1] // (2 * half), half, x.shape[-1],
           len(cosines), sign)  # fmt: skip


class Rope(Function):
    """Turn the input in place, and say so by `mark_dirty`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        _turn(x, cosines, sines, 1.0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(cosines, sines)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        cosines, sines = ctx.saved_tensors
        dx = dy.clone(memory_format=torch.contiguous_format)
        _turn(dx, cosines, sines, -1.0)
        return dx, None, None


class RopeUnmarked(Rope):
    """Turn the input in place without a word, and return a view of it, as unsloth does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        _turn(x, cosines, sines, 1.0)
        ctx.save_for_backward(cosines, sines)
        return x.view(x.shape)


class CrossEntropy(Function):
    """Make the gradient in forward, in a new tensor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.contiguous()
        rows, columns = logits.shape
        losses = torch.empty(rows, dtype=logits.dtype, device=logits.device)
        gradient = torch.empty_like(logits)
        launch("cross_entropy", logits.dtype, losses, gradient, logits, targets, rows, columns)
        ctx.save_for_backward(gradient)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * dy, None


class CrossEntropyOverLogits(CrossEntropy):
    """Write the gradient over the logits in forward, as Liger does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        rows, columns = logits.shape
        losses = torch.empty(rows, dtype=logits.dtype, device=logits.device)
        launch("cross_entropy", logits.dtype, losses, logits, logits, targets, rows, columns)
        ctx.save_for_backward(logits.detach())
        return losses.mean()


class Attention(Function):
    """Save what the kernel wrote, the output and the logarithms of the sums; the latter is an output too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        y = torch.empty_like(q)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        launch("attention", q.dtype, y, lse, q, k, v, *q.shape)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.mark_non_differentiable(lse)
        return y, lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> Any:
        q, k, v, y, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        launch("attention_backward", q.dtype, dq, dk, dv, dy.contiguous(), y, lse, q, k, v, *q.shape)
        return dq, dk, dv


class OwnNoise(Function):
    """Draw from a generator of its own; another call gives other numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ones, factors = torch.ones_like(x), torch.empty_like(x)
        launch("noise", x.dtype, factors, ones, x.numel())
        ctx.save_for_backward(factors)
        return x * factors

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (factors,) = ctx.saved_tensors
        return dy * factors


class Outer(Function):
    """Call another Function inside, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = Scale.apply(x, 1.5)
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return Scale.apply(2.0 * dy * y, 1.5)


class Split(Function):
    """Return two outputs and an order of integers that is not differentiable; save inputs and outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.contiguous()
        tripled, square = torch.empty_like(x), x * x
        launch("scale", x.dtype, tripled, x, x.numel(), 3.0)
        order = torch.empty(x.shape, dtype=torch.int64, device=x.device)
        launch("row_order", x.dtype, order, x, x.numel() // x.shape[-1], x.shape[-1])
        ctx.save_for_backward(x, square)
        ctx.mark_non_differentiable(order)
        return tripled, square, order

    @staticmethod
    def backward(ctx: Any, dtripled: Tensor, dsquare: Tensor, _: Tensor) -> Tensor:
        x, square = ctx.saved_tensors
        return 3.0 * dtripled + dsquare * (2.0 * x + 0.0 * square)


class WritesIntoBuffer(Function):
    """Write into a tensor that it gets, and that autograd does not follow: a workspace or a cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, workspace: Tensor) -> Tensor:
        x = x.contiguous()
        launch("scale", x.dtype, workspace, x, x.numel(), 0.5)
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2.0 * dy * x, None
