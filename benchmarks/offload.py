"""Measure what a link to the host is worth: `python -m benchmarks.offload [--only NAME] [--out FILE]`.

Datasheets of an H100, links of 50, 25 and 1 GB/s. Each model at the smallest peak of recompute alone that was
found, and 10 % and 50 % of the way from there to the peak with nothing recomputed. Times are shares of the
plain step, and the gap is a share of the extra time. Jitter: the most stalls of ten runs in which every copy
takes up to 10 % more or less. Seconds are CPU time of the whole plan, the one without moves included.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from autoac.planner import build, find_minimum_peak
from autoac.planner.memory.clocks import timing
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.offload import plan_offload
from autoac.planner.plan import Plan, step_time_us
from autoac.planner.problem.moves import Link
from autoac.planner.units import GIB
from benchmarks.plans.profiles import load
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result

MODELS = ("llama3_8b", "gpt2_xl", "vit_h14", "mixtral_8x7b_sharded")
SHARES = (0.0, 0.1, 0.5)
LINKS_GB_S = (50, 25, 1)
LATENCY_US = 10.0
WORK_LIMIT = 10.0  # units of work: what a training step waits for
HEAD = (
    *("model", "GiB", "GB/s", "without", "with", "ratio", "proven", "gap", "moved, GiB", "stalls", "jitter"),
    "plan, s",
)


@dataclass(frozen=True, slots=True)
class UnsteadyLink(Link):
    """A link whose copies take up to 10 % more or less than planned."""

    rng: random.Random

    def out_us(self, nbytes: int) -> float:
        return Link.out_us(self, nbytes) * self.rng.uniform(0.9, 1.1)

    def in_us(self, nbytes: int) -> float:
        return Link.in_us(self, nbytes) * self.rng.uniform(0.9, 1.1)


def link_of(gb_s: float) -> Link:
    """Return a link of `gb_s` in both directions, to a host of 1 TiB."""
    return Link(gb_s * 1e3, gb_s * 1e3, LATENCY_US, 1 << 40)


def with_jitter(found: Plan, link: Link) -> float:
    """Return the longest stalls of ten runs, in microseconds."""
    fields = (link.out_bytes_per_us, link.in_bytes_per_us, link.latency_us, link.host_bytes)
    return max(
        timing(found.graph, found.save_set, found.moves, UnsteadyLink(*fields, random.Random(seed))).stall_us
        for seed in range(10)
    )


@dataclass(frozen=True, slots=True)
class Row:
    """A model within one budget and over one link. Times are shares of the step."""

    model: str
    budget: int
    gb_s: float
    without: float  # extra time of the plan without moves
    extra: float
    proven: float
    gap: float
    moved: int  # bytes
    stalls: float
    jitter: float
    plan_s: float

    @property
    def ratio(self) -> float:
        return self.extra / self.without


def rows_of(name: str) -> Iterator[Row]:
    """Yield the rows of a model."""
    profile = load(name)
    graph = build(profile)
    low, high = find_minimum_peak(profile).found, peak_bytes(graph, graph.everything)
    step_us = step_time_us(graph)
    for share in SHARES:
        budget = low + round(share * (high - low))
        for gb_s in LINKS_GB_S:
            begin = time.process_time()
            found = plan_offload(profile, budget_bytes=budget, link=link_of(gb_s), work_limit=WORK_LIMIT)
            took = time.process_time() - begin
            yield Row(
                name,
                budget,
                gb_s,
                (found.extra_us + (found.gained_us if found.moves else 0.0)) / step_us,
                found.extra_us / step_us,
                found.bound_us / step_us,
                found.gap,
                found.moved_bytes,
                found.stall_us / step_us,
                with_jitter(found, link_of(gb_s)) / step_us if found.moves else 0.0,
                took,
            )


def cells(row: Row) -> list[str]:
    return [
        *(row.model, f"{row.budget / GIB:.2f}", f"{row.gb_s}", f"{row.without:.2%}", f"{row.extra:.2%}"),
        *(f"{row.ratio:.2f}", f"{row.proven:.2%}", f"{row.gap:.0%}", f"{row.moved / GIB:.1f}"),
        *(f"{row.stalls:.2%}", f"{row.jitter:.2%}", f"{row.plan_s:.1f}"),
    ]


def summary(rows: list[Row]) -> str:
    """Return what each link is worth over all rows."""
    lines = []
    for gb_s in LINKS_GB_S:
        of_link = [row for row in rows if row.gb_s == gb_s]
        mean = statistics.geometric_mean(row.ratio for row in of_link)
        gap = statistics.median(row.gap for row in of_link)
        lines.append(
            f"{gb_s} GB/s: {mean:.2f} of the extra time without moves (geometric mean), median gap {gap:.0%}"
        )
    seconds = [row.plan_s for row in rows]
    return "\n".join(
        [*lines, f"seconds to plan: {statistics.median(seconds):.1f} (median), {max(seconds):.1f} (most)"]
    )


def main() -> None:
    """Run the command in the module docstring."""
    options = bench_parser(__doc__).parse_args()
    rows = shown(chain.from_iterable(map(rows_of, chosen(MODELS, options.only))), cells)
    write_result(f"{markdown_table(HEAD, map(cells, rows))}\n\n{summary(rows)}", options.out)


if __name__ == "__main__":
    main()
