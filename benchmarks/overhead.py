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


def us_per_op(run: Run, function: Function) -> float:
    """Return the microseconds of an op, forward and backward."""
    x = torch.randn(8, requires_grad=True)
    began = time.thread_time()
    run(function, x).sum().backward()
    return (time.thread_time() - began) / OPS * 1e6


def added_us(function: Function, rounds: int) -> dict[str, float]:
    """Return what each way adds to plain, in microseconds of an op."""
    taken = [{way: us_per_op(run, function) for way, run in WAYS.items()} for _ in range(rounds)]
    least = {way: min(one[way] for one in taken) for way in WAYS}
    return {way: us - least["plain"] for way, us in least.items() if way != "plain"}


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    us = [added_us(function, options.rounds) for function in (chain, product)]
    rows = [
        [way, *(f"{each[way]:.1f}" for each in us), *(f"{each[way] / each[SELECTIVE]:.2f}" for each in us)]
        for way in us[0]
    ]
    head = ["us added to an op", "chain", "product", "/ selective: chain", "product"]
    print(markdown_table(head, rows))
    return int(any(each[RECORDED] > each[SELECTIVE] for each in us))


if __name__ == "__main__":
    raise SystemExit(main())
