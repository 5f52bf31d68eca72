"""Small layers with unseen kernels, in Functions and outside of them, from [rows, WIDTH] to [rows, WIDTH].

A layer outside of a Function works on visible ops' results under autograd: what the kernel writes is a
constant to autograd, or a value on which the following ops differentiate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from unseen_kernels import functions
from unseen_kernels.library import launch

WIDTH = 8


def affine(y: Tensor, factor: float, shift: float = 0.0) -> Tensor:
    """Write factor * y + shift over `y`, a window of at most two dimensions, unseen."""
    window = y.detach() if y.dim() == 2 else y.detach().reshape(1, -1)
    launch("affine_window", y.dtype, window, *window.shape, *window.stride(), factor, shift)
    return y


class Unseen(nn.Module):
    """A layer of one kind, between a linear layer and whatever follows."""

    weight: nn.Parameter  # of the norms

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind in FUNCTIONS_WITH_WEIGHT:
            self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        if kind.startswith("swiglu"):
            self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.down = nn.Linear(2 * WIDTH, WIDTH)
        if kind == "attention":
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        if kind.startswith("rope"):
            angles = torch.arange(4.0)[:, None] * torch.tensor([0.3, 0.05])
            self.register_buffer("cosines", angles.cos())
            self.register_buffer("sines", angles.sin())

    def extra_repr(self) -> str:
        return self.kind

    def forward(self, x: Tensor) -> Tensor:
        return RUN[self.kind](self, x)


Layer = Callable[[Unseen, Tensor], Tensor]


def _empty(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x)
    y = torch.empty_like(h)
    launch("scale", h.dtype, y, h.contiguous(), h.numel(), 0.7)
    return h * y


def _over_output(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x).sin()
    affine(h, 0.6, 0.1)
    return h * h


def _permuted(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x) + 1.0
    launch("reverse", h.dtype, h, h.numel())
    return h * h


def _saved_value(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x)
    y = h.tanh()
    z = y * y  # autograd has packed y twice
    affine(y, 0.5)
    return z + y


def _after_last_read(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x).sigmoid()
    y = h * 2.0
    affine(h, 0.9, 0.05)  # only the backward of sigmoid reads h from now on
    return y


def _offset_view(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x).cos()
    affine(h[1:, 2:5], 0.3, 0.2)
    return h * h


def _base_of_view(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x).tanh()
    left = h[:, : WIDTH // 2]
    affine(h, 0.4, 0.3)
    return torch.cat([left * left, left.sin()], -1)


def _partial(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x)
    y = torch.empty_like(h)
    y[1:] = h.detach()[1:] * 0.5
    launch("scale", h.dtype, y, h, WIDTH, 2.0)  # the first row
    return h * y


def _between_writes(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x) * 1.0
    h.mul_(0.5)
    affine(h, 1.0, 0.3)
    h.add_(0.25)
    return h.exp()


def _twice_written(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x).sin()
    a = h * 2.0
    affine(h, 0.5, 0.1)
    b = h * 3.0
    affine(h, -1.0)
    return a.sin() * b.sin() + h.cos()


def _mask(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x).contiguous()
    mask = torch.empty(h.shape, dtype=torch.bool, device=h.device)
    launch("positive_mask", h.dtype, mask, h, h.numel())
    return torch.where(mask, h * h, h.sin())


def _order(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x).contiguous()
    order = torch.empty(h.shape, dtype=torch.int64, device=h.device)
    launch("row_order", h.dtype, order, h, len(h), WIDTH)
    return h.gather(-1, order) * torch.linspace(0.5, 1.5, WIDTH, device=h.device, dtype=h.dtype)


def _workspace(layer: Unseen, x: Tensor) -> Tensor:
    """Write two results into one buffer in turn, as kernels with a shared workspace do."""
    h = layer.linear(x).contiguous()
    space = torch.empty_like(h)
    launch("scale", h.dtype, space, h, h.numel(), 0.5)
    a = h * space.clone()
    launch("scale", h.dtype, space, h, h.numel(), -0.25)
    return a + h * space


def _dropout_mask(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x)
    mask = torch.empty_like(h).bernoulli_(0.7)
    affine(mask, 2.0, 0.1)
    return h * mask


def _rope(function: type[functions.Rope]) -> Layer:
    def run(layer: Unseen, x: Tensor) -> Tensor:
        h = layer.linear(x) * 1.0
        y: Tensor = function.apply(h, layer.cosines, layer.sines)
        return y * y

    return run


def _swiglu(function: type[functions.SwiGLU]) -> Layer:
    def run(layer: Unseen, x: Tensor) -> Tensor:
        return layer.down(function.apply(layer.gate(x), layer.up(x)))

    return run


def _swiglu_over_saved_read_before(layer: Unseen, x: Tensor) -> Tensor:
    """Read the gate by an op that saves another tensor, which a recompute makes from the gate.

    Backward runs that op after the kernel has written gradients over the gate.
    """
    gate = layer.gate(x)
    shifted = gate + 1.0
    square = shifted * shifted
    return layer.down(functions.SwiGLUOverSaved.apply(gate, layer.up(x)) + square.sigmoid())


def _attention(layer: Unseen, x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, WIDTH // 2)).transpose(0, 1) for t in layer.qkv(x).chunk(3, -1))
    y, lse = functions.Attention.apply(q, k, v)
    return y.transpose(0, 1).flatten(1) + lse.mean()


def _split(layer: Unseen, x: Tensor) -> Tensor:
    tripled, square, order = functions.Split.apply(layer.linear(x).tanh())
    return tripled.gather(-1, order) * 0.1 + square


def _buffer_of_function(layer: Unseen, x: Tensor) -> Tensor:
    h = layer.linear(x)
    space = torch.zeros_like(h, requires_grad=False)
    y: Tensor = functions.WritesIntoBuffer.apply(h, space)
    return y * space.sigmoid()


def _cross_entropy(function: type[functions.CrossEntropy]) -> Layer:
    def run(layer: Unseen, x: Tensor) -> Tensor:
        targets = torch.arange(len(x), device=x.device) % WIDTH
        return x + function.apply(layer.linear(x) * 1.0, targets)

    return run


OUTSIDE: dict[str, Layer] = {
    "fills empty": _empty,
    "over an output": _over_output,
    "permutes in place": _permuted,
    "over a saved value": _saved_value,
    "after the last read": _after_last_read,
    "offset window": _offset_view,
    "base of a view": _base_of_view,
    "part of a buffer": _partial,
    "between visible writes": _between_writes,
    "written twice": _twice_written,
    "bool mask": _mask,
    "integer order": _order,
    "workspace": _workspace,
    "over a drawn mask": _dropout_mask,
}
FUNCTIONS: dict[str, Layer] = {
    "scale": lambda layer, x: functions.Scale.apply(layer.linear(x), 0.7).sin(),
    "setup_context": lambda layer, x: functions.SquareWithSetup.apply(layer.linear(x)).sin(),
    "rms norm": lambda layer, x: functions.RMSNorm.apply(layer.linear(x), layer.weight),
    "rms norm in attributes": lambda layer, x: functions.RMSNormInAttributes.apply(
        layer.linear(x), layer.weight
    ),
    "swiglu": _swiglu(functions.SwiGLU),
    "swiglu over saved": _swiglu(functions.SwiGLUOverSaved),
    "swiglu over saved, read before": _swiglu_over_saved_read_before,
    "rope": _rope(functions.Rope),
    "rope unmarked": _rope(functions.RopeUnmarked),
    "cross entropy": _cross_entropy(functions.CrossEntropy),
    "cross entropy over logits": _cross_entropy(functions.CrossEntropyOverLogits),
    "attention": _attention,
    "own noise": lambda layer, x: functions.OwnNoise.apply(layer.linear(x)).sin(),
    "nested": lambda layer, x: functions.Outer.apply(layer.linear(x)).sin(),
    "several outputs": _split,
    "writes an argument": _buffer_of_function,
}
FUNCTIONS_WITH_WEIGHT = ("rms norm", "rms norm in attributes")
RUN = {**OUTSIDE, **FUNCTIONS}
KINDS = tuple(RUN)


def network(kind: str) -> nn.Sequential:
    """Return a net with a layer of `kind` between visible layers, some of which can be recomputed."""
    torch.default_generator.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
        Unseen(kind),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        Unseen(kind),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)),
    )


def batch() -> Tensor:
    return torch.linspace(-1.0, 1.0, 16 * WIDTH).sin().mul(math.pi).reshape(16, WIDTH).clone()
