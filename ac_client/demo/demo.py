"""Runs the demo: every row in its own child process, the budgets of ours from the rows before."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ac_client.demo.baselines import BASELINES, replayed_us
from ac_client.demo.rows import Children, Measured, Row, policy_path, profile_path
from ac_client.demo.setting import Setting, block_paths
from autoac.planner import MinimumPeak, Policy, Profile, find_minimum_peak
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import OpId

PLAIN = "plain"
CHECKPOINT = "checkpoint every block"
SELECTIVE = "selective checkpoint"
SHARES = (0.75, 0.50, 0.25)
FLOOR_TIME_LIMIT_S = 15.0

OnRow = Callable[[str, int, int], None]  # what is measured now, its number from 1, of how many


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table."""

    row: Row
    measured: Measured
    recompute_us: float  # predicted, of the ops that run again, all from the one profile of the plain model


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, and whether it was kept."""

    promise: str
    found: str
    kept: bool
    binding: bool = False  # the demo fails without it


@dataclass(frozen=True, slots=True)
class Demo:
    """All that the demo found."""

    setting: Setting
    lines: tuple[Line, ...]
    floor: MinimumPeak
    seconds: float

    def line(self, name: str) -> Line:
        """The row called `name`."""
        return next(line for line in self.lines if line.row.name == name)

    @property
    def failed(self) -> bool:
        """Whether a row of ours broke its budget or had other gradients than plain."""
        return any(check.binding and not check.kept for check in checks(self))

    def data(self) -> dict[str, Any]:
        """For machines: everything but the timelines."""
        return {
            "setting": asdict(self.setting),
            "seconds": round(self.seconds, 1),
            "floor": {"proven_bytes": self.floor.proven, "found_bytes": self.floor.found},
            "rows": [
                asdict(line.row)
                | {k: v for k, v in asdict(line.measured).items() if k != "timeline"}
                | {"recompute_us": line.recompute_us}
                for line in self.lines
            ],
            "checks": [asdict(check) for check in checks(self)],
        }


def ours_at(name: str) -> str:
    """The name of our row at the measured peak of the row `name`."""
    return f"ours, peak of {name}"


def ours_share(share: float) -> str:
    """The name of our row at `share` of the way from the smallest feasible peak to plain's."""
    return f"ours, {share:.0%} of the way"


def run(setting: Setting | None = None, *, pairs: int = 7, on_row: OnRow | None = None) -> Demo:
    """Measure all rows, one after another.

    Args:
        setting: what is trained.
        pairs: timed pairs of steps in each row.
        on_row: called before each row.

    Raises:
        ChildFailed: a row could not be measured.
    """
    setting = setting or Setting()
    start = time.monotonic()
    lines: list[Line] = []
    n_rows = 2 * 3 + len(SHARES)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autoac-demo-")))
        children = stack.enter_context(Children(setting, folder))

        def measure(row: Row) -> Measured:
            if on_row is not None:
                on_row(row.name, len(lines) + 1, n_rows)
            return children.measure(row)

        plain = Row(PLAIN, "plain", pairs=pairs)
        lines.append(Line(plain, measure(plain), 0.0))
        profile = Profile.from_json(profile_path(folder).read_bytes())
        graph = build(profile)

        for name, baseline in zip((CHECKPOINT, SELECTIVE), BASELINES, strict=True):
            row = Row(name, baseline, pairs=pairs)
            lines.append(Line(row, measure(row), replayed_us(profile, block_paths(setting), baseline)))

        smallest = find_minimum_peak(profile, time_limit_s=FLOOR_TIME_LIMIT_S)
        room = lines[0].measured.peak_bytes - smallest.found
        budgets = {ours_at(line.row.name): line.measured.peak_bytes for line in lines}
        budgets |= {ours_share(share): smallest.found + int(share * room) for share in SHARES}
        keys = profile.keys()
        for name, budget in budgets.items():
            row = Row(name, "ours", budget, pairs)
            measured = measure(row)
            decisions = Policy.from_json(policy_path(folder, name).read_bytes()).decisions
            saved = frozenset(OpId(op) for op, key in enumerate(keys) if decisions.get(key) != "recompute")
            lines.append(Line(row, measured, recompute_us(graph, saved)))
    return Demo(setting, tuple(lines), smallest, time.monotonic() - start)


def checks(demo: Demo) -> list[Check]:
    """What the demo promises of our rows, and what came of it."""
    ours = [line for line in demo.lines if line.row.method == "ours"]
    worst_use = max(line.measured.peak_bytes / (line.row.budget_bytes or 1) for line in ours)
    worst_error = max(
        abs((line.measured.predicted_peak_bytes or 0) / line.measured.peak_bytes - 1) for line in ours
    )
    unequal = [line.row.name for line in ours if not line.measured.gradients_equal]
    checkpoint, selective = demo.line(CHECKPOINT), demo.line(SELECTIVE)
    halfway = demo.line(ours_share(0.5)).measured.slowdown - 1
    allowed = (checkpoint.measured.slowdown - 1) / 2
    plan_s = max(line.measured.plan_s or 0.0 for line in ours)
    gap = max(line.measured.gap or 0.0 for line in ours)
    return [
        Check(
            "every row of ours stays within its budget",
            f"at most {worst_use:.3%} of it",
            worst_use <= 1,
            binding=True,
        ),
        Check(
            "gradients equal plain's bit for bit",
            ", ".join(unequal)
            or f"at all {sum(line.measured.compared_steps for line in ours)} steps compared",
            not unequal,
            binding=True,
        ),
        Check(
            "peak predicted within 1 % of the measured one", f"off by {worst_error:.3%}", worst_error <= 0.01
        ),
        _less_recompute(demo, checkpoint, 0.95),
        _less_recompute(demo, selective, 0.80),
        Check(
            "half way to plain's peak: at most half of the per-block checkpoint's slowdown",
            f"{halfway:+.1%}, half of the checkpoint's is {allowed:+.1%}",
            halfway <= allowed,
        ),
        Check("planned in at most 10 s", f"{plan_s:.1f} s", plan_s <= 10),
        Check("proven to be within 1 % of the best plan", f"{gap:.2%}", gap <= 0.01),
    ]


def _less_recompute(demo: Demo, baseline: Line, share: float) -> Check:
    """Judged by the profile that our plan was made from; the table's is another measurement."""
    ours = demo.line(ours_at(baseline.row.name))
    theirs_us = ours.measured.own_baselines_us[baseline.row.method]
    found = (ours.measured.own_recompute_us or 0.0) / theirs_us
    by_the_table = ours.recompute_us / baseline.recompute_us
    return Check(
        f"at the peak of '{baseline.row.name}': at most {share:.0%} of its recompute time",
        f"{found:.0%} by the profile that was planned from, {by_the_table:.0%} by the table's",
        found <= share,
    )
