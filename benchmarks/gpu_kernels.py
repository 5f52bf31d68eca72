"""Train small models whose kernels only a GPU has, plain and planned near the smallest peak, and compare.

Each model trains plainly twice, since some kernels add numbers in an order that differs from run to run,
and once within 1.01 times the smallest peak that a plan was found for. Losses, gradients and the generator's
state are compared after a few steps of AdamW, and the peak of the last with its prediction. The rows
"kernels: ..." of `benchmarks.gpu_quarter` run this.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoac.planner import InfeasibleBudget
from benchmarks import sample_training
from benchmarks.models.samples import TINY, Sample
from benchmarks.sample_training import train

ROOM = 1.01  # of the smallest peak found
WIDTH = 256
TOO_LITTLE = 1 << 20  # a budget within which nothing trains
DEVICE = torch.device("cuda:0")


def batch() -> Tensor:
    """Return an input of every model, float32[8, 64, WIDTH]."""
    return torch.randn(8, 64, WIDTH, device=DEVICE)


def layers(width: int = WIDTH, n: int = 3) -> nn.Sequential:
    """Return a stack of normalized two-layer networks."""
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(n)
        )
    )


class KernelModel(nn.Module):
    """A model that returns its loss, between a first and a last stack of layers."""

    precision = "fp32"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers(), layers()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out.float().square().mean()

    def middle(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        raise NotImplementedError


class Lstm(KernelModel):
    """An LSTM of cuDNN with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class PackedGru(KernelModel):
    """A GRU of cuDNN in both directions over sequences of several lengths, in bf16."""

    precision = "bf16"

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        lengths = torch.arange(64, 56, -1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out: Tensor = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]
        return out


class Solves(KernelModel):
    """Factorizations and solves of cuSOLVER."""

    def middle(self, x: Tensor) -> Tensor:
        matrix = x @ x.mT / WIDTH + torch.eye(64, device=x.device)
        lower = torch.linalg.cholesky(matrix)
        out: Tensor = torch.linalg.solve_triangular(lower, x, upper=False) + torch.linalg.solve(matrix, x)
        return out


class Sorts(KernelModel):
    """Sorts and scans, whose kernels allocate memory of their own."""

    def middle(self, x: Tensor) -> Tensor:
        return x.sort(-1)[0] + x.softmax(-1).cumsum(-1) + torch.cumprod(x.sigmoid(), -1) + x.logcumsumexp(-1)


class RandomNumbers(KernelModel):
    """Ops that draw from the GPU's generator."""

    def middle(self, x: Tensor) -> Tensor:
        x = F.rrelu(F.alpha_dropout(F.dropout(x, 0.1), 0.1, training=True), training=True)
        noise = torch.randn_like(x) + torch.rand_like(x) + torch.empty_like(x).exponential_()
        return (
            x + 0.1 * noise + F.gumbel_softmax(x, hard=True) + 1e-3 * torch.randperm(WIDTH, device=x.device)
        )


class SideStream(KernelModel):
    """A part on another stream, made in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = layers()
        self.stream: torch.cuda.Stream | None = None

    def middle(self, x: Tensor) -> Tensor:
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            aside: Tensor = self.aside(x)
        torch.cuda.current_stream().wait_stream(self.stream)
        aside.record_stream(torch.cuda.current_stream())
        x.record_stream(self.stream)
        return x * aside


class Grouped(KernelModel):
    """Experts in one grouped product, in bf16."""

    precision = "bf16"

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.experts = nn.Parameter(torch.randn(8, WIDTH, WIDTH) / WIDTH**0.5)

    def middle(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        share, expert = self.router(rows).softmax(-1).max(-1)
        order = expert.argsort()
        ends = torch.bincount(expert, minlength=8).cumsum(0).to(torch.int32)
        out: Tensor = torch._grouped_mm(rows[order].bfloat16(), self.experts.bfloat16(), offs=ends)
        scattered: Tensor = torch.zeros_like(out).index_copy(0, order, out) * share[:, None]
        return scattered.view_as(x)


class Float8(KernelModel):
    """A scaled product of float8 in a custom Function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = _Float8Product.apply(x.flatten(0, 1), self.weight)  # type: ignore[no-untyped-call]
        return out.view_as(x)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scales = [tensor.abs().amax() / 448 for tensor in (x, weight)]
        x8, weight8 = ((t / s).to(torch.float8_e4m3fn) for t, s in zip((x, weight), scales, strict=True))
        ctx.save_for_backward(x8, weight8, *scales)
        out = torch._scaled_mm(
            x8, weight8.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
        )
        return out.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x8, weight8, x_scale, weight_scale = ctx.saved_tensors
        return gradient @ (weight8.float() * weight_scale), gradient.t() @ (x8.float() * x_scale)


class Unseen(KernelModel):
    """A CuPy kernel that writes through a pointer, between ops that torch sees."""

    SOURCE = r"""extern "C" __global__ void squash(const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = tanhf(x[i]);
    }"""

    def __init__(self) -> None:
        super().__init__()
        self._cupy: Any = importlib.import_module("cupy")
        self._kernel = self._cupy.RawKernel(self.SOURCE, "squash")

    def middle(self, x: Tensor) -> Tensor:
        gate = torch.empty_like(x)
        read = x.detach().contiguous()
        arrays = (self._cupy.asarray(read), self._cupy.asarray(gate), self._cupy.int32(x.numel()))
        with self._cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            self._kernel((x.numel() // 256,), (256,), arrays)
        return x * gate


class Graphed(KernelModel):
    """A part that runs as a captured graph."""

    def __init__(self) -> None:
        super().__init__()
        self.part: Any = torch.cuda.make_graphed_callables(layers(), (batch().requires_grad_(),))

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        return out


class Compiled(KernelModel):
    """Attention with dropout between blocks that Inductor compiles: in bf16 it would round by the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.first.compile()
        self.last.compile()

    def middle(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.1)
        return out.transpose(1, 2).flatten(-2)


CASES: tuple[type[KernelModel], ...] = (
    Lstm,
    PackedGru,
    Solves,
    Sorts,
    RandomNumbers,
    SideStream,
    Grouped,
    Float8,
    Unseen,
    Graphed,
    Compiled,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One model, compared. Sizes are in bytes, distances relative."""

    name: str
    plain_distance: float
    distance: float
    budget: int
    peak: int
    error: int  # of the prediction
    recomputed: int

    @property
    def is_wrong(self) -> bool:
        return (self.distance > 0 and self.plain_distance == 0) or self.peak > self.budget


def compare(make: type[KernelModel]) -> Row:
    """Train a model plain, again, and planned."""
    sample = Sample(make.__name__, lambda _: make(), lambda _: {"x": batch()})
    case = sample_training.Case(sample, make.precision, TINY, DEVICE)
    plain, again = train(case), train(case)
    budget = TOO_LITTLE
    try:
        train(case, budget)
    except InfeasibleBudget as error:
        budget = int(ROOM * (error.smallest_found or budget))
    planned = train(case, budget)
    assert planned.report is not None
    return Row(
        make.__name__,
        plain.numbers.distance(again.numbers)[1],
        plain.numbers.distance(planned.numbers)[1],
        budget,
        planned.peak_bytes,
        abs(planned.peak_bytes - (planned.report.predicted_peak_bytes or 0)),
        planned.report.recomputed,
    )
