"""Run nine rows: plain, two checkpoints of torch, and ours at their peaks and at shares of the way to plain.

Recompute times are predicted, all from one profile of the plain model. Promises about recompute time are
judged by the profile that our own plan was made from, since the table's profile is another measurement.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ac_client.demo.comparison import CHECKPOINT, PLAIN, Check, DemoComparison, Line, OnRow, checks_of_ours
from ac_client.demo.rows import Measured, Row, Trainee
from ac_client.demo.rows import measure as measure_row
from ac_client.demo.setting import Setting, block_paths
from ac_client.demo.terminal import gradients, mib, slowdown
from ac_client.measure.forked_call import run_in_child
from autoac.planner import MinimumPeak, Plan, Policy, Profile, bounds, build, find_minimum_peak, plan
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.problem.graph import Graph, OpId
from autoac.profiler import observe
from benchmarks.torch_checkpoint import BASELINES, replayed_us, wrap_blocks

SELECTIVE = "selective checkpoint"
WRAPPERS = {baseline: partial(wrap_blocks, baseline=baseline) for baseline in BASELINES}
SHARES = (0.75, 0.50, 0.25)
MINIMUM_TIME_LIMIT_S = 15.0
GPT2_SMALL = Setting(layers=12, width=768, heads=12, vocabulary=8192)


@dataclass(frozen=True, slots=True)
class Replanned:
    """The plan of a row of ours, made again in this process from the same profile and budget."""

    plan: Plan
    seconds: float
    baselines_us: Mapping[str, float]  # recompute time of torch's checkpoints by the same profile


@dataclass(frozen=True, slots=True)
class FullTable:
    """The rows, with what the parent process finds out about them."""

    comparison: DemoComparison
    recompute_us: Mapping[str, float]  # by row
    replanned: Mapping[str, Replanned]  # by row of ours
    minimum: MinimumPeak
    save_all_peak_bytes: int  # predicted for plain


def ours_at(name: str) -> str:
    """Return the name of our row at the measured peak of the row `name`."""
    return f"ours, peak of {name}"


def ours_share(share: float) -> str:
    """Return the name of our row at `share` of the way from the minimum peak to plain's."""
    return f"ours, {share:.0%} of the way"


def run(setting: Setting = GPT2_SMALL, *, pairs: int = 7, on_row: OnRow | None = None) -> FullTable:
    """Measure all rows, one after another.

    Raises:
        RuntimeError: a row could not be measured.
    """
    start = time.monotonic()
    lines: list[Line] = []
    recompute: dict[str, float] = {}
    replanned: dict[str, Replanned] = {}
    # This process runs no kernel and no solver, whose threads a fork would lose.
    profile = run_in_child(_plain_profile, setting)
    graph = build(profile)

    def measure(row: Row) -> Measured:
        if on_row is not None:
            on_row(row.name, len(lines) + 1, 2 * 3 + len(SHARES))
        lines.append(Line(row, run_in_child(measure_row, row, setting, WRAPPERS)))
        return lines[-1].measured

    measure(Row(PLAIN, "plain", pairs=pairs))
    recompute[PLAIN] = 0.0
    for name, baseline in zip((CHECKPOINT, SELECTIVE), BASELINES, strict=True):
        measure(Row(name, baseline, pairs=pairs))
        recompute[name] = replayed_us(profile, block_paths(setting), baseline)

    minimum = run_in_child(partial(find_minimum_peak, profile, time_limit_s=MINIMUM_TIME_LIMIT_S))
    room = lines[0].measured.peak_bytes - minimum.found
    budgets = {ours_at(line.row.name): line.measured.peak_bytes for line in lines}
    budgets |= {ours_share(share): minimum.found + int(share * room) for share in SHARES}
    for name, budget in budgets.items():
        found = measure(Row(name, "ours", budget, pairs))
        assert found.policy is not None
        assert found.profile is not None
        recompute[name] = _recompute_us(graph, profile, found.policy)
        replanned[name] = run_in_child(_plan_again, found.profile, budget, setting)
    checks = (
        *checks_of_ours([line for line in lines if line.row.method == "ours"]),
        *_checks(lines, replanned),
    )
    comparison = DemoComparison(setting, tuple(lines), checks, time.monotonic() - start)
    return FullTable(comparison, recompute, replanned, minimum, bounds(graph).ceiling)


def _plain_profile(setting: Setting) -> Profile:
    trainee = Trainee(setting)
    return observe(trainee.model, (trainee.ids,), {"labels": trainee.ids}, optimizer=trainee.optimizer)


def _recompute_us(graph: Graph, profile: Profile, policy: Policy) -> float:
    keys = enumerate(profile.keys())
    save_set = frozenset(OpId(op) for op, key in keys if policy.decisions.get(key) != "recompute")
    return recompute_us(graph, save_set)


def _plan_again(profile: Profile, budget: int, setting: Setting) -> Replanned:
    start = time.perf_counter()
    planned = plan(profile, budget_bytes=budget)
    seconds = time.perf_counter() - start
    paths = block_paths(setting)
    baselines_us: dict[str, float] = {name: replayed_us(profile, paths, name) for name in BASELINES}
    return Replanned(planned, seconds, baselines_us)


def _checks(lines: list[Line], replanned: Mapping[str, Replanned]) -> list[Check]:
    by_name = {line.row.name: line.measured for line in lines}
    halfway = by_name[ours_share(0.5)].slowdown - 1
    allowed = (by_name[CHECKPOINT].slowdown - 1) / 2
    plan_s = max(row.seconds for row in replanned.values())
    gap = max(row.plan.gap for row in replanned.values())
    return [
        _less_recompute(replanned, CHECKPOINT, "checkpoint", 0.95),
        _less_recompute(replanned, SELECTIVE, "selective", 0.80),
        Check(
            "half way to plain's peak: at most half of the per-block checkpoint's slowdown",
            f"{halfway:+.1%}, half of the checkpoint's is {allowed:+.1%}",
            halfway <= allowed,
        ),
        Check("planned in at most 10 s", f"{plan_s:.1f} s", plan_s <= 10),
        Check("proven to be within 1 % of the best plan", f"{gap:.2%}", gap <= 0.01),
    ]


def _less_recompute(replanned: Mapping[str, Replanned], name: str, baseline: str, share: float) -> Check:
    ours = replanned[ours_at(name)]
    found = ours.plan.recompute_us / ours.baselines_us[baseline]
    return Check(
        f"at the peak of '{name}': at most {share:.0%} of its recompute time", f"{found:.0%}", found <= share
    )


COLUMNS = (
    "row",
    "budget MiB",
    "predicted peak MiB",
    "measured peak MiB",
    "recompute, predicted",
    "step time / plain",
    "gradients equal",
    "plan time",
)


def cells(table: FullTable, line: Line) -> list[str]:
    """Format one row, in the order of `COLUMNS`."""
    row, measured = line.row, line.measured
    replanned = table.replanned.get(row.name)
    plain = row.method == "plain"
    return [
        row.name,
        mib(row.budget_bytes),
        mib(table.save_all_peak_bytes if plain else line.predicted_peak_bytes),
        mib(measured.peak_bytes),
        f"{table.recompute_us[row.name] / 1e3:.0f} ms",
        slowdown(line),
        gradients(line),
        "" if replanned is None else f"{replanned.seconds:.1f} s",
    ]


def markdown(table: FullTable) -> str:
    """Format the rows as a Markdown table, and the minimum peak below."""
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1))]
    lines += [tuple(cells(table, line)) for line in table.comparison.lines]
    minimum = f"minimum peak: {mib(table.minimum.found)} MiB found, {mib(table.minimum.proven)} MiB proven"
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{minimum}"


def render_checks(comparison: DemoComparison) -> str:
    """Format the promises as a Markdown list."""
    marks = {True: "kept", False: "**missed**"}
    return "\n".join(f"- {marks[check.kept]}: {check.promise}: {check.found}" for check in comparison.checks)


def data(table: FullTable) -> dict[str, Any]:
    """Return everything but the timelines as JSON types."""
    facts = table.comparison.data()
    for row in facts["rows"]:
        replanned = table.replanned.get(row["name"])
        row["recompute_us"] = table.recompute_us[row["name"]]
        row["plan_s"] = None if replanned is None else replanned.seconds
        row["gap"] = None if replanned is None else replanned.plan.gap
    return facts | {"floor": {"proven_bytes": table.minimum.proven, "found_bytes": table.minimum.found}}
