"""Measure what recording costs: `python -m benchmarks.overhead [--rounds N]`.

Ops on eight numbers, where all the time is that of Python and the dispatcher. All ways of running take turns
within each round, in one process, by the CPU time of the thread; the least of the rounds is printed.
Exit with 1 if recording adds more than torch's selective checkpoint.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoac.tape.runtime.policy_context import save_recompute_policy
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


RECORDED, SELECTIVE = "ours, each op recorded", "torch selective, recompute"
WAYS: dict[str, Run] = {
    "plain": lambda function, x: function(x),
    "torch checkpoint": partial(checkpoint, use_reentrant=False),
    SELECTIVE: selective,
    RECORDED: recorded,
}


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


Halves = tuple[float, float]  # microseconds of an op in forward, and in backward


def us_per_op(run: Run, function: Function) -> Halves:
    """Return the microseconds of an op."""
    x = torch.randn(8, requires_grad=True)
    began = time.thread_time()
    y = run(function, x)
    ran = time.thread_time()
    y.sum().backward()
    return (ran - began) / OPS * 1e6, (time.thread_time() - ran) / OPS * 1e6


def added_us(function: Function, rounds: int) -> dict[str, Halves]:
    """Return what each way adds to plain, in microseconds of an op."""
    taken = [{way: us_per_op(run, function) for way, run in WAYS.items()} for _ in range(rounds)]
    least = {way: tuple(min(one[way][half] for one in taken) for half in (0, 1)) for way in WAYS}
    before, after = least["plain"]
    return {way: (us[0] - before, us[1] - after) for way, us in least.items() if way != "plain"}


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    us = [added_us(function, options.rounds) for function in (chain, product)]
    shares = {way: [sum(each[way]) / sum(each[SELECTIVE]) for each in us] for way in us[0]}
    rows = [
        [
            way,
            *(f"{each[way][0]:.1f} + {each[way][1]:.1f}" for each in us),
            ", ".join(f"{share:.2f}" for share in shares[way]),
        ]
        for way in us[0]
    ]
    print(markdown_table(["us added to an op", "chain", "product", "of selective's"], rows))
    return int(any(share > 1 for share in shares[RECORDED]))


if __name__ == "__main__":
    raise SystemExit(main())
