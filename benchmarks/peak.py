"""Compare the predicted and the measured peak of planned steps, optimizer included, over the zoo.

    python -m benchmarks.peak [--only GPT-2*] [--out FILE]

Every model of models/tiny.py trains in float32 and under bf16 autocast, with SGD, Adam and Adafactor, over
one microbatch and over two. One process profiles, and plans at a budget halfway between the minimum peak
and the plain step's peak. A second process trains two steps under that plan with `ac_client.apply`. The
allocator records the second process from before its first tensor, so the measured peak includes everything
and none of our own counting.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.forked_call import run_in_child
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Policy, bounds, build, find_minimum_peak, plan
from autoac.planner.units import format_bytes
from autoac.profiler import observe
from benchmarks.models import tiny
from benchmarks.models.batches import Batch
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.steps import loss_of

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
    """A model and the way that it is trained."""

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
class PlannedCase:
    """The plan of a case. Bytes."""

    minimum_peak: int
    save_all_peak: int
    budget: int
    predicted: int
    recomputed: int  # ops


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    case: Case
    planned: PlannedCase
    measured: int  # bytes

    @property
    def error(self) -> float:
        """Return the excess of the measured peak over the predicted one, as a fraction."""
        return self.measured / self.planned.predicted - 1

    @property
    def is_over_budget(self) -> bool:
        return self.measured > self.planned.budget


def cases() -> Iterator[Case]:
    for model, precision, optimizer, n in itertools.product(ZOO, PRECISIONS, OPTIMIZERS, MICROBATCHES):
        yield Case(model, precision, optimizer, n)


def build_training(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Batch]:
    """Return the model, its optimizer, and a batch that requires no gradients."""
    torch.manual_seed(0)
    entry = ZOO[case.model]
    model = entry.make().train()
    batch = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in entry.batch().items()}
    return model, OPTIMIZERS[case.optimizer](model.parameters()), batch


def plan_case(case: Case) -> tuple[PlannedCase, str]:
    """Profile and plan; return the plan's figures and its policy as JSON. Runs in a process of its own."""
    model, optimizer, batch = build_training(case)
    with case.casting():
        profile = observe(model, (), batch, optimizer=optimizer, accumulates=case.microbatches > 1)
    minimum_peak = find_minimum_peak(profile, gap=0.3, time_limit_s=20).found
    save_all_peak = bounds(build(profile)).ceiling
    budget = (minimum_peak + save_all_peak) // 2
    policy = plan(profile, budget_bytes=budget, gap=0.2).policy()
    recomputed = sum(decision == "recompute" for decision in policy.decisions.values())
    figures = PlannedCase(minimum_peak, save_all_peak, budget, policy.predicted.peak_bytes, recomputed)
    return figures, policy.to_json()


def measure_peak(case: Case, policy: str) -> int:
    """Return the allocator's peak over two planned steps, in bytes. Runs in a process of its own."""
    with AllocatorTimeline() as timeline:
        model, optimizer, batch = build_training(case)
        ac_client.apply(model, policy=Policy.from_json(policy), optimizer=optimizer, strict=True)
        timeline.mark("steps")
        for _ in range(2):
            train_step(case, model, optimizer, batch)
    return timeline.peak_since("steps")


def train_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Train one step. The outputs of a microbatch are freed before the next one begins."""
    for left in reversed(range(case.microbatches)):
        with case.casting():
            out = model(**batch)
        loss_of(out).backward()
        if left:
            del out
    optimizer.step()
    optimizer.zero_grad()


def measure_row(case: Case) -> Row:
    """Plan in one process and train in another."""
    planned, policy = run_in_child(plan_case, case)
    return Row(case, planned, run_in_child(measure_peak, case, policy))


HEAD = (
    *("model", "precision", "optimizer", "microbatches", "minimum peak", "save-all peak", "budget"),
    *("recomputed ops", "predicted, bytes", "measured, bytes", "error"),
)


def cells(row: Row) -> list[object]:
    planned = row.planned
    sizes = (planned.minimum_peak, planned.save_all_peak, planned.budget)
    return [
        *asdict(row.case).values(),
        *map(format_bytes, sizes),
        planned.recomputed,
        f"{planned.predicted:,}",
        f"{row.measured:,}",
        f"{row.error:+.3%}",
    ]


def render(rows: list[Row]) -> str:
    """Return the table as Markdown, under a summary."""
    within = sum(abs(r.error) <= 0.01 for r in rows)
    exact = sum(r.measured == r.planned.predicted for r in rows)
    worst = max(rows, key=lambda r: abs(r.error))
    models = {r.case.model for r in rows}
    return (
        f"torch {torch.__version__}, one thread. {len(rows)} rows over {len(models)} models: {exact} as "
        f"predicted to the byte, {within} within 1 %, {sum(r.is_over_budget for r in rows)} over budget"
        + (f"; the worst {worst.error:+.2%} ({worst.case.name})." if worst.error else ".")
        + f"\n\n{markdown_table(HEAD, map(cells, rows))}"
    )


def main() -> int:
    """Measure the rows, and write the table; return 1 if a step exceeded its budget."""
    options = bench_parser(__doc__).parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(1)  # oneDNN takes more workspace with more threads
    by_name = {case.name: case for case in cases()}
    rows = shown((measure_row(by_name[name]) for name in chosen(by_name, options.only)), cells)
    write_result(render(rows), options.out)
    return int(any(r.is_over_budget for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
