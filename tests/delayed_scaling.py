"""Linear layers in simulated fp8 whose scales follow the largest values of earlier steps.

TransformerEngine calls that delayed scaling: a Function reads scales, and writes the largest values of this
step to a history. The layer makes the next scales from the history.
"""

from __future__ import annotations

from typing import Any

import torch
from blocks import Residual
from torch import Tensor, nn
from torch.nn import functional as F


def _quantized(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).clamp_(-448, 448).to(torch.float8_e4m3fn)


def _restored(small: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    return small.to(dtype).mul_(inverse)


class ScaledProduct(torch.autograd.Function):
    """Multiply in fp8, and note the largest values in the first row of the history."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, history: Tensor, scale: Tensor) -> Tensor:
        for place, tensor in zip(history[0], (x, weight), strict=True):
            place.copy_(torch.maximum(place, tensor.detach().abs().max()))
        small_x, small_weight = _quantized(x, scale[0]), _quantized(weight, scale[1])
        inverse = 1 / scale
        ctx.save_for_backward(small_x, small_weight, inverse)
        return _restored(small_x, inverse[0], x.dtype) @ _restored(small_weight, inverse[1], x.dtype).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        small_x, small_weight, inverse = ctx.saved_tensors
        dx = dy @ _restored(small_weight, inverse[1], dy.dtype)
        x = _restored(small_x, inverse[0], dy.dtype).flatten(0, -2)
        return dx, dy.flatten(0, -2).t() @ x, None, None


class Fp8Linear(nn.Module):
    """A linear layer with delayed scaling, or with `scaling` off a plain one of the same weights."""

    history: Tensor  # largest values of x and of the weight, the latest step first
    scale: Tensor  # of x and of the weight

    def __init__(self, weight: Tensor, bias: Tensor | None, *, scaling: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
        self.bias = bias
        self.scaling = scaling
        self.register_buffer("history", torch.zeros(16, 2))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if not self.scaling:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = ScaledProduct.apply(x, self.weight, self.history, self.scale)
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def next_step(self) -> None:
        """Make the next scales, and move the history on."""
        history, scale = self.history, self.scale
        largest = history.amax(0)
        scale.copy_(torch.where(largest > 0, 448 / largest.clamp(min=1e-12), scale))
        history.copy_(history.roll(1, 0))
        history[0].zero_()


def to_fp8(model: nn.Module, *, scaling: bool = True) -> nn.Module:
    """Replace the linear layers of `model`, and return it."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, Fp8Linear(child.weight, child.bias, scaling=scaling))
        else:
            to_fp8(child, scaling=scaling)
    return model


def next_step(model: nn.Module) -> None:
    """Make the next scales of all layers, as on leaving `fp8_autocast`: between forward and backward."""
    for module in model.modules():
        if isinstance(module, Fp8Linear) and module.scaling:
            module.next_step()


def hand_written(*, scaling: bool = True) -> nn.Module:
    """Return residual blocks with delayed scaling."""
    torch.manual_seed(0)
    return to_fp8(nn.Sequential(*[Residual(128) for _ in range(3)]), scaling=scaling)
