"""Predicted and measured peak of a planned step, optimizer included, over the zoo -> docs/peaks.md.

    python -m benchmarks.peak [--only GPT-2] [--again]

For every model of models/tiny.py, in float32 and under bf16 autocast, with SGD, Adam and Adafactor, over one
microbatch and over two: one process profiles and plans at a budget half way between the smallest peak that
was found and the plain step's, and another one trains two steps under that plan with `ac_client.apply`. The
second one is watched by the allocator from before the first tensor is made, so what it reports is all that
there is, and nothing of it is ours. Results are kept under build/bench/peaks until the code changes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ac_client
from ac_client.files import write_whole
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Policy, bounds, build, find_minimum_peak, plan
from autoac.planner.units import format_bytes
from autoac.profiler import observe
from benchmarks.models import tiny

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "bench" / "peaks"
TABLE = ROOT / "docs" / "peaks.md"

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-3),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=1e-3),
}
PRECISIONS = ("fp32", "bf16 autocast")
MICROBATCHES = (1, 2)
ZOO = {entry.name: entry for entry in tiny.ZOO}


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and how."""

    model: str  # of the zoo
    precision: str
    optimizer: str
    microbatches: int  # whose gradients add up before the optimizer's step

    @property
    def name(self) -> str:
        return f"{self.model}, {self.precision}, {self.optimizer}, {self.microbatches} x"

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Planned:
    """What was decided for a case. Bytes."""

    smallest: int  # peak that was found
    ceiling: int
    budget: int
    predicted: int
    recomputed: int  # ops
    policy: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table. Bytes."""

    case: Case
    smallest: int
    ceiling: int
    budget: int
    predicted: int
    measured: int
    recomputed: int  # ops

    @property
    def off(self) -> float:
        """How far the measured peak is above the predicted one, as a part of it."""
        return self.measured / self.predicted - 1


def cases() -> Iterator[Case]:
    """All rows, in order."""
    for model, precision, optimizer, n in itertools.product(ZOO, PRECISIONS, OPTIMIZERS, MICROBATCHES):
        yield Case(model, precision, optimizer, n)


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """The model, its optimizer, and a batch that wants no gradients."""
    torch.manual_seed(0)
    entry = ZOO[case.model]
    model = entry.make().train()
    batch = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in entry.batch().items()}
    return model, OPTIMIZERS[case.optimizer](model.parameters()), batch


def planned(case: Case) -> Planned:
    """Profile and plan; run it in a process of its own."""
    model, optimizer, batch = made(case)
    with case.casting():
        found = observe(model, (), batch, optimizer=optimizer, accumulates=case.microbatches > 1)
    graph = build(found)
    smallest, ceiling = find_minimum_peak(found, gap=0.3, time_limit_s=20).found, bounds(graph).ceiling
    budget = (smallest + ceiling) // 2
    decided = plan(found, budget_bytes=budget, gap=0.2)
    policy = decided.policy()
    return Planned(
        smallest,
        ceiling,
        budget,
        policy.predicted.peak_bytes,
        sum(decision == "recompute" for decision in policy.decisions.values()),
        policy.to_json(),
    )


def measured(case: Case, policy: str) -> int:
    """The most bytes that the allocator had given out in two planned steps; in a process of its own."""
    with AllocatorTimeline() as timeline:
        model, optimizer, batch = made(case)
        ac_client.apply(model, policy=Policy.from_json(policy), optimizer=optimizer, strict=True)
        timeline.mark("steps")
        for _ in range(2):
            train(case, model, optimizer, batch)
    return timeline.peak_since("steps")


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    """One step. The outputs of a microbatch go before the next one begins."""
    for left in reversed(range(case.microbatches)):
        with case.casting():
            out = model(**batch)
        (out["loss"] if isinstance(out, dict) else out.loss).backward()
        if left:
            del out
    optimizer.step()
    optimizer.zero_grad()


def row(case: Case) -> Row:
    """Plan in one process, train in another."""
    decided = alone(planned, case)
    peak = alone(measured, case, decided.policy)
    return Row(
        case, decided.smallest, decided.ceiling, decided.budget, decided.predicted, peak, decided.recomputed
    )


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a call in a process of its own, which starts with nothing allocated.

    Forked, so that nothing is imported again: this process must not have run a kernel on several threads.

    Raises:
        RuntimeError: the process failed; its traceback is on stderr.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        there.send(function(*args))

    child = context.Process(target=run)
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__}{args[:1]} failed; see above") from None
    finally:
        child.join()


@functools.cache
def code() -> str:
    """Identifies the code that the numbers come from, torch included."""
    digest = hashlib.sha256(torch.__version__.encode())
    files = [Path(__file__)]
    for folder in ("benchmarks/models", "profiler", "planner", "ac_client"):
        files += sorted((ROOT / folder).rglob("*.py"))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def kept(case: Case) -> Path:
    """Where the row of a case is kept."""
    name = "-".join(map(str, asdict(case).values())).replace(" ", "_")
    return KEPT / code() / f"{name}.json"


def load(path: Path) -> Row:
    """A row that was kept."""
    data = json.loads(path.read_text("utf-8"))
    return Row(**{**data, "case": Case(**data["case"])})


def render(rows: list[Row]) -> str:
    """The page."""
    within = sum(abs(r.off) <= 0.01 for r in rows)
    exact = sum(r.measured == r.predicted for r in rows)
    worst = max(rows, key=lambda r: abs(r.off))
    over = sum(r.measured > r.budget for r in rows)
    models = {r.case.model for r in rows}
    lines = [
        "# Predicted and measured peaks",
        "",
        "Made by `make bench-peak`, not by hand. docs/memory-model.md says what counts.",
        "",
        f"torch {torch.__version__}, one thread. {len(rows)} rows over {len(models)} models: {exact} as "
        f"predicted to the byte, {within} within 1 %, {over} over budget"
        + (f"; the worst {worst.off:+.2%} ({worst.case.name})." if worst.off else "."),
        "",
        "MinimumPeak is the smallest peak that was found, ceiling the plain step's; the budget is half way. "
        "Gradients of two microbatches add up. No row was corrected.",
        "",
        "| model | precision | optimizer | microbatches | floor | ceiling | budget | recomputed ops "
        "| predicted, bytes | measured, bytes | off by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        cells = [r.case.model, r.case.precision, r.case.optimizer, r.case.microbatches]
        cells += [format_bytes(r.smallest), format_bytes(r.ceiling), format_bytes(r.budget), r.recomputed]
        cells += [f"{r.predicted:,}", f"{r.measured:,}", f"{r.off:+.3%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure what is not kept, write the table; 1 if a step went over its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="a model of the zoo; may be given again")
    parser.add_argument("--again", action="store_true", help="measure what is kept as well")
    parser.add_argument("--out", type=Path, default=TABLE, help="the page, written if all models were run")
    given = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    code()  # as it was when it was imported
    torch.set_num_threads(1)  # oneDNN takes more workspace with more threads
    wanted = [case for case in cases() if not given.only or case.model in given.only]
    if not wanted:
        parser.error(f"no model is called {given.only}: there are {', '.join(ZOO)}")
    rows = []
    for number, case in enumerate(wanted, 1):
        path, began = kept(case), time.monotonic()
        if given.again or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(asdict(row(case)), indent=1) + "\n")
        rows.append(load(path))
        print(
            f"{number} of {len(wanted)}: {case.name}: {rows[-1].off:+.3%} ({time.monotonic() - began:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
    page = render(rows)
    if given.only:
        print(page)
    else:
        write_whole(given.out, page)
    return int(any(r.measured > r.budget for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
