"""Train loops as people write them, or random ones, planned at a budget, and compare with plain.

    python -m benchmarks.loops [--on cpu|standin] [--only PATTERN ...] [--shares 0.6 0.1]
                               [--above minimum|static]
    python -m benchmarks.loops --random 1000 | --seeds SEED ... [--on cpu|standin]
    python -m benchmarks.loops --pipelines [--only PATTERN ...] [--shares 0.6 0.1]

Each written loop runs plainly first, then with a budget that nothing fits, whose error gives the smallest
peak, then at shares of the way from that (with `--above static`: from the bytes between steps and the
gradients) to plain's peak. For random loops see random_loops.py, for pipelines pipelines.py.
Each step's peak is the device's: of the stand-in's counter, or on a CPU, from the fourth step on, of an
allocator's record.

The table has a row for each loop and budget, in which nothing depends on the machine's speed, so two tables
can be compared with `diff`. The faults that the verdict names:

- *crash*, *refused*: the run ended, though the loop runs at this budget with other means;
- *bits differ*: weights or gradients are not plain's, in the steps of these numbers;
- *over in silence*: steps above the budget without a warning in that step, or an earlier one that lasts;
- *over, said a step later*: the warning came in the step after;
- *kept by checkpoints* (random loops): a warning says that the budget cannot be kept;
- *above checkpoint* (pipelines): the smallest peak is larger than with torch's checkpoint around each block;
- *false words*: warnings of measured steps, and no step was over;
- *never planned*: every step ran without a plan;
- *planned again*: plans and observed steps after the loop has repeated four times.

Contents are not compared: that takes up to 2 MiB in the first step of each plan, half of what these models
hold.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import chosen

if TYPE_CHECKING:
    from benchmarks.loops.runs import Meter, Row

ROOT = Path(__file__).resolve().parents[2]


def examine(
    name: str, loop: Callable[[Any], None], meter: Callable[[], Meter], shares: list[float], above: str
) -> Iterator[Row]:
    """Yield the rows of a written loop."""
    from benchmarks.loops.runs import Row, Run, judged
    from benchmarks.loops.written_loops import BEGINS

    of_plain, begins = meter(), BEGINS.get(name, 0)
    plain = Run(loop, of_plain, None, 5 + begins)
    if plain.error is not None:
        yield Row(name, 0, 0, faults=(f"crash: without a plan: {plain.error!r}",))
        return
    most, least = max(plain.peaks), of_plain.rest + plain.gradient_nbytes
    if above == "minimum":
        refused = Run(loop, meter(), 1)
        found: int | None = getattr(refused.error, "smallest_found", None)
        if found is None:
            yield Row(name, 1, most, faults=(f"no smallest peak: {refused.error!r}",))
            return
        least = found
    for share in shares:
        budget = int(least + share * max(0, most - least))
        run = Run(loop, meter(), budget, 5 + begins)
        yield judged(f"{name} {share}", budget, plain, run, begins=begins)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--on", choices=("cpu", "standin"), default="cpu")
    parser.add_argument("--only", nargs="+", metavar="PATTERN")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.1])
    parser.add_argument("--above", choices=("minimum", "static"), default="minimum")
    parser.add_argument("--random", type=int, metavar="LOOPS")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--pipelines", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    if options.on == "standin":
        from standin import cuda  # type: ignore[import-not-found]
        from standin.library import library  # type: ignore[import-not-found]

        cuda.load(library())
    import torch

    from benchmarks.loops import random_loops, runs
    from benchmarks.loops.written_loops import LARGE, LOOPS

    torch.set_num_threads(1)
    meter = runs.OnCpu if options.on == "cpu" else runs.OnStandin

    def rows() -> Iterator[Row]:
        if options.random or options.seeds:
            for seed in options.seeds or range(options.random):
                yield random_loops.tried(random_loops.drawn(seed), meter)
            return
        if options.pipelines:
            from benchmarks.loops import pipelines

            yield from pipelines.rows(options.shares, options.only)
            return
        small = (name for name in LOOPS if name not in LARGE)
        for name in chosen(LOOPS, options.only) if options.only else small:
            yield from examine(name, LOOPS[name], meter, options.shares, options.above)

    print("|", " | ".join(runs.HEAD), "|")
    print("|", " | ".join(["---"] * len(runs.HEAD)), "|")
    faults, bad = Counter[str](), 0
    for row in rows():
        print("|", " | ".join(row.cells()), "|", flush=True)
        faults.update(fault.partition(":")[0] for fault in row.faults)
        bad += bool(row.faults)
    print(f"\n{bad} rows with faults", *(f"{n} {kind}" for kind, n in faults.most_common()), sep="; ")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
