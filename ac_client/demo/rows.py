"""What the demo measures: rows, their results, and the child process that turns one into the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ac_client.demo.setting import Setting

Method = Literal["plain", "checkpoint", "selective", "ours"]

TIMEOUT_S = 600.0  # a guard: a row takes half a minute on two idle cores


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train."""

    name: str
    method: Method
    budget_bytes: int | None = None  # of ours
    pairs: int = 7  # timed steps of this row, each beside one of plain


@dataclass(frozen=True, slots=True)
class Measured:
    """What the child process found. Times in seconds, sizes in bytes."""

    peak_bytes: int  # from the second step on
    first_step_peak_bytes: int  # of the first step, building the model included
    predicted_peak_bytes: int | None
    step_s: float  # median
    plain_step_s: float  # median of the plain steps in the same pairs
    slowdown: float  # median over the pairs of step / plain step
    gradients_equal: bool  # to plain's, bit for bit, at every step, and the loss
    compared_steps: int
    plan_s: float | None = None
    gap: float | None = None
    timeline: list[tuple[float, int]] = field(default_factory=list)  # (ms, live bytes) of the last step


class ChildFailed(Exception):
    """The process that measured a row ended without a result; carries the end of what it said."""

    def __init__(self, row: str, said: str) -> None:
        self.row, self.said = row, said
        last = said.strip().splitlines()[-1:] or ["no message"]
        super().__init__(f"the process that measures {row!r} failed: {last[0]}")


def profile_path(folder: Path) -> Path:
    """Where the child that measures plain writes the model's profile."""
    return folder / "profile.json"


def policy_path(folder: Path, row: str) -> Path:
    """Where the child that measures a row of ours writes the policy it carried out."""
    return folder / f"{row.replace(' ', '-').replace('%', '')}.policy.json"


def measure_in_child(row: Row, setting: Setting, folder: Path) -> Measured:
    """Measure `row` in a fresh Python process.

    Raises:
        ChildFailed: it ended with an error or took longer than `TIMEOUT_S`.
    """
    order = json.dumps({"row": asdict(row), "setting": asdict(setting), "folder": str(folder)})
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "6"}
    try:
        child = subprocess.run(
            [sys.executable, "-m", "ac_client.demo.child", order],
            capture_output=True,
            text=True,
            env=os.environ | quiet,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(row.name, f"no result in {TIMEOUT_S:g} s") from None
    if child.returncode:
        raise ChildFailed(row.name, child.stderr)
    return read_measured(json.loads(child.stdout.splitlines()[-1]))


def read_measured(data: dict[str, Any]) -> Measured:
    """The result from what a JSON reader returned."""
    timeline = [(float(ms), int(live)) for ms, live in data.pop("timeline")]
    return Measured(timeline=timeline, **data)
