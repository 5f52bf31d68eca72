"""Define the rows of the demo and their results, and measure each row in a child process."""

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
from typing import Any, Self

from ac_client.demo.setting import Setting

TIMEOUT_S = 600.0  # for one row, which takes seconds on two idle cores


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train the demo's model; a row of the demo's table."""

    name: str
    method: str  # "plain", "ours", or a wrapper of the blocks such as "checkpoint"
    budget_bytes: int | None = None  # of ours
    pairs: int = 5  # timed steps, each paired with a plain one


@dataclass(frozen=True, slots=True)
class Measured:
    """Peaks and times that were measured for one row. Times are medians in seconds, sizes are in bytes."""

    peak_bytes: int  # from the second step on
    first_step_peak_bytes: int  # building the model included
    predicted_peak_bytes: int | None  # of ours
    first_step_s: float | None  # of ours: profile, plan, and the step itself
    step_s: float
    plain_step_s: float  # of the plain steps in the same pairs
    slowdown: float  # median over the pairs of step / plain step
    gradients_equal: bool  # loss and gradients equal those of plain bit for bit at every step
    compared_steps: int
    timeline: list[tuple[float, int]] = field(default_factory=list)  # (ms, live bytes) of the last step


class ChildFailed(Exception):
    """The process that measured a row ended without a result. `output` is what it printed on stderr."""

    def __init__(self, row: str, output: str) -> None:
        self.row, self.output = row, output
        lines = [line for line in output.strip().splitlines() if not line.startswith("autoac: ")]  # no notes
        super().__init__(f"the process that measures {row!r} failed: {lines[-1] if lines else 'no message'}")


def policy_path(folder: Path, row: str) -> Path:
    """Return the file to which the child of a row of ours writes its policy."""
    return folder / f"{row.replace(' ', '-').replace('%', '')}.policy.json"


def profile_path(folder: Path, row: str) -> Path:
    """Return the file to which the child of a row of ours writes the profile that it planned from."""
    return folder / f"{row.replace(' ', '-').replace('%', '')}.profile.json"


class Children:
    """Measure rows, each in a child process. Use as a context manager.

    One server process imports torch and transformers and forks itself for every row. So a row saves five
    seconds of imports, and all rows start from the same state.

    Args:
        setting: the model.
        folder: where the children write their files.
        module: what the server process runs; `ac_client.demo.child` or a module that calls its `main`.
    """

    def __init__(self, setting: Setting, folder: Path, module: str = "ac_client.demo.child") -> None:
        self._setting, self._folder, self._module = setting, folder, module
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # numpy would start its threads before the fork; torch starts its own with the first large op.
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "6"}
        with (self._folder / "stderr").open("w") as stderr:
            self._server = subprocess.Popen(
                [sys.executable, "-m", self._module],
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
                os.killpg(server.pid, signal.SIGKILL)  # also a row that is still running
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
    """Build the result from the JSON that the child wrote."""
    timeline = [(float(ms), int(live)) for ms, live in data.pop("timeline")]
    return Measured(timeline=timeline, **data)
