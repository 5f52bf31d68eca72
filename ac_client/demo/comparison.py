"""Run the rows of the demo one after another, and check what they promise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ac_client.demo.rows import Measured, Row, measure
from ac_client.demo.setting import Setting
from ac_client.measure.forked_call import run_in_child

PLAIN = "plain"
CHECKPOINT = "checkpoint every block"
OURS = "autoac at that peak"

OnRow = Callable[[str, int, int], None]  # called with the row's name, its number from 1, the number of rows


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the demo's table: how the model was trained, and what was measured."""

    row: Row
    measured: Measured

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Return the peak that our plan predicts; None for the other rows."""
        policy = self.measured.policy
        return None if policy is None else policy.predicted.peak_bytes


@dataclass(frozen=True, slots=True)
class Check:
    """A promise of the demo, such as "the peak is within the budget", and if the measurements keep it."""

    promise: str
    found: str
    kept: bool
    binding: bool = False  # the demo fails without it


@dataclass(frozen=True, slots=True)
class DemoComparison:
    """All rows, and the promises about them."""

    setting: Setting
    lines: tuple[Line, ...]
    checks: tuple[Check, ...]
    seconds: float

    def line(self, name: str) -> Line:
        """Return the row called `name`."""
        return next(line for line in self.lines if line.row.name == name)

    @property
    def failed(self) -> bool:
        """Return True if a row of ours exceeded its budget or has other gradients than plain."""
        return any(check.binding and not check.kept for check in self.checks)

    def data(self) -> dict[str, Any]:
        """Return everything but the timelines as JSON types."""
        facts = [name for name in Measured.__slots__ if name not in ("timeline", "policy", "profile")]
        return {
            "setting": asdict(self.setting),
            "seconds": round(self.seconds, 1),
            "rows": [
                asdict(line.row)
                | {name: getattr(line.measured, name) for name in facts}
                | {"predicted_peak_bytes": line.predicted_peak_bytes}
                for line in self.lines
            ],
            "checks": [asdict(check) for check in self.checks],
        }


def run(setting: Setting | None = None, *, pairs: int = 5, on_row: OnRow | None = None) -> DemoComparison:
    """Measure the three rows. Our budget is the measured peak of the checkpoint around every block.

    Args:
        setting: the model; the default is small.
        pairs: timed pairs of steps in each row.
        on_row: called before each row.

    Raises:
        RuntimeError: a row could not be measured.
    """
    setting = setting or Setting()
    start = time.monotonic()
    lines: list[Line] = []
    for name, method in ((PLAIN, "plain"), (CHECKPOINT, "checkpoint"), (OURS, "ours")):
        if on_row is not None:
            on_row(name, len(lines) + 1, 3)
        budget = lines[-1].measured.peak_bytes if method == "ours" else None
        row = Row(name, method, budget, pairs)
        try:  # without a time limit: a row takes seconds on two idle cores, and minutes on a busy machine
            lines.append(Line(row, run_in_child(measure, row, setting)))
        except RuntimeError as error:
            raise RuntimeError(f"row {len(lines) + 1} ({name}) could not be measured: {error}") from None
    return DemoComparison(setting, tuple(lines), tuple(checks(lines)), time.monotonic() - start)


def checks(lines: list[Line]) -> list[Check]:
    """Judge the promises of the demo by its three rows: plain, checkpoint and ours."""
    _, checkpoint, ours = (line.measured for line in lines)
    return [
        *checks_of_ours([line for line in lines if line.row.method == "ours"]),
        Check(
            "less extra time than the checkpoint at its peak",
            f"{ours.slowdown - 1:+.1%}, the checkpoint {checkpoint.slowdown - 1:+.1%}",
            ours.slowdown < checkpoint.slowdown,
        ),
    ]


def checks_of_ours(ours: list[Line]) -> list[Check]:
    """Check budgets, gradients and predicted peaks of all rows of ours."""
    highest_use = max(line.measured.peak_bytes / (line.row.budget_bytes or 1) for line in ours)
    error = max(abs((line.predicted_peak_bytes or 0) / line.measured.peak_bytes - 1) for line in ours)
    unequal = [line.row.name for line in ours if not line.measured.gradients_equal]
    n_steps = sum(line.measured.compared_steps for line in ours)
    return [
        Check("the peak is within the budget", f"{highest_use:.2%} of it", highest_use <= 1, binding=True),
        Check(
            "gradients equal those of plain bit for bit",
            ", ".join(unequal) or f"at all {n_steps} steps compared",
            not unequal,
            binding=True,
        ),
        Check("the peak was predicted within 1 %", f"off by {error:.3%}", error <= 0.01),
    ]
