"""Compare random nestings of `checkpoint` with torch's: gradients bit for bit, peak at most torch's.

    make bench-nested

A nesting is a tree of checkpoints, up to four deep, some of them selective, around blocks of attention,
convolutions, dropout, in-place writes and the like. It runs plainly, under torch's checkpoint and under ours,
and the allocator's record has the peak of each step.

Ops whose results decide are left out: ours saves them, and torch runs them again (docs/semantics.md).
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from programs import same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import CheckpointPolicy as P
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from benchmarks.models.modules import Block
from fuzzers.random_programs import run_programs

BATCH, LENGTH, WIDTH, DEPTH = 2, 32, 32, 4

Checkpoint = Callable[..., Any]
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
DECISIONS = [P.MUST_SAVE, P.PREFER_SAVE, P.PREFER_RECOMPUTE, P.PREFER_RECOMPUTE]


# torch's cache then returns what a layer has written since; only the peak of its step counts here.
selective = functools.partial(
    functools.partial, create_selective_checkpoint_contexts, allow_cache_entry_mutation=True
)


class Layer(nn.Module):
    """One of several short functions of a [batch, length, width] tensor; most take two dimensions, too."""

    KINDS = 12

    def __init__(self, kind: int, width: int = WIDTH) -> None:
        super().__init__()
        self.kind = kind
        match kind:
            case 0:
                self.block = Block(WIDTH, 4, dropout=0.1)
            case 1 | 5 | 8:
                self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
                self.norm = nn.LayerNorm(width)
            case 6:
                self.conv, self.batch_norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)
            case _:
                self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        match self.kind:
            case 0:
                return self.block(x)
            case 1:
                return x + self.narrow(F.gelu(self.wide(self.norm(x))))
            case 2:
                return F.dropout(self.linear(x), 0.2)
            case 3:
                return self.linear(x).relu_()
            case 4:
                return x.sin().exp().tanh()
            case 5:
                return (self.wide(x).unflatten(-1, (3, -1)).softmax(-2) * x.unsqueeze(-2)).sum(-2)
            case 6:
                return F.relu(self.batch_norm(self.conv(x.transpose(1, 2))), inplace=True).transpose(1, 2)
            case 7:
                filled = torch.zeros_like(x)
                filled[..., ::2, :].copy_(self.linear(x[..., ::2, :]))
                return filled * x
            case 8:
                a, b = self.norm(x).chunk(2, dim=-1)
                return torch.cat([a * b.sigmoid(), b], dim=-1)
            case 9:
                return x * torch.rand_like(x)
            case 10:
                y = self.linear(x)
                y += x
                return F.silu(y)
            case _:
                return x.cumsum(-2).mul(0.1).add_(x).clamp(-2.0, 2.0)


@dataclass(frozen=True)
class Call:
    """A checkpoint around layers and other checkpoints."""

    parts: tuple[Call | Layer, ...]
    context_fn: Callable[[], Any] | None  # of a selective checkpoint
    skip: str  # how it gets an earlier tensor of the code around it: "no", "argument" or "closure"

    @property
    def depth(self) -> int:
        return 1 + max((part.depth for part in self.parts if isinstance(part, Call)), default=0)

    def run(self, how: Checkpoint, x: Tensor, earlier: Tensor) -> Tensor:
        options = {} if self.context_fn is None else {"context_fn": self.context_fn}
        y: Tensor
        if self.skip == "argument":
            y = how(lambda t, s: 0.5 * (run(self.parts, how, t) + s), x, earlier, **options)
        elif self.skip == "closure":
            y = how(lambda t: run(self.parts, how, t) * earlier.tanh(), x, **options)
        else:
            y = how(lambda t: run(self.parts, how, t), x, **options)
        return y


def run(parts: tuple[Call | Layer, ...], how: Checkpoint, x: Tensor) -> Tensor:
    """Run `parts` in sequence, each checkpoint by `how`."""
    earlier = x
    for part in parts:
        before = x
        x = part(x) if isinstance(part, Layer) else part.run(how, x, earlier)
        earlier = before
    return x


def nesting(seed: int) -> tuple[Call | Layer, ...]:
    """Return the nesting of a seed."""
    chance = random.Random(seed)
    torch.manual_seed(seed)

    def parts(depth: int, least: int) -> tuple[Call | Layer, ...]:
        return tuple(
            call(depth - 1) if depth > 0 and chance.random() < 0.6 else Layer(chance.randrange(Layer.KINDS))
            for _ in range(chance.randint(least, 3))
        )

    def call(depth: int) -> Call:
        skip = chance.choice(["no", "no", "argument", "closure"])
        return Call(parts(depth, 1), contexts() if chance.random() < 0.25 else None, skip)

    def contexts() -> Callable[[], Any]:
        if chance.random() < 0.5:
            return selective(MATMULS)
        drawn = chance.randrange(1 << 30)

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> P:
            if op in MATMULS or "attention" in str(op):
                return random.Random(f"{drawn} {op}").choice(DECISIONS)
            return P.PREFER_RECOMPUTE

        return selective(policy)

    return (call(DEPTH - 1), *parts(DEPTH, 0))


def depth_of(parts: tuple[Call | Layer, ...]) -> int:
    """Return how many checkpoints are around the innermost layer."""
    return max(part.depth for part in parts if isinstance(part, Call))


def step(parts: tuple[Call | Layer, ...], how: Checkpoint) -> tuple[list[Tensor], int]:
    """Return the gradients of one step, and the allocator's peak since forward."""
    torch.manual_seed(7)
    batch = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with AllocatorTimeline() as timeline:
        run(parts, how, batch).square().mean().backward()
    leaves = [batch, *(p for layer in layers(parts) for p in layer.parameters())]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    return gradients, timeline.peak_bytes


def layers(parts: tuple[Call | Layer, ...]) -> list[Layer]:
    """Return the layers of `parts`, in order."""
    return [x for part in parts for x in ([part] if isinstance(part, Layer) else layers(part.parts))]


@dataclass(frozen=True)
class Compared:
    """One nesting, run in three ways."""

    seed: int
    depth: int
    selective: bool
    torch_bytes: int
    our_bytes: int
    refused: str  # torch's error, if it raises one
    same_gradients: bool

    @property
    def differs(self) -> str:
        if self.refused or (self.same_gradients and self.our_bytes <= self.torch_bytes):
            return ""
        return "peak" if self.same_gradients else "gradients"


def has_selective(parts: tuple[Call | Layer, ...]) -> bool:
    """Return True if one of the checkpoints is selective."""
    calls = [part for part in parts if isinstance(part, Call)]
    return any(call.context_fn is not None or has_selective(call.parts) for call in calls)


def compare(seed: int) -> Compared:
    """Run the nesting of `seed` plainly, under torch's checkpoint and under ours."""
    parts = nesting(seed)
    theirs: Checkpoint = functools.partial(torchs.checkpoint, use_reentrant=False)

    def plainly(function: Callable[..., Any], *args: Any, context_fn: Any = None) -> Any:
        return function(*args)

    want, _ = step(parts, plainly)
    refused, torch_bytes = "", 0
    try:
        _, torch_bytes = step(parts, theirs)
    except RuntimeError as error:
        refused = str(error).splitlines()[0]
    got, our_bytes = step(parts, ac_client.checkpoint)
    equal = len(got) == len(want) and all(map(same, got, want))
    return Compared(seed, depth_of(parts), has_selective(parts), torch_bytes, our_bytes, refused, equal)


def summary(found: Sequence[Compared]) -> str:
    """Return the ratios of peaks, and what torch refuses, as text."""
    ran = [one for one in found if not one.refused]
    lines = []
    for depth in range(1, DEPTH + 1):
        ratios = [one.our_bytes / one.torch_bytes for one in ran if one.depth == depth]
        if ratios:
            median, most = statistics.median(ratios), max(ratios)
            lines.append(
                f"depth {depth}: {len(ratios)}, our peak / torch's: median {median:.3f}, most {most:.3f}"
            )
    refused = sorted({one.refused for one in found} - {""})
    lines.append(f"{sum(one.selective for one in ran)} of {len(ran)} have selective checkpoints")
    return "\n".join([*lines, f"{len(found) - len(ran)} more are refused by torch: {refused}"])


if __name__ == "__main__":
    run_programs(__doc__, compare, summary)
