"""Compare predicted and measured peaks of compiled models, and their gradients with those without a plan.

For each model of the zoo, budgets are taken at shares of the way from the smallest peak to the peak that
saves everything. The bytes are exact for a backend that runs the ops of the joint graph one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

import ac_client
from autoac.planner import find_minimum_peak, plan
from autoac.profiler import profile
from benchmarks.models.tiny import ZOO, ZooModel
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.steps import Trainee

SHARES = (0.75, 0.5, 0.25)
STEPS = 2  # whose results are compared: the first is observed, the second planned
HEAD = ("model", "share", "budget", "predicted", "measured", "difference", "ops again", "same results")


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
    want = _results(_compiled(entry, backend))
    unplanned = _compiled(entry, backend)
    found = profile(unplanned.call, **unplanned.batch)  # type: ignore[arg-type]
    lowest, highest = find_minimum_peak(found, time_limit_s=30).found, plan(found, budget_gb=1024).peak
    for share in shares:
        budget = int(lowest + share * (highest - lowest))
        trainee = _compiled(entry, backend)
        ac_client.apply(trainee.call, budget / 2**30)  # type: ignore[type-var]
        same = all(map(torch.equal, _results(trainee), want))
        handle = ac_client.applied(trainee.model)
        predicted = handle.policy.predicted  # type: ignore[union-attr]
        peak = trainee.peak() + predicted.static_bytes
        recomputed = handle.report().recomputed
        yield ComparedPeak(entry.name, share, budget, predicted.peak_bytes, peak, recomputed, same)


def _compiled(entry: ZooModel, backend: str) -> Trainee:
    torch.manual_seed(0)
    model = entry.make().train()
    return Trainee(model, entry.batch(), torch.compile(model, backend=backend))


def _results(trainee: Trainee) -> list[Tensor]:
    results = []
    for _ in range(STEPS):
        trainee.step()
        results += [*trainee.gradients(), *(buffer.clone() for buffer in trainee.model.buffers())]
    return results


def _cells(row: ComparedPeak) -> tuple[str, ...]:
    sizes = (row.budget, row.predicted, row.measured, row.measured - row.predicted)
    same = "yes" if row.same_results else "NO"
    return row.model, f"{row.share:.0%}", *(f"{size:,}" for size in sizes), str(row.recomputed), same


def main() -> None:
    """Compare the models that are named, or all."""
    parser = bench_parser(__doc__)
    parser.add_argument("--backend", default="aot_eager")
    options = parser.parse_args()
    torch.set_num_threads(1)
    zoo = {entry.name: entry for entry in ZOO}
    compared = (compare(zoo[name], backend=options.backend) for name in chosen(zoo, options.only))
    rows = shown(chain.from_iterable(compared), _cells)
    write_result(markdown_table(HEAD, map(_cells, rows)), options.out)


if __name__ == "__main__":
    main()
