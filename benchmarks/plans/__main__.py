"""Profile, compare and report: `python -m benchmarks.plans [--only NAME] [--device DEVICE] [--page FILE]`.

Each model is compared in a process of its own, one after another; results of the same profile and code are
kept. `llama_l16` and its siblings show how planning time grows with layers, and have no baselines.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.plans import compare, report
from benchmarks.plans.profiles import CASES, DEVICES, path_of

GROWTH = "llama_l"  # prefix of models that differ only in layers


def main() -> None:
    """Run the command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--device", nargs="*", default=DEVICES, help=f"default: {', '.join(DEVICES)}")
    parser.add_argument("--out", type=Path, default=compare.OUT)
    parser.add_argument("--page", type=Path, metavar="FILE", help="default: stdout, without plots")
    options = parser.parse_args()
    names = options.only or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"--only must name models of {', '.join(CASES)}; got {', '.join(sorted(unknown))}")

    failed = []
    for name in names:
        growing = ["--no-baselines"] if name.startswith(GROWTH) else []
        for device in options.device[:1] if growing else options.device:
            _run("benchmarks.plans.profiles", name, "--device", device)
            profile = str(path_of(name, device))
            if _run("benchmarks.plans.compare", profile, "--out", str(options.out), *growing):
                failed.append(f"{name}.{device}")
    report.main(["--out", str(options.out), *(["--page", str(options.page)] if options.page else [])])
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run(module: str, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


if __name__ == "__main__":
    main()
