"""What the demo measures: rows, their results, and the child processes that turn one into the other."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

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
    # Of ours, by the profile that its plan was made from: its own recompute time, and the baselines'.
    own_recompute_us: float | None = None
    own_baselines_us: dict[str, float] = field(default_factory=dict)
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


class Children:
    """Measures rows, each in a child process of its own. Use as a context manager.

    One process imports torch and transformers, runs nothing, and forks itself for every row: a row saves
    the five seconds of importing, and all of them start from the same state.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting, self._folder = setting, folder
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # numpy's threads would be there before the fork; torch's own begin with the first large op.
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "6"}
        with (self._folder / "stderr").open("w") as stderr:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "ac_client.demo.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | quiet | {"OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        server = self._server
        if server is not None:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # a row that is still running, too
            server.communicate()

    def measure(self, row: Row) -> Measured:
        """Measure `row`.

        Raises:
            ChildFailed: its process ended with an error or took longer than `TIMEOUT_S`.
        """
        server = self._server
        assert server is not None
        assert server.stdin is not None
        assert server.stdout is not None
        result = self._folder / "result.json"
        order = {"row": asdict(row), "setting": asdict(self._setting), "folder": str(self._folder)}
        with suppress(BrokenPipeError):
            server.stdin.write(json.dumps(order | {"result": str(result)}) + "\n")
            server.stdin.flush()
        ready, _, _ = select.select([server.stdout], [], [], TIMEOUT_S)
        if not ready:
            raise ChildFailed(row.name, f"no result in {TIMEOUT_S:g} s")
        if server.stdout.readline().strip() != "0":
            raise ChildFailed(row.name, (self._folder / "stderr").read_text())
        return read_measured(json.loads(result.read_text()))


def read_measured(data: dict[str, Any]) -> Measured:
    """The result from what a JSON reader returned."""
    timeline = [(float(ms), int(live)) for ms, live in data.pop("timeline")]
    return Measured(timeline=timeline, **data)
