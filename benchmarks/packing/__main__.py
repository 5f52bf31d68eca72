"""Measure what packing saved tensors buys: `python -m benchmarks.packing [--only GPT-2] [--out FILE]`.

steps.py           GPT-2 and BERT planned with and without dropout masks as bits: real steps on this CPU
upper_bound.py     the share of saved bytes that could be packed, and plans for an H100 with free packing

Peaks are those that the allocator reports over a planned step, in a process of its own. Times are CPU times
of the thread; two planned models take steps in turn, and a ratio is the median over these pairs. Gradients
are compared with those of the plain model, bit for bit. Exit with 1 if a peak is not as predicted or a
gradient differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial

from benchmarks.child_process import run_in_child
from benchmarks.models import medium
from benchmarks.packing.steps import MODELS, Row, build_model, measure_model, price_of_packing, render_steps
from benchmarks.packing.upper_bound import ON_H100, bound_on_h100, render_bound, render_kinds, saved_bytes
from benchmarks.results import add_out_argument, write_result


def main() -> int:
    """Measure, and write the tables; return 1 if a row does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=MODELS, help="a model of the first table")
    parser.add_argument("--rounds", type=int, default=15)
    add_out_argument(parser)
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    began = time.monotonic()

    def progress(what: str) -> None:
        print(f"{what}: after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    rows: list[Row] = []
    for name in options.only or MODELS:
        rows += measure_model(name, partial(build_model, name), options.rounds)
        progress(name)
    kinds = {name: run_in_child(saved_bytes, name) for name in medium.MODELS}
    progress("saved bytes")
    bound: list[list[str]] = []
    for name in ON_H100:
        bound += run_in_child(bound_on_h100, name)
        progress(name)
    tables = [
        render_steps(rows, run_in_child(price_of_packing, options.rounds)),
        render_kinds(kinds),
        render_bound(bound),
    ]
    write_result("\n\n".join(tables), options.out)
    return int(not all(row.without.holds and row.packed.holds for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
