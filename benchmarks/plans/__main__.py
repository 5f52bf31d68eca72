"""Profile, compare and report.

    python -m benchmarks.plans [--only PATTERN ...] [--device DEVICE ...] [--page FILE]

Each model is compared in a process of its own, one after another; results of the same profile and code are
kept, also of a comparison that was stopped. `llama_l16` and its siblings show how planning time grows with
layers, and have no baselines. Plots go into a folder next to FILE, named as FILE is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from benchmarks.plans import compare, report
from benchmarks.plans.profiles import CASES, DEVICES, load
from benchmarks.results import chosen

R = TypeVar("R")


def in_process(function: Callable[..., R], *arguments: object) -> R:
    """Return the result of a call in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        return processes.submit(function, *arguments).result()


def main() -> None:
    """Run the command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help=", ".join(CASES))
    parser.add_argument("--device", nargs="*", default=DEVICES, help=f"default: {', '.join(DEVICES)}")
    parser.add_argument("--out", type=Path, default=compare.OUT)
    parser.add_argument("--page", type=Path, metavar="FILE", help="default: stdout, without plots")
    options = parser.parse_args()
    failed = []
    for name in chosen(CASES, options.only):
        for device in options.device[:1] if name.startswith(compare.GROWTH) else options.device:
            try:
                in_process(load, name, device)  # and not in the process that is timed
                print(in_process(compare.compare_model, name, device, options.out), flush=True)
            except Exception:  # noqa: BLE001 - the other models go on
                traceback.print_exc()
                failed.append(f"{name}.{device}")
    found = [compare.load(path) for path in sorted(options.out.glob("*.json"))]
    report.write([c for c in found if c is not None], options.page)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
