"""Compare what `fit` says of micro-batches with measured steps on the CPU.

    python -m benchmarks.splitting [--only PATTERN] [--out FILE]

A step takes up to eight samples, at budgets between its smallest peak and that with nothing recomputed. Two
ways of the step at the size of `fit` take turns, both planned for the budget: in one batch, and in as many
micro-batches as `fit` advises, or in the fewest where it advises none. Times are CPU times, in medians.

Exit with 1 if the advised way is slower by more than 2 %.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import ac_client
from autoac.planner import bounds
from autoac.planner import build as graph_of
from autoac.planner.units import GIB
from autoac.profiler import observe
from benchmarks.fit import resized
from benchmarks.models import medium
from benchmarks.models.batches import Batch, ModelAndBatch
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.steps import keep_freed_memory, loss_of, rotated

MODELS = ("GPT-2", "Llama", "ViT", "U-Net")
SHARES = (0.25, 0.5, 0.75)  # of the way to the peak with nothing recomputed
MOST = 8  # samples
WARM, ROUNDS = 4, 7
NEAR = 0.02


def build(name: str, size: int) -> ModelAndBatch:
    torch.manual_seed(0)
    model, batch = medium.MODELS[name]()
    return model.train(), resized(batch, size)


class Steps:
    """Planned steps over the same samples, in one or several micro-batches, while another model exists."""

    def __init__(self, name: str, size: int, count: int, budget: int) -> None:
        self.model: nn.Module
        self.model, self._part = build(name, size // count)
        self._count = count
        other = 2 * sum(parameter.nbytes for parameter in self.model.parameters())  # and its gradients
        ac_client.apply(self.model, (budget + other) / GIB)

    def seconds(self) -> float:
        """Return the CPU time of a step."""
        self.model.zero_grad()
        batches: list[Batch] = [self._part] * self._count
        began = time.thread_time()
        for batch in batches:
            loss_of(self.model(**batch)).backward()
        return time.thread_time() - began


@dataclass(frozen=True, slots=True)
class Row:
    """One budget of one model."""

    name: str
    share: float
    size: int
    recomputed: int  # ops, in one batch
    count: int  # of micro-batches
    is_advised: bool  # to split
    predicted: float  # time of the split step / that of one batch; 0.0 if no split was advised
    measured: float

    @property
    def is_right(self) -> bool:
        return abs(self.measured - 1) < NEAR or self.is_advised == (self.measured < 1)


def measure(case: str) -> Row:
    """Return the row of a model and a share."""
    name, share = case.rsplit(" ", 1)
    model, batch = build(name, MOST)
    limits = bounds(graph_of(observe(model, (), batch)))
    budget = int(limits.floor + float(share) * (limits.ceiling - limits.floor))
    found = ac_client.fit(partial(build, name), budget / GIB, most=MOST, accumulates=False)
    size, split = found.largest, found.split
    row = found.row(size)
    count = split.count if split is not None else next(n for n in range(2, size + 1) if size % n == 0)
    ways = [Steps(name, size, 1, budget), Steps(name, size, count, budget)]
    for way in ways:
        for _ in range(WARM):
            way.seconds()
    taken: dict[Steps, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS):
        for way in rotated(ways, number):
            taken[way].append(way.seconds())
    one_s, split_s = (statistics.median(taken[way]) for way in ways)
    predicted = split.share if split is not None else 0.0
    recomputed = len(row.plan.recompute_set)
    return Row(name, float(share), size, recomputed, count, split is not None, predicted, split_s / one_s)


HEAD = ("model", "budget", "samples", "ops again", "ways", "fit: split / one", "measured", "")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        row.name,
        f"+{row.share:.0%}",
        str(row.size),
        str(row.recomputed),
        f"1 x {row.size}, {row.count} x {row.size // row.count}",
        f"{row.predicted:.3f}" if row.is_advised else "one batch",
        f"{row.measured:.3f}",
        "" if row.is_right else "wrong",
    )


def main() -> int:
    """Measure all rows and print the table."""
    options = bench_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    cases = [f"{name} {share}" for name in MODELS for share in SHARES]
    rows = shown(map(measure, chosen(cases, options.only)), cells)
    write_result(markdown_table(HEAD, map(cells, rows)), options.out)
    return int(not all(row.is_right for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
