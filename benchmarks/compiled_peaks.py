"""Compare predicted and measured peaks of compiled models, and their gradients with those without a plan.

For each model of the zoo, budgets are taken at shares of the way from the smallest peak to the peak that
saves everything. The bytes are exact for a backend that runs the ops of the joint graph one by one.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import find_minimum_peak, plan
from autoac.profiler import profile
from autoac.tape.capture.allocations import AllocationRecord
from benchmarks.models.batches import Batch
from benchmarks.models.tiny import ZOO, ZooModel

SHARES = (0.75, 0.5, 0.25)
STEPS = 2  # whose results are compared: the first is observed, the second planned


@dataclass(frozen=True, slots=True)
class ComparedPeak:
    """One model under one budget."""

    model: str
    share: float
    budget: int
    predicted: int
    measured: int
    recomputed: int  # ops
    same_results: bool  # gradients and buffers equal those without a plan, bit for bit


def compare(
    entry: ZooModel, shares: Sequence[float] = SHARES, backend: str = "aot_eager"
) -> Iterator[ComparedPeak]:
    """Yield the comparison of `entry` at each share of the way from its smallest to its largest peak."""
    torch.compiler.reset()
    batch = entry.batch()
    want = _results(_made(entry), backend, batch)
    unplanned: Any = torch.compile(_made(entry), backend=backend)
    found = profile(unplanned, **batch)
    lowest, highest = find_minimum_peak(found, time_limit_s=30).found, plan(found, budget_gb=1024).peak
    for share in shares:
        budget = int(lowest + share * (highest - lowest))
        model = _made(entry)
        compiled: Any = torch.compile(model, backend=backend)
        ac_client.apply(compiled, budget / 2**30)
        same = all(map(torch.equal, _results(model, backend, batch, compiled), want))
        handle = ac_client.applied(model)
        predicted = handle.policy.predicted  # type: ignore[union-attr]
        model.zero_grad()
        gc.collect()
        with AllocationRecord(torch.device("cpu")) as record:
            _step(compiled, batch)
        measured = max(accumulate(change.nbytes for change in record.changes)) + predicted.static_bytes
        recomputed = handle.report().recomputed
        yield ComparedPeak(entry.name, share, budget, predicted.peak_bytes, measured, recomputed, same)


def _made(entry: ZooModel) -> nn.Module:
    torch.manual_seed(0)
    return entry.make().train()


def _results(
    model: nn.Module, backend: str, batch: Batch, compiled: Callable[..., Any] | None = None
) -> list[Tensor]:
    call = torch.compile(model, backend=backend) if compiled is None else compiled
    results = []
    for _ in range(STEPS):
        model.zero_grad()
        _step(call, batch)
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results += [buffer.clone() for buffer in model.buffers()]
    return results


def _step(call: Callable[..., Any], batch: Batch) -> None:
    torch.manual_seed(1)
    for value in batch.values():
        if isinstance(value, Tensor):
            value.grad = None
    out = call(**batch)
    (out if isinstance(out, Tensor) else out["loss"]).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("models", nargs="*", help="names, or parts of them; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | share | budget | predicted | measured | difference | ops again | same results |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for entry in ZOO:
        if options.models and not any(name in entry.name for name in options.models):
            continue
        for row in compare(entry, backend=options.backend):
            difference, same = row.measured - row.predicted, "yes" if row.same_results else "NO"
            print(
                f"| {row.model} | {row.share:.0%} | {row.budget:,} | {row.predicted:,} | {row.measured:,} "
                f"| {difference:,} | {row.recomputed} | {same} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
