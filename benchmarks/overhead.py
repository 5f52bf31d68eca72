"""Measure what recording and replaying cost: `python -m benchmarks.overhead [--rounds N]`.

Ops on a few numbers, where all the time is that of Python and the dispatcher. All ways of running take turns
within each round, in one process, by the CPU time of the thread; medians of the rounds are printed.
torch_remat takes part where it is installed. The last line is what recording adds to an op between kernels
that evict the caches (`ac_client/measure/report.py` states it). Exit with 1 if we add more than torch's
selective checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.torch_facts import private
from benchmarks.results import markdown_table

OPS = 400
Function = Callable[[Tensor], Tensor]
Run = Callable[[Function, Tensor], Tensor]


def recorded(function: Function, x: Tensor) -> Tensor:
    with save_recompute_policy("recompute_all"):
        return function(x)


def selective(function: Function, x: Tensor) -> Tensor:
    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, decide)
    out: Tensor = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    return out


def remat(function: Function, x: Tensor) -> Tensor:
    out: Tensor = import_module("torch_remat").checkpoint(region_name="all")(function)(x)
    return out


RECORDED, SELECTIVE = "ours, each op recorded", "torch selective, recompute"
RERUNS = "torch_remat" if find_spec("torch_remat") else "torch checkpoint"  # ours is compared with
WAYS: dict[str, Run] = {
    "plain": lambda function, x: function(x),
    "torch checkpoint": partial(checkpoint, use_reentrant=False),
    SELECTIVE: selective,
    RECORDED: recorded,
}
if RERUNS not in WAYS:
    WAYS[RERUNS] = remat


def chain(x: Tensor) -> Tensor:
    """Run ops of which autograd packs one tensor."""
    for _ in range(OPS // 2):
        x = x.sin().tanh()
    return x


def product(x: Tensor) -> Tensor:
    """Run ops of which autograd packs both inputs."""
    y = x
    for _ in range(OPS):
        y = y * x
    return y


def sums(x: Tensor) -> Tensor:
    """Run ops of which autograd packs one tensor in four."""
    for _ in range(OPS // 4):
        x = (x + x + x + x).sin()
    return x


class Block(nn.Module):
    """A block of a transformer, with attention in single ops."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, 4))
        q, k, v = y.permute(1, 2, 0, 3).unbind()
        x = x + self.out(((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1).flatten(1))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


FUNCTIONS: dict[str, Function] = {
    "chain": chain,
    "product": product,
    "sums": sums,
    "blocks": nn.Sequential(*(Block() for _ in range(12))),
}


class OpCount(TorchDispatchMode):
    """Count ops, views included."""

    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


Halves = tuple[float, float]  # microseconds of an op in forward, and in backward


def step_us(run: Run, function: Function) -> Halves:
    """Return the microseconds of a step."""
    x = torch.randn(8, 8, requires_grad=True)
    began = time.thread_time()
    y = run(function, x)
    ran = time.thread_time()
    y.sum().backward()
    return (ran - began) * 1e6, (time.thread_time() - ran) * 1e6


def added_us(function: Function, rounds: int) -> dict[str, list[Halves]]:
    """Return what each way adds to plain in each round, in microseconds of an op."""
    with OpCount() as count:  # type: ignore[no-untyped-call]
        function(torch.randn(8, 8))
    added: dict[str, list[Halves]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        taken = {way: step_us(run, function) for way, run in WAYS.items()}
        plain = taken["plain"]
        for way, us in taken.items():
            added[way].append(((us[0] - plain[0]) / count.ops, (us[1] - plain[1]) / count.ops))
    return added


EVICTED_BY = 4 << 20  # numbers read and written between two ops: more than the caches of a core hold


def recording_us(repeats: int) -> float:
    """Return the time that recording adds to an op in forward, in microseconds of this thread's CPU time.

    Before each op, another kernel touches more memory than the caches hold, as the kernels of a training step
    do. The code and data of a dispatch mode then come from main memory, which takes several times as long as
    in a tight loop.
    """
    numbers = torch.ones(EVICTED_BY)
    target = torch.empty_like(numbers)
    tiny = torch.ones(8, requires_grad=True)

    def tiny_op_us() -> float:
        unseen = private.DisableTorchDispatch()
        torch.mul(numbers, 2.0, out=target)
        del unseen
        began = time.thread_time_ns()
        tiny.tanh()
        return (time.thread_time_ns() - began) / 1e3

    plain, recorded = [], []
    for _ in range(repeats):
        plain.append(tiny_op_us())
        with save_recompute_policy("recompute_all"):
            first = tiny.tanh()  # the first op of a region takes longer
            recorded.append(tiny_op_us())
        first.backward(numbers[:8])  # until a backward has run, recording compares contents as well
    return statistics.median(recorded) - statistics.median(plain)


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {way: [way] for way in WAYS if way != "plain"}
    shares, replayed = [], [f"replayed, of {RERUNS}'s"]
    for function in FUNCTIONS.values():
        added_us(function, 2)
        added = added_us(function, options.rounds)
        median = {
            way: [statistics.median(half) for half in zip(*us, strict=True)] for way, us in added.items()
        }
        for way, row in rows.items():
            row.append("{:.1f} + {:.1f}".format(*median[way]))
        shares.append(sum(median[RECORDED]) / sum(median[SELECTIVE]))
        ratios = [ours[1] / theirs[1] for ours, theirs in zip(added[RECORDED], added[RERUNS], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        replayed.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    print(markdown_table(["us added to an op", *FUNCTIONS], [*rows.values(), replayed]))
    print(f"\none recorded op, caches evicted: {recording_us(options.rounds):.0f} us in forward")
    return int(any(share > 1 for share in shares))


if __name__ == "__main__":
    raise SystemExit(main())
