"""Predicted recompute time beside the extra time that planned steps really take -> docs/recompute-time.md.

    python -m benchmarks.recompute_time [--only GPT-2] [--pairs 9]

Models of midsize.py whose step takes a second or more, each planned at several budgets from one profile.
Plain and planned steps take turns, the order changing with each pair; the median of the differences is
quoted. Steps run on one thread and are timed by that thread's own CPU time, which other processes on the
machine do not add to; so is the profile. Each model runs in a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ac_client
from ac_client.console import write_whole
from autoac.planner import bounds, build, floor, plan
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks import midsize
from benchmarks.peak import alone

TABLE = Path(__file__).parents[1] / "docs" / "recompute-time.md"

MODELS = ("GPT-2", "BERT", "T5", "U-Net")
BUDGETS = (0.05, 0.3)
"""Where budgets are between the smallest peak that was found and the plain step's."""

PAIRS = 9


@dataclass(frozen=True, slots=True)
class Row:
    """A model at a budget. Times in seconds."""

    model: str
    budget: int  # bytes
    recomputed: int  # ops
    plain_s: float  # a plain step
    predicted_s: float  # to recompute
    extra_s: Sequence[float]  # that a planned step took beside a plain one, of each pair

    @property
    def measured_s(self) -> float:
        return statistics.median(self.extra_s)

    @property
    def error_s(self) -> float:
        """How far the median may be off by chance: its standard error, from the spread about it."""
        spread = statistics.median(abs(extra - self.measured_s) for extra in self.extra_s)
        return float(1.858 * spread / len(self.extra_s) ** 0.5)

    @property
    def off(self) -> float:
        """How far the prediction is above what was measured, as a part of that."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else float("inf")


def rows(model: str, pairs: int) -> list[Row]:
    """Profile, plan and measure; run it in a process of its own."""
    torch.set_num_threads(1)
    plain, batch = midsize.made(model)
    seconds(plain, batch)
    found = profile(plain, **batch)
    graph = build(found)
    smallest, ceiling = floor(found, gap=0.3, time_limit_s=15).found, bounds(graph).ceiling
    made = []
    for part in BUDGETS:
        budget = int(smallest + (ceiling - smallest) * part)
        decided = plan(found, budget_bytes=budget, time_limit_s=15)
        planned, _ = midsize.made(model)
        ac_client.apply(planned, policy=decided.policy())
        extra, steps = paired(plain, planned, batch, pairs)
        again = sum(what == "recompute" for what in decided.policy().decisions.values())
        made.append(Row(model, budget, again, steps, decided.recompute_us / 1e6, extra))
    return made


def paired(
    plain: nn.Module, planned: nn.Module, batch: dict[str, Any], pairs: int
) -> tuple[list[float], float]:
    """What a planned step took beside a plain one in each pair, and the median plain step."""
    for _ in range(2):
        seconds(planned, batch)
    extra, steps = [], []
    for i in range(pairs):
        took = {}
        for model in (plain, planned) if i % 2 else (planned, plain):
            took[model] = seconds(model, batch)
        extra.append(took[planned] - took[plain])
        steps.append(took[plain])
    return extra, statistics.median(steps)


def seconds(model: nn.Module, batch: dict[str, Any]) -> float:
    """What a step takes, of this thread's time."""
    torch.manual_seed(0)
    began = time.thread_time()
    out = model(**batch)
    (out["loss"] if isinstance(out, dict) else out.loss).backward()
    del out
    return time.thread_time() - began


def render(found: Sequence[Row]) -> str:
    """The page."""
    close = sum(abs(row.off) <= 0.15 for row in found)
    lines = [
        "# Predicted and measured recompute time",
        "",
        "Made by `make bench-profile`, not by hand; docs/profiling.md says how ops are timed.",
        "",
        f"torch {torch.__version__}, one thread, in its CPU time. {close} of {len(found)} within 15 %. Extra "
        "time is the median over pairs of a plain and a planned step; ± is its standard error.",
        "",
        "| model | budget | recomputed ops | plain step, ms | predicted extra, ms | measured extra, ms "
        "| ± ms | predicted is off by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        lines.append(
            f"| {row.model} | {format_bytes(row.budget)} | {row.recomputed} | {row.plain_s * 1e3:.0f} "
            f"| {row.predicted_s * 1e3:.0f} | {row.measured_s * 1e3:.0f} | {row.error_s * 1e3:.0f} "
            f"| {row.off:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=MODELS, help="may be given again")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--out", type=Path, default=TABLE, help="the page, written if all models were run")
    given = parser.parse_args()
    found: list[Row] = []
    for model in given.only or MODELS:
        found += alone(rows, model, given.pairs)
        print(render(found).splitlines()[-1], file=sys.stderr, flush=True)
    if given.only:
        print(render(found))
    else:
        write_whole(given.out, render(found))


if __name__ == "__main__":
    main()
