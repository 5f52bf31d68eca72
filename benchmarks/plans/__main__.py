"""Profiles, comparisons and the page: `python -m benchmarks.plans [--only NAME ...] [--device DEVICE ...]`.

Each model is compared in a process of its own, one after another, and what is there already for the same
profile and code is kept. `llama_l16` and the like only show how planning grows with layers: no baselines.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.plans import compare, report
from benchmarks.plans.profiles import CASES, DEVICES, path_of

GROWTH = "llama_l"  # models that differ in layers alone


def main() -> None:
    """The command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--device", nargs="*", default=DEVICES, help=f"default: {', '.join(DEVICES)}")
    parser.add_argument("--out", type=Path, default=compare.OUT)
    parser.add_argument("--page", type=Path, default=report.PAGE)
    options = parser.parse_args()
    names = options.only or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")

    failed = []
    for name in names:
        growing = ["--no-baselines"] if name.startswith(GROWTH) else []
        for device in options.device[:1] if growing else options.device:
            _run("benchmarks.plans.profiles", name, "--device", device)
            profile = str(path_of(name, device))
            if _run("benchmarks.plans.compare", profile, "--out", str(options.out), *growing):
                failed.append(f"{name}.{device}")
    report.main(["--out", str(options.out), "--page", str(options.page)])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(module: str, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


if __name__ == "__main__":
    main()
