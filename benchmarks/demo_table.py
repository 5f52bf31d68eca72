"""Measure the full table of the demo: `python -m benchmarks.demo_table [--pairs N] [--out FOLDER]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ac_client.demo import demo
from ac_client.demo.page import render_page
from ac_client.demo.table import markdown, render_checks, render_facts
from ac_client.files import write_whole


def main() -> int:
    """Measure, print Markdown, and write JSON and the page; return 1 if the demo failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21, help="timed pairs of steps in each row")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for the results")
    given = parser.parse_args()
    result = demo.run(pairs=given.pairs, on_row=_say)
    given.out.mkdir(parents=True, exist_ok=True)
    write_whole(given.out / "demo.json", json.dumps(result.data(), indent=1) + "\n")
    write_whole(given.out / "demo.html", render_page(result))
    print(f"{result.setting.describe()}; {render_facts(result)}\n")
    print(f"{markdown(result)}\n\n{render_checks(result)}")
    return int(result.failed)


def _say(row: str, number: int, of: int) -> None:
    print(f"row {number} of {of}: {row}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
