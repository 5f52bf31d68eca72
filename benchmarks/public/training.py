"""Compare real training steps at equal measured peak, on a CPU (on a GPU: benchmarks/gpu_quarter.py).

    python -m benchmarks.public.training [--only GPT-2] [--rounds 9] [--out FILE]

Each other way to recompute takes steps first, and its peak is measured. That peak is the budget of our plan:
its predicted peak, its measured peak, and the time of both steps, in turn, are reported. The other ways:

- checkpoint: `torch.utils.checkpoint` around each block;
- selective: the same, with the outputs of matmuls, convolutions and attention saved;
- xformers-style: the same, with a program for each block that saves the most run time in half of its bytes
  (torch's copy of xformers' program, `torch.distributed._tools.sac_ilp`);
- activation_memory_budget: `torch.compile` with the backend "aot_eager", so that kernels are the same as in
  eager mode, and half of the memory that saving everything takes.

Peaks are the allocator's, of a whole step; times are CPU time of one thread. Gradients are compared with the
plain model's, bit for bit. Each model runs in a process of its own.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

import ac_client
from ac_client.measure.forked_call import run_in_child
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import InfeasibleBudget, Policy, plan
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks.models import medium
from benchmarks.models.batches import ModelAndBatch
from benchmarks.public.torch_ways import Prepare, TrainingCase, ways
from benchmarks.results import bench_parser, chosen, markdown_table, write_result
from benchmarks.steps import Trainee, keep_freed_memory, rotated, standard_error

BLOCKS = {  # paths by model
    "GPT-2": r"transformer\.h\.\d+",
    "Llama": r"model\.layers\.\d+",
    "ViT": r"vit\.(encoder\.layer|layers)\.\d+",
    "ResNet": r"resnet\.encoder\.stages\.\d+\.layers\.\d+",
}
BATCH = 2  # samples of a step


def peak_of(make: Callable[[], Trainee]) -> int:
    """Return the peak of the third step of a new trainee; compiled models compile in the first."""
    with AllocatorTimeline() as timeline:  # begins before the model, so that it knows all that is live
        trainee = make()
        trainee.step()
        trainee.step()
        timeline.mark("third step")
        trainee.step()
        del trainee
    return timeline.peak_since("third step")


@dataclass(slots=True)
class TrainingRow:
    """Our plan and another way at the other's peak. Bytes and seconds."""

    case: str
    way: str
    theirs: int | None  # the measured peak of the other way; None: it does not run
    predicted: int | None = None  # of our plan
    ours: int | None = None  # measured
    equal: bool = False  # our gradients and the plain model's, bit for bit
    theirs_equal: bool = False
    note: str = ""
    theirs_s: list[float] = field(default_factory=list)
    ours_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]

    @property
    def holds(self) -> bool:
        """Return True unless our step goes over budget or computes other gradients."""
        return self.ours is None or (self.equal and self.ours <= (self.theirs or 0))


def prepared(case: TrainingCase, prepare: Prepare) -> Trainee:
    """Return the case in training, its model changed by `prepare`."""
    model, batch = case.make()
    return Trainee(model, batch, prepare(model))


def _apply(policy: Policy, model: nn.Module) -> nn.Module:
    ac_client.apply(model, policy=policy)
    return model


def leave_plain(model: nn.Module) -> nn.Module:
    """Return the model unchanged."""
    return model


def measure_case(case: TrainingCase, rounds: int) -> list[TrainingRow]:
    """Return a row for each other way. Runs in a process of its own."""
    keep_freed_memory()
    torch.set_num_threads(1)
    trainee = partial(prepared, case)
    plain = trainee(leave_plain)
    taken = profile(plain.model, **plain.batch)
    plain.step()
    expected = plain.gradients()
    rows = []
    for way, prepare in ways(case, taken).items():
        try:
            peak = peak_of(partial(trainee, prepare))
        except Exception as error:  # noqa: BLE001  # a way may not run on a model; the row names it
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            rows.append(TrainingRow(case.name, way, None, note=reason))
            continue
        row = TrainingRow(case.name, way, peak)
        rows.append(row)
        try:
            our_plan = plan(taken, budget_bytes=peak)
        except InfeasibleBudget as error:
            smallest = error.smallest_found
            row.note = f"ours needs {format_bytes(smallest)}" if smallest else "infeasible"
            continue
        row.predicted = our_plan.peak
        apply = partial(_apply, our_plan.policy())
        row.ours = peak_of(partial(trainee, apply))
        theirs, ours = trainee(prepare), trainee(apply)
        for one in (theirs, ours, theirs, ours):
            one.step()
        row.equal = all(map(torch.equal, ours.gradients(), expected))
        row.theirs_equal = all(map(torch.equal, theirs.gradients(), expected))
        turns = [(row.theirs_s, theirs), (row.ours_s, ours), (row.plain_s, plain)]
        for i in range(rounds):
            for times, one in rotated(turns, i):
                times.append(one.seconds())
        del theirs, ours, turns
    return rows


HEAD = (
    *("model", "other way", "its peak", "gradients"),
    *("its step / plain", "our step / plain", "ours / its"),
)


def render(rows: Sequence[TrainingRow]) -> str:
    """Return the table as Markdown, the largest ratio first, under a summary."""
    done = sorted((r for r in rows if r.ours_s), key=lambda row: -statistics.median(row.ratios))
    exact = sum(row.predicted == row.ours for row in done)
    lines = [
        [
            *(row.case, row.way, format_bytes(row.theirs or 0)),
            "equal"
            if row.equal and row.theirs_equal
            else "theirs differ"
            if row.equal
            else "**ours differ**",
            f"{_median_ratio(row.theirs_s, row.plain_s):.3f}",
            f"{_median_ratio(row.ours_s, row.plain_s):.3f}",
            f"{statistics.median(row.ratios):.3f} ± {standard_error(row.ratios):.3f}",
        ]
        for row in done
    ]
    lines += [
        [row.case, row.way, "" if row.theirs is None else format_bytes(row.theirs), row.note, *[""] * 3]
        for row in rows
        if not row.ours_s
    ]
    broken = sum(not row.holds for row in rows)
    return (
        f"CPU, one thread, torch {torch.__version__}: {exact} of {len(done)} peaks as predicted to the byte, "
        f"{broken} over budget or with other gradients.\n\n{markdown_table(HEAD, lines)}"
    )


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def case_of(name: str) -> TrainingCase:
    """Return a model whose step takes a second, with the start of its batch."""

    def make() -> ModelAndBatch:
        model, batch = medium.build(name)
        return model, {key: value[:BATCH] for key, value in batch.items()}

    def blocks(model: nn.Module) -> list[nn.Module]:
        return [module for path, module in model.named_modules() if re.fullmatch(BLOCKS[name], path)]

    return TrainingCase(name, make, blocks)


def measure_model(name: str, rounds: int) -> list[TrainingRow]:
    return measure_case(case_of(name), rounds)


def main() -> int:
    """Measure, and write the table; return 1 if a step of ours goes over budget or computes otherwise."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows: list[TrainingRow] = []
    for name in chosen(BLOCKS, options.only):
        rows += run_in_child(measure_model, name, options.rounds)
        print(f"{name}: done", file=sys.stderr, flush=True)
    write_result(render(rows), options.out)
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
