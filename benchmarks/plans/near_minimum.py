"""Plan a little above the minimum peak: how soon a plan is found, and how soon it is proven good enough.

    python -m benchmarks.plans.near_minimum [NAME ...] [--share SHARE ...] [--device DEVICE] [--out FILE]

For each profile (default: all models of `profiles.py`) the minimum peak is searched. Then
plans are made 2, 5 and 10 % above it, each twice: with a few seconds, for the first plan that fits, and with
a minute, for a gap of 1 %. A row has the times and gaps at all budgets. Time is CPU time of the process, and
the limits count it as well. With --share, the budgets lie this far from the minimum peak to the peak without
recomputation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from autoac.planner import PlannerError, Profile, bounds, build
from autoac.planner.formats.op_key import OpKey
from autoac.planner.minimum_peak import MinimumPeak, find_minimum_peak
from autoac.planner.plan import plan
from benchmarks.plans.compare import FLOOR_WORK, GAP
from benchmarks.plans.profiles import CASES, DEVICES, load
from benchmarks.results import add_out_argument, markdown_table, write_result

ABOVE = (0.02, 0.05, 0.10)
# Of the first call, by layers: below the 2, 5 and 15 s that a plan may take, since a solve may end late.
FIRST_LIMIT_S = {32: 1.5, 80: 4.0}
FIRST_LIMIT_OF_MORE_S = 12.0
TIME_LIMIT_S = 60.0
FIRST, BEST = "first plan, s", "plan, s"
HEAD = ("model", "ops", "layers", "minimum peak", "proven", "s", FIRST, "gap, %", BEST, "gap, %")


@dataclass(frozen=True, slots=True)
class Timed:
    """The outcome of one call of the planner."""

    cpu_s: float
    gap: float | None  # None: no plan


def seconds(calls: Sequence[Timed]) -> str:
    """Return the times as text, one for each budget."""
    return ", ".join(f"{call.cpu_s:.1f}" for call in calls)


def percents(calls: Sequence[Timed]) -> str:
    """Return the gaps as text, one for each budget."""
    return ", ".join("none" if call.gap is None else f"{100 * call.gap:.2f}" for call in calls)


def layers_of(profile: Profile) -> int:
    """Return the number of repeated blocks, at any depth of nesting."""
    keys = [OpKey.parse(key) for key in set(profile.keys())]
    counts = (len({key.block(depth) for key in keys} - {""}) for depth in count(1))
    return max(takewhile(bool, counts), default=0)


def timed_plan(profile: Profile, budget: int, limit_s: float) -> Timed:
    """Plan within `limit_s` seconds of CPU time."""
    began = time.process_time()
    try:
        gap = plan(profile, budget_bytes=budget, gap=GAP, time_limit_s=limit_s, clock=time.process_time).gap
    except PlannerError:
        gap = None
    return Timed(time.process_time() - began, gap)


def budgets_of(profile: Profile, least: int, shares: Sequence[float]) -> list[int]:
    """Return the budgets: at `shares` of the way to the ceiling, or else a little above `least`."""
    if not shares:
        return [int(least * (1 + above)) for above in ABOVE]
    ceiling = bounds(build(profile)).ceiling
    return [int(least + share * (ceiling - least)) for share in shares]


def row_of(name: str, profile: Profile, shares: Sequence[float]) -> list[str]:
    """Return the row of a model."""
    began = time.process_time()
    smallest: MinimumPeak = find_minimum_peak(profile, work_limit=FLOOR_WORK)
    smallest_s = time.process_time() - began
    layers = layers_of(profile)
    first_s = next((s for most, s in FIRST_LIMIT_S.items() if layers <= most), FIRST_LIMIT_OF_MORE_S)
    first, best = [], []
    for budget in budgets_of(profile, smallest.found, shares):
        first.append(timed_plan(profile, budget, first_s))
        best.append(timed_plan(profile, budget, TIME_LIMIT_S))
    return [
        name, f"{len(profile.ops):,}", str(layers), f"{smallest.found / 2**30:.2f} GiB",
        f"{smallest.proven / smallest.found:.1%}", f"{smallest_s:.1f}",
        seconds(first), percents(first), seconds(best), percents(best)
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.near_minimum", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--share", nargs="*", type=float, default=[])
    parser.add_argument("--device", default=DEVICES[0])
    add_out_argument(parser)
    options = parser.parse_args(arguments)
    rows: list[list[str]] = []
    for name in options.names or CASES:
        rows.append(row_of(name, load(name, options.device), options.share))
        print("  ".join(rows[-1]), flush=True)
    write_result(markdown_table(HEAD, rows), options.out)


if __name__ == "__main__":
    main()
