"""Train small models whose kernels only a GPU has, plain and planned near the smallest peak, and compare.

    python -m benchmarks.gpu_kernels [--only PATTERN] [--out FILE]

Each model trains plainly twice, since some kernels add numbers in an order that differs from run to run,
and once within 1.01 times the smallest peak that a plan was found for. Losses, weights and the generator's
state are compared after a few steps of AdamW, and the peak of each step but the first two with its
prediction.

Exit with 1 if a planned model differs where two plain ones do not, or if a peak is over its budget.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ac_client
from ac_client.doctor.sample_training import Numbers, release_memory
from autoac.planner import InfeasibleBudget
from autoac.planner.units import GIB, format_bytes
from benchmarks.results import add_out_argument, markdown_table, write_result

STEPS = 5
ROOM = 1.01  # of the smallest peak found
WIDTH = 256
TOO_LITTLE = 1 << 20  # a budget within which nothing trains
DEVICE = "cuda"


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


class Case(nn.Module):
    """A model that returns its loss, between a first and a last stack of layers."""

    autocast: torch.dtype | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers(), layers()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out.float().square().mean()

    def middle(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Do what has to be done once the model is on the GPU: by default nothing."""


class Lstm(Case):
    """An LSTM of cuDNN with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class PackedGru(Case):
    """A GRU of cuDNN in both directions over sequences of several lengths, in bf16."""

    autocast = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        lengths = torch.arange(64, 56, -1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out: Tensor = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]
        return out


class Solves(Case):
    """Factorizations and solves of cuSOLVER."""

    def middle(self, x: Tensor) -> Tensor:
        matrix = x @ x.mT / WIDTH + torch.eye(64, device=x.device)
        lower = torch.linalg.cholesky(matrix)
        out: Tensor = torch.linalg.solve_triangular(lower, x, upper=False) + torch.linalg.solve(matrix, x)
        return out


class Sorts(Case):
    """Sorts and scans, whose kernels allocate memory of their own."""

    def middle(self, x: Tensor) -> Tensor:
        return x.sort(-1)[0] + x.softmax(-1).cumsum(-1) + torch.cumprod(x.sigmoid(), -1) + x.logcumsumexp(-1)


class RandomNumbers(Case):
    """Ops that draw from the GPU's generator."""

    def middle(self, x: Tensor) -> Tensor:
        x = F.rrelu(F.alpha_dropout(F.dropout(x, 0.1), 0.1, training=True), training=True)
        noise = torch.randn_like(x) + torch.rand_like(x) + torch.empty_like(x).exponential_()
        return (
            x + 0.1 * noise + F.gumbel_softmax(x, hard=True) + 1e-3 * torch.randperm(WIDTH, device=x.device)
        )


class SideStream(Case):
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


class Grouped(Case):
    """Experts in one grouped product, in bf16."""

    autocast = torch.bfloat16

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


class Float8(Case):
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


class Unseen(Case):
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


class Graphed(Case):
    """A part that runs as a captured graph."""

    def __init__(self) -> None:
        super().__init__()
        self.part: Any = layers()

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x)
        return out

    def prepare(self) -> None:
        self.part = torch.cuda.make_graphed_callables(self.part, (batch().requires_grad_(),))


class Compiled(Case):
    """Attention with dropout between blocks that Inductor compiles: in bf16 it would round by the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.first.compile()
        self.last.compile()

    def middle(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.1)
        return out.transpose(1, 2).flatten(-2)


CASES: tuple[type[Case], ...] = (
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
class Run:
    """Hold what a training computed, and its peaks in bytes, without the two first steps."""

    numbers: Numbers
    peaks: Sequence[int]
    predicted: Sequence[int | None] = ()
    recomputed: int = 0


def train(make: Callable[[], Case], budget: int | None = None) -> Run:
    """Train for a few steps, planned if a budget in bytes is given.

    Raises:
        InfeasibleBudget: no plan keeps the budget.
    """
    release_memory()
    torch.manual_seed(0)
    model = make().to(DEVICE)
    model.prepare()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        ac_client.apply(model, budget / GIB, optimizer=optimizer)
    torch.manual_seed(1)
    peaks, predicted, found = list[int](), list[int | None](), dict[str, Tensor]()
    for i in range(STEPS):
        x = batch()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", model.autocast) if model.autocast is not None else nullcontext():
            loss = model(x)
        loss.backward()
        found[f"loss {i}"] = loss.detach().cpu()
        optimizer.step()
        del loss  # not earlier: a plan counts the outputs of the model until here
        torch.cuda.synchronize()  # before the memory of gradients of another stream is used again
        optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
        if budget is not None:
            predicted.append(ac_client.applied(model).report().predicted_peak_bytes)
    found |= {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    found["generator"] = torch.cuda.get_rng_state()
    recomputed = ac_client.applied(model).report().recomputed if budget is not None else 0
    del model, optimizer, x
    gc.collect()
    return Run(Numbers(found), peaks[2:], predicted[2:], recomputed)


@dataclass(frozen=True, slots=True)
class Row:
    """One model, compared. Sizes are in bytes."""

    name: str
    plain_distance: float
    distance: float
    budget: int
    peak: int
    error: int  # of predictions: the largest
    recomputed: int

    @property
    def is_wrong(self) -> bool:
        return (self.distance > 0 and self.plain_distance == 0) or self.peak > self.budget


def compare(make: type[Case]) -> Row:
    """Train a model plain, again, and planned."""
    plain, again = train(make), train(make)
    budget = TOO_LITTLE
    try:
        train(make, budget)
    except InfeasibleBudget as error:
        budget = int(ROOM * (error.smallest_found or budget))
    planned = train(make, budget)
    errors = [
        abs(peak - (predicted or 0)) for peak, predicted in zip(planned.peaks, planned.predicted, strict=True)
    ]
    return Row(
        make.__name__,
        plain.numbers.distance(again.numbers)[1],
        plain.numbers.distance(planned.numbers)[1],
        budget,
        max(planned.peaks),
        max(errors),
        planned.recomputed,
    )


HEAD = ("model", "plain differs by", "planned differs by", "recomputed", "budget", "peak", "predicted within")


def render(rows: Sequence[Row]) -> str:
    """Return the table as Markdown."""
    return markdown_table(
        HEAD,
        [
            [
                row.name,
                f"{row.plain_distance:.1e}" if row.plain_distance else "0",
                f"{row.distance:.1e}" if row.distance else "0",
                str(row.recomputed),
                *(format_bytes(size) for size in (row.budget, row.peak, row.error)),
            ]
            for row in rows
        ],
    )


def main() -> int:
    """Run the command in the module docstring; return 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models, such as 'L*'")
    add_out_argument(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu_kernels needs a GPU: torch found none", file=sys.stderr)
        return 2
    rows, failed = list[Row](), 0
    for make in CASES:
        if not fnmatchcase(make.__name__, options.only):
            continue
        try:
            rows.append(compare(make))
        except (RuntimeError, ImportError) as error:
            failed += 1
            print(f"{make.__name__}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    write_result(render(rows), options.out)
    return int(bool(failed) or any(row.is_wrong for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
