"""Measure what a link to the host is worth: `python -m benchmarks.offload [--only NAME] [--out FILE]`.

Datasheets of an H100, links of 50, 25 and 1 GB/s. Each model at the smallest peak of recompute alone that was
found, and 10 % and 50 % of the way from there to the peak with nothing recomputed. Times are shares of the
plain step, and the gap is a share of the extra time. Jitter: the most stalls of ten runs in which every copy
takes up to 10 % more or less. Seconds are CPU time of the whole plan, the one without moves included.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from autoac.planner import build, find_minimum_peak
from autoac.planner.memory.clocks import timing
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.offload import Offload, plan_offload
from autoac.planner.plan import step_time_us
from autoac.planner.problem.moves import Link
from autoac.planner.units import GIB
from benchmarks.plans.profiles import load

MODELS = ("llama3_8b", "gpt2_xl", "vit_h14", "mixtral_8x7b_sharded")
SHARES = (0.0, 0.1, 0.5)
LINKS_GB_S = (50, 25, 1)
LATENCY_US = 10.0
WORK_LIMIT = 10.0  # units of work: what a training step waits for
HEAD = (
    "| model | GiB | GB/s | without | with | ratio | proven | gap | moved, GiB | stalls | jitter | plan, s |"
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


def with_jitter(found: Offload, link: Link) -> float:
    """Return the longest stalls of ten runs, in microseconds."""
    fields = (link.out_bytes_per_us, link.in_bytes_per_us, link.latency_us, link.host_bytes)
    return max(
        timing(found.graph, found.save_set, found.moves, UnsteadyLink(*fields, random.Random(seed))).stall_us
        for seed in range(10)
    )


def rows_of(name: str) -> tuple[list[str], list[tuple[int, float, float, float]]]:
    """Return the rows of a model, and (GB/s, ratio, gap, seconds to plan) of each."""
    profile = load(name)
    graph = build(profile)
    low, high = find_minimum_peak(profile).found, peak_bytes(graph, graph.everything)
    step_us, rows, figures = step_time_us(graph), [], []
    for share in SHARES:
        budget = low + round(share * (high - low))
        for gb_s in LINKS_GB_S:
            begin = time.process_time()
            found = plan_offload(profile, budget_bytes=budget, link=link_of(gb_s), work_limit=WORK_LIMIT)
            took = time.process_time() - begin
            assert found.without_moves is not None
            alone_us = found.without_moves.recompute_us
            ratio = found.plan.extra_us / alone_us
            best = found.best
            moved, stalls, jitter = 0.0, 0.0, 0.0
            if best is not None:
                moved, stalls = best.timing.moved_bytes / GIB, best.timing.stall_us / step_us
                jitter = with_jitter(best, link_of(gb_s)) / step_us
            rows.append(
                f"| {name} | {budget / GIB:.2f} | {gb_s} | {alone_us / step_us:.2%} | "
                f"{found.plan.extra_us / step_us:.2%} | {ratio:.2f} | {found.bound_us / step_us:.2%} | "
                f"{found.plan.gap:.0%} | {moved:.1f} | {stalls:.2%} | {jitter:.2%} | {took:.1f} |"
            )
            print(rows[-1], flush=True)
            figures.append((gb_s, ratio, found.plan.gap, took))
    return rows, figures


def main() -> None:
    """Run the command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("--only", nargs="*", default=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines, figures = [HEAD, "| --- |" + " ---: |" * (HEAD.count("|") - 2)], []
    print("\n".join(lines))
    for name in options.only:
        rows, found = rows_of(name)
        lines += rows
        figures += found
    lines.append("")
    for gb_s in LINKS_GB_S:
        ratios = [ratio for at, ratio, *_ in figures if at == gb_s]
        gap = statistics.median(gap for at, _, gap, _ in figures if at == gb_s)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append(
            f"{gb_s} GB/s: {mean:.2f} of the extra time without moves (geometric mean), median gap {gap:.0%}"
        )
    seconds = [took for *_, took in figures]
    lines.append(f"seconds to plan: {statistics.median(seconds):.1f} (median), {max(seconds):.1f} (most)")
    print("\n".join(lines[-1 - len(LINKS_GB_S) :]))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
