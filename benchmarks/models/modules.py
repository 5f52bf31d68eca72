"""Hand-written models; each has something that an executor of policies can get wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor] | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).split(width, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + F.dropout(
            self.out(a.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training
        )
        if scale is not None:
            x = x * scale["by"]
        return x + F.dropout(
            self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh")), self.dropout, self.training
        )


class Transformer(nn.Module):
    """A few blocks with keyword arguments, one of them nested."""

    def __init__(self, layers: int = 3, width: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, *, scale: dict[str, Tensor] | None = None) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x, scale=scale)
        return {"hidden": x, "logits": self.head(x)}


class Recurrent(nn.Module):
    """An LSTM, whose kernel returns a workspace only when gradients are on."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.lstm(x)[0]))


class Routed(nn.Module):
    """A mixture of experts: control flow on values, index_add, nonzero."""

    def __init__(self, experts: int = 4, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slots = (chosen == i).nonzero(as_tuple=True)
            routed = expert(x[rows]) * weights[rows, slots, None]
            out.index_add_(0, rows, routed.to(out.dtype))  # autocast changed the dtype
        return out + x


class Edges(nn.Module):
    """One round of messages along the edges of a graph: gathers by an index, a sum by another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        weight = self.score(h).gather(0, source[:, None]).sigmoid()
        message = self.message(torch.cat([h[source], h.index_select(0, target)], -1))
        message = self.update(F.silu(message)) * weight
        near = (source - target).abs() < len(h) // 2
        received = torch.zeros_like(h).scatter_add(0, target[:, None].expand_as(message), message)
        return h + received.index_add(0, target[near], message[near])


class MessagePassing(nn.Module):
    """Rounds of messages on a graph given by its edges."""

    def __init__(self, width: int = 16, rounds: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Edges(width) for _ in range(rounds))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, source, target)
        return {"loss": x.square().mean()}


class GroupedExperts(nn.Module):
    """A mixture of experts that sorts its tokens by expert and multiplies each group by one matrix."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weight, chosen = self.router(y).softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        rows = order // 2
        ends = chosen.flatten().bincount(minlength=len(self.up)).cumsum(0).int()
        z = F.silu(F.grouped_mm(y[rows], self.up, offs=ends))
        z = F.grouped_mm(z, self.down, offs=ends) * weight.flatten()[order, None]
        return x + torch.zeros_like(x).index_add_(0, rows, z)


class Experts(nn.Module):
    """Layers of grouped experts."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GroupedExperts(width, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


class Unrolled(nn.Module):
    """An LSTM cell, called at every position: four in-place ops on four chunks of one tensor each time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(h)
        return torch.stack(outputs, 1)


class CellLoop(nn.Module):
    """Layers of unrolled LSTM cells."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unrolled(width) for _ in range(layers))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


class PackedLayer(nn.Module):
    """A bidirectional LSTM over sequences of different lengths."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return x + y


class Recognizer(nn.Module):
    """Packed LSTMs under a CTC loss."""

    def __init__(self, width: int = 16, layers: int = 3, classes: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PackedLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, lengths: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, lengths)
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        counts = torch.full_like(lengths, labels.shape[1])
        return {"loss": F.ctc_loss(scores, labels, lengths, counts)}


class Tower(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Bags(nn.Module):
    """Embeddings with sparse gradients, summed by bag, under a few towers."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(200, width, mode="sum", sparse=True)
        self.users = nn.Embedding(50, width, sparse=True)
        self.blocks = nn.ModuleList(Tower(width) for _ in range(layers))

    def forward(self, items: Tensor, starts: Tensor, users: Tensor) -> dict[str, Tensor]:
        x = self.bags(items, starts) + self.users(users)
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


class WithLoss(nn.Module):
    """A model of one tensor with its loss inside, so that `apply` sees the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        out = self.model(x)
        loss = F.cross_entropy(out.flatten(0, -2), target.flatten())
        return {"loss": loss, "logits": out}


class DoubleConv(nn.Module):
    """Convolution, BatchNorm and in-place ReLU, twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Long skip connections from the contracting to the expanding path, and a class for each pixel."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, width), DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up2, self.up1 = DoubleConv(4 * width, 2 * width), DoubleConv(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        y = self.up2(torch.cat([self.rise2(c), b], 1))
        y = self.up1(torch.cat([self.rise1(y), a], 1))
        return self.head(y).movedim(1, -1)


class DenseNet(nn.Module):
    """Every layer reads all layers before it."""

    def __init__(self, layers: int = 5, growth: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(growth * i),
                nn.ReLU(inplace=True),
                nn.Conv2d(growth * i, growth, 3, padding=1, bias=False),
                nn.Dropout2d(0.1),
            )
            for i in range(1, layers + 1)
        )
        self.head = nn.Linear(growth * (layers + 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))
