"""Predicted recompute time beside the extra time that planned steps really take -> docs/recompute-time.md.

    python -m benchmarks.recompute_time [--only GPT-2] [--rounds 60]

Models of medium.py whose step takes a second or more, each planned at several budgets from one profile.
Rounds go on until what is measured is known to 5 % (`CLOSE_ENOUGH`), or there were as many as asked for. In
each round there is a profile, a plain step and a planned one for each budget, in an order that changes: a
shared machine's speed moves by a quarter within minutes, and the profile's times move with it. So what is
predicted is the median of what the rounds' profiles say of the one plan, and what is measured the median of
the differences within rounds. What recording adds is predicted too, as the model's report does, from its
cost for an op in each round (ac_client/measure/recording_overhead.py). Steps run on one thread and are
timed by that thread's own CPU time, which other processes on the machine do not add to; so is the profile.
Each model runs in a process of its own, which gives no memory back to the kernel (`keep_memory`).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ac_client
from ac_client.files import write_whole
from ac_client.measure.recording_overhead import recording_us
from autoac.planner import Plan, Profile, bounds, build, find_minimum_peak, plan
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks.models import medium
from benchmarks.peak import alone

TABLE = Path(__file__).parents[1] / "docs" / "recompute-time.md"

MODELS = ("GPT-2", "BERT", "T5", "U-Net")
BUDGETS = (0.05, 0.3)
"""Where budgets are between the smallest peak that was found and the plain step's."""

CLOSE = 0.15
FEWEST_ROUNDS, MOST_ROUNDS = 15, 60
CLOSE_ENOUGH = 0.05
"""The standard error of what is measured, as a part of it, from which on no more rounds are wanted."""


@dataclass(slots=True)
class Row:
    """A model at a budget, and what each round adds. Times in seconds."""

    model: str
    budget: int  # bytes
    recomputed: int  # ops
    plain_s: list[float] = field(default_factory=list)  # a plain step
    predicted_s: list[float] = field(default_factory=list)  # to recompute
    recording_s: list[float] = field(default_factory=list)  # predicted, in forward
    forward_s: list[float] = field(default_factory=list)  # that a planned forward took beside a plain one
    backward_s: list[float] = field(default_factory=list)

    @property
    def both_s(self) -> list[float]:
        """Predicted, recording and recompute."""
        return [sum(both) for both in zip(self.predicted_s, self.recording_s, strict=True)]

    @property
    def extra_s(self) -> list[float]:
        """What the whole step took beside a plain one."""
        return [sum(both) for both in zip(self.forward_s, self.backward_s, strict=True)]

    @property
    def known(self) -> bool:
        """Whether more rounds would tell little more."""
        return all(
            error(values) <= CLOSE_ENOUGH * statistics.median(values)
            for values in (self.extra_s, self.backward_s)
        )

    @property
    def off_backward(self) -> float:
        """How far predicted recompute is above the extra time of backward, as a part of that."""
        return _off(self.predicted_s, self.backward_s)

    @property
    def off(self) -> float:
        """The same of recompute and recording, and the whole step."""
        return _off(self.both_s, self.extra_s)


def _off(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    measured = statistics.median(measured_s)
    return statistics.median(predicted_s) / measured - 1 if measured else float("inf")


def error(values: Sequence[float]) -> float:
    """How far the median may be off by chance: its standard error, from the spread about it."""
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values)
    return float(1.858 * spread / len(values) ** 0.5)


def rows(model: str, most: int) -> list[Row]:
    """Profile, plan and measure; run it in a process of its own."""
    keep_memory()
    torch.set_num_threads(1)
    plain, batch = medium.build(model)
    halves(plain, batch)
    found = profile(plain, **batch)
    plans = planned(found)
    models = []
    for decided in plans:
        one, _ = medium.build(model)
        ac_client.apply(one, policy=decided.policy())
        models.append(one)
    return rounds(model, plain, models, batch, plans, most)


def keep_memory() -> None:
    """Let the C library keep what is freed, as the caching allocator of a GPU does; glibc alone can be told.

    Else it gives the end of the heap back when a step ends, and the kernel hands it out again page by page,
    emptied: up to a tenth of a plain step. Which steps it hits depends on what happens to lie at the end of
    the heap. A planned step has less to give back, so recomputing would seem to take less than it does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_MAX, 0)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def planned(found: Profile) -> list[Plan]:
    """A plan for each of `BUDGETS`."""
    smallest, ceiling = find_minimum_peak(found, gap=0.3, time_limit_s=15).found, bounds(build(found)).ceiling
    return [
        plan(found, budget_bytes=int(smallest + (ceiling - smallest) * part), time_limit_s=15)
        for part in BUDGETS
    ]


def rounds(
    name: str,
    plain: nn.Module,
    models: Sequence[nn.Module],
    batch: Mapping[str, Any],
    plans: Sequence[Plan],
    most: int,
) -> list[Row]:
    """What each plan was said to take, and what it took, in up to `most` rounds."""
    for model in [*models, *models, plain]:
        halves(model, batch)
    recorded = [ac_client.applied(model).report().recorded for model in models]
    found = [Row(name, p.budget, len(p.recompute_set)) for p in plans]
    turns = [plain, *models]
    for i in range(most):
        if i >= FEWEST_ROUNDS and all(row.known for row in found):
            break
        graph = build(profile(plain, **batch))
        recording_s = recording_us() / 1e6
        first = i % len(turns)
        taken = {model: halves(model, batch) for model in turns[first:] + turns[:first]}
        forward_s, backward_s = taken[plain]
        for row, decided, ops, model in zip(found, plans, recorded, models, strict=True):
            row.plain_s.append(forward_s + backward_s)
            row.predicted_s.append(recompute_us(graph, decided.save_set) / 1e6)
            row.recording_s.append(recording_s * ops)
            row.forward_s.append(taken[model][0] - forward_s)
            row.backward_s.append(taken[model][1] - backward_s)
    return found


def seconds(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """What a step takes, of this thread's time."""
    return sum(halves(model, batch))


def halves(model: nn.Module, batch: Mapping[str, Any]) -> tuple[float, float]:
    """What forward and backward of a step take, of this thread's time."""
    torch.manual_seed(0)
    began = time.thread_time()
    out = model(**batch)
    between = time.thread_time()
    (out["loss"] if isinstance(out, dict) else out.loss).backward()
    del out
    return between - began, time.thread_time() - between


def render(found: Sequence[Row]) -> str:
    """The page."""
    in_backward = sum(abs(row.off_backward) <= CLOSE for row in found)
    whole = sum(abs(row.off) <= CLOSE for row in found)
    lines = [
        "# Predicted and measured recompute time",
        "",
        "Made by `make bench-profile`, not by hand; docs/profiling.md says how ops are timed and what the "
        "figures mean.",
        "",
        f"torch {torch.__version__}, one thread, in its CPU time; medians over rounds of a profile, a plain "
        f"step and a planned one; ± is the standard error. Within {CLOSE:.0%} of the extra time of the step, "
        f"with recording: {whole} of {len(found)}. Recompute alone within {CLOSE:.0%} of the extra time "
        f"of backward, where ops run again: {in_backward}.",
        "",
        "| model | budget | rounds | recomputed ops | plain step, ms | predicted: recompute, ms "
        "| recording, ms | measured: backward, ms | forward, ms | step, ms | step off by | backward off by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        lines.append(
            f"| {row.model} | {format_bytes(row.budget)} | {len(row.plain_s)} | {row.recomputed} "
            f"| {_ms(row.plain_s)} "
            f"| {_ms(row.predicted_s)} | {_ms(row.recording_s)} | {_told(row.backward_s)} "
            f"| {_told(row.forward_s)} | {_told(row.extra_s)} | {row.off:+.0%} | {row.off_backward:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def _ms(values_s: Sequence[float]) -> str:
    return f"{statistics.median(values_s) * 1e3:.0f}"


def _told(values_s: Sequence[float]) -> str:
    return f"{_ms(values_s)} ± {error(values_s) * 1e3:.0f}"


def main() -> None:
    """Measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=MODELS, help="may be given again")
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="at most, for each model")
    parser.add_argument("--out", type=Path, default=TABLE, help="the page, written if all models were run")
    given = parser.parse_args()
    found: list[Row] = []
    for model in given.only or MODELS:
        found += alone(rows, model, given.rounds)
        print(*render(found).splitlines()[-len(BUDGETS) :], sep="\n", file=sys.stderr, flush=True)
    if given.only:
        print(render(found))
    else:
        write_whole(given.out, render(found))


if __name__ == "__main__":
    main()
