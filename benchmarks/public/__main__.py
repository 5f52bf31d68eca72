"""Compare planners on public graphs: `make bench-public`, or

    python -m benchmarks.public [GRAPHS ...] [--page FILE]

GRAPHS are files or folders with graphs that were fetched by hand (the README next to this file says how). Own
and random graphs are always part of it. Rows go to build/bench/public/, the page to FILE, its picture and
its CSV file next to it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.public import instances, page
from benchmarks.public.run import Row, run_all
from benchmarks.results import ROOT, write_result

OUT = ROOT / "build" / "bench" / "public"
STEPS = "steps.md"  # in OUT: the table of `benchmarks.public.training`, if it ran
ROWS = TypeAdapter(list[Row])


def main() -> None:
    """Run the command in the module docstring; exit with 1 if a schedule breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public", description=__doc__)
    parser.add_argument("graphs", nargs="*", type=Path, metavar="GRAPHS")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="graphs whose names begin so")
    parser.add_argument("--cap", type=float, default=20.0, help="seconds for Checkmate's program")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the rows")
    parser.add_argument("--page", type=Path, metavar="FILE", help="default: OUT/public-benchmark.md")
    options = parser.parse_args()
    if missing := [str(path) for path in options.graphs if not path.exists()]:
        parser.error(f"GRAPHS must be files or folders, got {', '.join(missing)}")

    sources = [*instances.given(options.graphs), *instances.own()]
    if options.only is not None:
        sources = [s for s in sources if s[0].startswith(tuple(options.only))]
    began = time.perf_counter()
    rows = list(run_all(sources, options.cap, options.processes))
    write_result(ROWS.dump_json(rows, indent=1).decode(), options.out / "rows.json")
    target = options.page or options.out / "public-benchmark.md"
    steps = options.out / STEPS
    page.write(rows, target, steps.read_text().strip() if steps.exists() else "")
    print(page.summary(rows))
    print(f"{target}, after {time.perf_counter() - began:.0f} s")
    if broken := [row for row in rows if row.violation]:
        for row in broken:
            print(f"violation: {row.planner} on {row.graph} at {row.budget}: {row.note}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
