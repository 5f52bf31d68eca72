"""Handle one request in a child process.

    python -m autoac.api.solving.child_main VERB KIND PARENT MEMORY TIME_LIMIT

VERB is "parse" or "answer" (requests.py), or one of policy_report.py. The child reads a
decoded body from stdin and writes frames to stdout: a letter, a length of eight bytes, and as many bytes.
P is progress as JSON. R, the last frame, is a pickle of the result or of the error. The child ends with its
parent, and stays within its memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

from autoac.api.errors import ServiceError, SolverDied
from autoac.api.policy_report import REPORTS
from autoac.api.requests import Kind, ParsedRequest, Planner, answer, parse_request
from autoac.planner.errors import PlannerError
from autoac.planner.plan import plan
from autoac.planner.solver.highs import Progress
from autoac.planner.units import format_bytes

PR_SET_PDEATHSIG = 1
PROGRESS_EVERY_S = 0.25  # HiGHS calls back hundreds of times a second


def main(argv: Sequence[str], plan: Planner = plan) -> None:
    """Handle the body on stdin as `argv` says."""
    verb, kind = argv[0], Kind(argv[1])
    parent, memory, most_seconds = int(argv[2]), int(argv[3]), float(argv[4])
    end_with(parent)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    faulthandler.enable()  # a crash in native code logs its stack
    outlet = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of C code go to the log, not into the answer
    outcome: str | bytes | ParsedRequest | Exception
    try:
        body = sys.stdin.buffer.read()
        if verb == "parse":
            outcome = parse_request(kind, body, most_seconds)
        elif verb in REPORTS:
            outcome = REPORTS[verb](body)
        else:
            progress = ProgressWriter(outlet)
            options: Any = {"plan": plan, "progress": progress, "clock": time.monotonic}
            outcome = answer(kind, body, most_seconds=most_seconds, **options)
            progress.flush()
    except (PlannerError, ServiceError) as error:
        outcome = error
    except MemoryError:
        outcome = SolverDied(f"the solver needed more than {format_bytes(memory)} of memory")
    with outlet:
        frame(outlet, b"R", pickle.dumps(outcome))


def frame(outlet: BinaryIO, letter: bytes, content: bytes) -> None:
    """Write one message to the parent process: a letter, the length in 8 bytes, the content."""
    outlet.write(letter + len(content).to_bytes(8, "big") + content)
    outlet.flush()


class ProgressWriter:
    """An `OnProgress` callback that writes a frame every `PROGRESS_EVERY_S`, and the last one at the end."""

    def __init__(self, outlet: BinaryIO) -> None:
        self._outlet = outlet
        self._written_at = -math.inf
        self._pending: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        self._pending = progress
        if time.monotonic() - self._written_at >= PROGRESS_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write the latest progress unless it is written already."""
        if self._pending is None:
            return
        now, self._pending = self._pending, None
        self._written_at = time.monotonic()
        numbers = {
            "incumbent": now.primal,
            "bound": now.dual,
            "gap": now.gap,
            "seconds": now.seconds,
        }
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        position = {"point": now.point, "points": now.points} if now.points else {}
        frame(self._outlet, b"P", json.dumps(finite | position).encode())


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL. Linux only.

    Otherwise the solves of a killed service would go on.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
