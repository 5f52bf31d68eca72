"""Measure the table: `python -m benchmarks.demo_table [--pairs N] [--out FOLDER]`. About 9 minutes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ac_client.demo.demo_page import render_page
from ac_client.demo.terminal import facts
from ac_client.files import write_whole
from benchmarks.demo_table.table import data, markdown, render_checks, run


def main() -> int:
    """Measure, print Markdown, write JSON and the page; return 1 if a binding promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21, help="timed pairs of steps in each row")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for the results")
    arguments = parser.parse_args()
    table = run(pairs=arguments.pairs, on_row=_print_row)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_whole(arguments.out / "demo.json", json.dumps(data(table), indent=1) + "\n")
    write_whole(arguments.out / "demo.html", render_page(table.comparison))
    print(f"{table.comparison.setting.describe()}; {facts(table.comparison)}\n")
    print(f"{markdown(table)}\n\n{render_checks(table.comparison)}")
    return int(table.comparison.failed)


def _print_row(row: str, number: int, of: int) -> None:
    print(f"row {number} of {of}: {row}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
