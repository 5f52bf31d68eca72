"""Compare predicted recompute time with the extra time that planned steps take, and time profiles.

    python -m benchmarks.recompute_time [--only GPT-2] [--rounds 60] [--out FILE]

Each model, of models/medium.py with a step of a second or more, is planned at several budgets from one
profile. Each round takes a profile, a plain step, and a planned step for each budget, in an order that
rotates, because the speed of a shared machine drifts by a quarter within minutes, and the profile's times
drift with it. The prediction is the median over the rounds' profiles of the same plan's recompute time; the
measurement is the median of the differences within rounds. Rounds end when the standard error is below
`PRECISION`, or at `--rounds`. The cost of recording is predicted too, as `report()` predicts it:
`RECORDED_OP_US` for each recorded op.

Steps and profiles run on one thread and are timed by that thread's own CPU time, which other processes do not
add to. Each model runs in a process of its own, which returns no memory to the kernel (steps.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import truediv

import torch

import ac_client
from ac_client.measure.forked_call import run_in_child
from ac_client.measure.report import RECORDED_OP_US
from autoac.planner import Plan, Profile, bounds, build, find_minimum_peak, plan
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks.models import medium
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.steps import Trainee, keep_freed_memory, rotated, standard_error

MODELS = ("GPT-2", "BERT", "T5", "U-Net")
BUDGETS = (0.05, 0.3)  # positions between the minimum peak and the plain step's peak
TOLERANCE = 0.15
FEWEST_ROUNDS, MOST_ROUNDS = 15, 60
PRECISION = 0.05  # standard error, as a fraction of the measurement, at which rounds end


@dataclass(slots=True)
class Row:
    """A model at a budget, with one entry per round. Times in seconds."""

    model: str
    budget: int  # bytes
    recomputed: int  # ops
    plain_s: list[float] = field(default_factory=list)  # a plain step
    profile_s: list[float] = field(default_factory=list)  # a profile
    predicted_s: list[float] = field(default_factory=list)  # to recompute
    recording_s: list[float] = field(default_factory=list)  # predicted
    extra_s: list[float] = field(default_factory=list)  # measured: planned minus plain step

    @property
    def is_precise(self) -> bool:
        """Return True if more rounds would change the measurement little."""
        return standard_error(self.extra_s) <= PRECISION * statistics.median(self.extra_s)

    @property
    def error(self) -> float:
        """Return the error of predicted recompute and recording time, as a fraction of the extra time."""
        predicted = map(sum, zip(self.predicted_s, self.recording_s, strict=True))
        measured = statistics.median(self.extra_s)
        return statistics.median(predicted) / measured - 1 if measured else float("inf")


def measure_model(model: str, most_rounds: int) -> list[Row]:
    """Profile, plan and measure one model. Runs in a process of its own."""
    keep_freed_memory()
    torch.set_num_threads(1)
    plain = Trainee(*medium.build(model))
    plain.step()
    plans = plan_budgets(profile(plain.model, **plain.batch))
    trainees = []
    for one_plan in plans:
        trainees.append(Trainee(*medium.build(model)))
        ac_client.apply(trainees[-1].model, policy=one_plan.policy())
    return measure_rounds(model, plain, trainees, plans, most_rounds)


def plan_budgets(taken: Profile) -> list[Plan]:
    """Return a plan for each of `BUDGETS`."""
    smallest = find_minimum_peak(taken, gap=0.3, time_limit_s=15).found
    largest = bounds(build(taken)).ceiling
    return [
        plan(taken, budget_bytes=int(smallest + (largest - smallest) * part), time_limit_s=15)
        for part in BUDGETS
    ]


def measure_rounds(
    name: str, plain: Trainee, trainees: Sequence[Trainee], plans: Sequence[Plan], most_rounds: int
) -> list[Row]:
    """Return the predicted and the measured times of each plan, from up to `most_rounds` rounds."""
    for trainee in [*trainees, *trainees, plain]:
        trainee.step()
    recorded = [ac_client.applied(trainee.model).report().recorded for trainee in trainees]
    rows = [Row(name, p.budget, len(p.recompute_set)) for p in plans]
    for i in range(most_rounds):
        if i >= FEWEST_ROUNDS and all(row.is_precise for row in rows):
            break
        began = time.thread_time()
        graph = build(profile(plain.model, **plain.batch))
        profile_s = time.thread_time() - began
        times = {trainee: trainee.seconds() for trainee in rotated([plain, *trainees], i)}
        for row, one_plan, ops, trainee in zip(rows, plans, recorded, trainees, strict=True):
            row.plain_s.append(times[plain])
            row.profile_s.append(profile_s)
            row.predicted_s.append(recompute_us(graph, one_plan.save_set) / 1e6)
            row.recording_s.append(RECORDED_OP_US / 1e6 * ops)
            row.extra_s.append(times[trainee] - times[plain])
    return rows


HEAD = (
    *("model", "budget", "recomputed ops", "plain step, ms", "predicted: recompute + recording, ms"),
    *("measured: extra, ms", "error", "profile / step"),
)


def cells(row: Row) -> list[object]:
    return [
        row.model,
        format_bytes(row.budget),
        row.recomputed,
        _ms(row.plain_s),
        f"{_ms(row.predicted_s)} + {_ms(row.recording_s)}",
        f"{_ms(row.extra_s)} ± {standard_error(row.extra_s) * 1e3:.0f}",
        f"{row.error:+.0%}",
        f"{statistics.median(map(truediv, row.profile_s, row.plain_s)):.2f}",
    ]


def render(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, under a summary."""
    within = sum(abs(row.error) <= TOLERANCE for row in rows)
    return (
        f"torch {torch.__version__}, one thread, in its CPU time; medians over rounds of a profile, a plain "
        f"step and a planned one; ± is the standard error. Within {TOLERANCE:.0%}: {within} of {len(rows)} "
        f"rows.\n\n{markdown_table(HEAD, map(cells, rows))}"
    )


def _ms(values_s: Sequence[float]) -> str:
    return f"{statistics.median(values_s) * 1e3:.0f}"


def main() -> None:
    """Measure, and write the table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="at most, for each model")
    options = parser.parse_args()
    names = chosen(MODELS, options.only)
    measured = (run_in_child(measure_model, name, options.rounds) for name in names)
    write_result(render(shown(chain.from_iterable(measured), cells)), options.out)


if __name__ == "__main__":
    main()
