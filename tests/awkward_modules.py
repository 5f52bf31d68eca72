"""Modules that write in place, hold views of one storage, or draw numbers: what an executor can get wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OneBuffer(nn.Module):
    """All weights are views of one storage. Forward makes a tensor of the whole, like an RNN of cuDNN."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        both = torch.randn(2, width, width) / width**0.5
        self.first, self.second = (nn.Parameter(weight) for weight in both)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shape = (2, *self.first.shape)
            both = torch.empty(0, device=x.device).set_(self.first.untyped_storage(), 0, shape)  # type: ignore[call-overload]
        for _ in range(2):
            x = x + (x @ self.first).tanh() @ self.second * (x @ both.sum(0)).sigmoid()
        return x


class ConvNet(nn.Module):
    """BatchNorm, in-place ReLU, in-place residual add, pooling with indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x))
        y += x
        y = F.max_pool2d(self.relu(y), 2)
        return self.head(F.dropout(y.flatten(1), 0.3, self.training))


class InPlace(nn.Module):
    """Writes through views, into fresh buffers, and over values that were read earlier."""

    cache: Tensor

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(rows, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        a = y + 1  # reads y before it is overwritten; backward does not need it
        y[:2].mul_(2)
        z = y.t()
        y.add_(a)
        padded = torch.zeros(len(x), 32)
        padded[:, :16].copy_(z.t().tanh())
        self.cache.copy_(padded.detach())
        noise = torch.empty_like(y).bernoulli_(0.5).div_(0.5)
        return (padded[:, :16] * y.exp() * noise).sigmoid_()


class Views(nn.Module):
    """Views of views, of other dtypes, and views of a part of a saved tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        a, b, c = y.split(4, dim=-1)
        d = torch.view_as_complex(torch.stack([a.sin(), b.cos()], -1))
        e = (d * d.conj()).real + d.imag.exp()
        return (e * c.expand(2, *c.shape).sum(0).t().reshape(c.shape)) + y.unfold(-1, 4, 4).prod(1)


class Gates(nn.Module):
    """In-place ops on chunks of one tensor, between reads of the others."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.mixes = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for gates, mix in zip(self.gates, self.mixes, strict=True):
            i, f, g, o = gates(x).unsafe_chunk(4, 1)
            x = mix(i.sigmoid_() * g.tanh_() + f.sigmoid_() * o.sigmoid_())
        return x
