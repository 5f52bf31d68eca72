"""Predicted recompute time beside the extra time that planned steps really take -> docs/recompute-time.md.

    python -m benchmarks.recompute_time [--only GPT-2] [--pairs 9]

Models of midsize.py whose step takes a second or more, each planned at several budgets from one profile.
In each round there is a profile, a plain step and a planned one for each budget, in an order that changes:
a shared machine's speed moves by a quarter within minutes, and the profile's times move with it. So what is
predicted is the median of what the rounds' profiles say of the one plan, and what is measured the median of
the differences within rounds. What recording adds is predicted too, from its cost for an op in each round
(recording.py). Steps run on one thread and are timed by that thread's own CPU time, which
other processes on the machine do not add to; so is the profile. Each model runs in a process of its own,
which gives no memory back to the kernel (`keep_memory`).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ac_client
from ac_client.console import write_whole
from autoac.planner import Plan, Profile, bounds, build, floor, plan
from autoac.planner.graph import recompute_us
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks import midsize
from benchmarks.peak import alone
from benchmarks.recording import recording_us

TABLE = Path(__file__).parents[1] / "docs" / "recompute-time.md"

MODELS = ("GPT-2", "BERT", "T5", "U-Net")
BUDGETS = (0.05, 0.3)
"""Where budgets are between the smallest peak that was found and the plain step's."""

PAIRS = 9
CLOSE = 0.15


@dataclass(frozen=True, slots=True)
class Row:
    """A model at a budget. Times in seconds, those in sequences by round."""

    model: str
    budget: int  # bytes
    recomputed: int  # ops
    plain_s: float  # a plain step
    predicted_s: Sequence[float]  # to recompute
    recording_s: Sequence[float]  # predicted, in forward
    forward_s: Sequence[float]  # that a planned forward took beside a plain one
    backward_s: Sequence[float]

    @property
    def both_s(self) -> list[float]:
        """Predicted, recording and recompute."""
        return [sum(both) for both in zip(self.predicted_s, self.recording_s, strict=True)]

    @property
    def extra_s(self) -> list[float]:
        """What the whole step took beside a plain one."""
        return [sum(both) for both in zip(self.forward_s, self.backward_s, strict=True)]

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


def rows(model: str, pairs: int) -> list[Row]:
    """Profile, plan and measure; run it in a process of its own."""
    keep_memory()
    torch.set_num_threads(1)
    plain, batch = midsize.made(model)
    halves(plain, batch)
    found = profile(plain, **batch)
    plans = planned(found)
    models = []
    for decided in plans:
        one, _ = midsize.made(model)
        ac_client.apply(one, policy=decided.policy())
        models.append(one)
    predicted, recording, taken = rounds(plain, models, batch, plans, pairs)
    of_plain = taken[plain]
    return [
        Row(
            model,
            decided.budget,
            len(decided.recompute_set),
            statistics.median(sum(step) for step in of_plain),
            predicted[i],
            [len(found.ops) * each for each in recording],
            [ours[0] - its[0] for ours, its in zip(taken[models[i]], of_plain, strict=True)],
            [ours[1] - its[1] for ours, its in zip(taken[models[i]], of_plain, strict=True)],
        )
        for i, decided in enumerate(plans)
    ]


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
    smallest, ceiling = floor(found, gap=0.3, time_limit_s=15).found, bounds(build(found)).ceiling
    return [
        plan(found, budget_bytes=int(smallest + (ceiling - smallest) * part), time_limit_s=15)
        for part in BUDGETS
    ]


def rounds(
    plain: nn.Module, models: Sequence[nn.Module], batch: Mapping[str, Any], plans: Sequence[Plan], pairs: int
) -> tuple[list[list[float]], list[float], dict[nn.Module, list[tuple[float, float]]]]:
    """What each plan was said to recompute, by plan and round; what recording an op takes, by round; and what
    forward and backward took, by model and round. In seconds.
    """
    for model in [*models, *models, plain]:
        halves(model, batch)
    predicted: list[list[float]] = [[] for _ in plans]
    recording: list[float] = []
    turns = [plain, *models]
    taken: dict[nn.Module, list[tuple[float, float]]] = {model: [] for model in turns}
    for i in range(pairs):
        graph = build(profile(plain, **batch))
        for said, decided in zip(predicted, plans, strict=True):
            said.append(recompute_us(graph, decided.save_set) / 1e6)
        recording.append(recording_us() / 1e6)
        first = i % len(turns)
        for model in turns[first:] + turns[:first]:
            taken[model].append(halves(model, batch))
    return predicted, recording, taken


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
        f"torch {torch.__version__}, one thread, in its CPU time; medians over "
        f"{min(len(row.forward_s) for row in found)} rounds of a profile, a plain step and a planned one; "
        f"± is the standard error. Within {CLOSE:.0%} of the extra time of the step, with recording: "
        f"{whole} of {len(found)}. Recompute alone within {CLOSE:.0%} of the extra time of backward, where "
        f"ops run again: {in_backward}.",
        "",
        "| model | budget | recomputed ops | plain step, ms | predicted: recompute, ms | recording, ms "
        "| measured: backward, ms | forward, ms | step, ms | step off by | backward off by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        lines.append(
            f"| {row.model} | {format_bytes(row.budget)} | {row.recomputed} | {row.plain_s * 1e3:.0f} "
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
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--out", type=Path, default=TABLE, help="the page, written if all models were run")
    given = parser.parse_args()
    found: list[Row] = []
    for model in given.only or MODELS:
        found += alone(rows, model, given.pairs)
        print(*render(found).splitlines()[-len(BUDGETS) :], sep="\n", file=sys.stderr, flush=True)
    if given.only:
        print(render(found))
    else:
        write_whole(given.out, render(found))


if __name__ == "__main__":
    main()
