"""Train inside other libraries, plainly and planned, and compare: weights, peaks, warnings, observed steps.

    python -m benchmarks.clients [--only NAME ...] [--share 0.6] [--out FILE]

Each row of `loops.py` takes five steps in a process of its own: plainly, then under a budget that nothing
fits, whose error gives the smallest peak, then at `share` of the way from that to what saving everything
takes. Reported:

- *weights*: equal to plain's after five steps, bit for bit;
- *peak*: of a step of the last two, from the allocator's record, and the budget, in MiB;
- *observed*: the steps that were; *warnings* of the planned run.

Models come from configurations, so nothing is downloaded. A library that is not installed gives a row that
says so.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from typing import Any

from benchmarks.clients.loops import LOOPS, Loop, load_torchvision
from benchmarks.results import add_out_argument, markdown_table, write_result

HEAD = (
    "loop",
    "weights",
    "budget MiB",
    "predicted",
    "measured",
    "recomputed",
    "observed steps",
    "warnings",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--share", type=float, default=0.6)
    add_out_argument(parser)
    parser.add_argument("--run", choices=list(LOOPS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        print(json.dumps(row(LOOPS[asked.run], asked.share)))
        return
    rows = []
    for name in asked.only:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.clients", "--run", name]
        done = subprocess.run(
            [*command, "--share", str(asked.share)], capture_output=True, text=True, check=False
        )
        last = (done.stdout.splitlines() or [""])[-1] if not done.returncode else ""
        cells = json.loads(last) if last else [(done.stderr.splitlines() or ["failed"])[-1], *[""] * 6]
        rows.append([name, *cells])
        print(*rows[-1], file=sys.stderr, sep=" | ")
    write_result(markdown_table(HEAD, rows), asked.out)


class Messages(logging.Handler):
    """Keeps the messages of the planner, and the steps in which it profiled."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.profiled: list[int] = []
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "observing one step" in message:
            self.profiled.append(self.step + 1)
        if record.levelno >= logging.WARNING:
            self.warnings.append(message)


def row(loop: Loop, share: float) -> list[Any]:
    """Return the cells of one loop."""
    from ac_client import InfeasibleBudget

    load_torchvision()
    messages = Messages()
    log = logging.getLogger("ac_client")
    log.addHandler(messages)
    log.setLevel(logging.INFO)
    log.propagate = False
    plain = loop(None, messages)
    try:
        loop(1e-6, messages)
    except InfeasibleBudget as error:
        smallest = error.smallest_found or error.proven_floor
    most = loop(64.0, messages).report.save_all_peak_bytes or 0
    budget = int(smallest + share * (most - smallest))
    messages.profiled.clear()
    messages.warnings.clear()
    done = loop(budget / 2**30, messages)
    report = done.report
    same = len(plain.weights) == len(done.weights) and all(
        bool((a == b).all()) for a, b in zip(plain.weights, done.weights, strict=True)
    )
    mib = [f"{n / 2**20:.2f}" for n in (budget, report.predicted_peak_bytes, report.measured_peak_bytes or 0)]
    warned = "; ".join(dict.fromkeys(text[:150] for text in messages.warnings)) or "none"
    steps = ", ".join(map(str, messages.profiled))
    return ["equal" if same else "DIFFER", *mib, f"{report.recomputed} of {report.ops}", steps, warned]


if __name__ == "__main__":
    main()
