"""Compare predicted recompute time with the extra time that planned steps take.

    python -m benchmarks.recompute_time [--only GPT-2] [--rounds 60] [--out FILE]

Each model, of models/medium.py with a step of a second or more, is planned at several budgets from one
profile. Each round takes a profile, a plain step, and a planned step for each budget, in an order that
rotates, because the speed of a shared machine drifts by a quarter within minutes, and the profile's times
drift with it. The prediction is the median over the rounds' profiles of the same plan's recompute time; the
measurement is the median of the differences within rounds. Rounds end when the standard error is below
`PRECISION`, or at `--rounds`. The cost of recording is predicted too, as `report()` predicts it
(measure/recording_overhead.py).

Steps and profiles run on one thread and are timed by that thread's own CPU time, which other processes do not
add to. Each model runs in a process of its own, which returns no memory to the kernel (step_timing.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import ac_client
from ac_client.measure.forked_call import run_in_child
from ac_client.measure.recording_overhead import recording_us
from autoac.planner import Plan, Profile, bounds, build, find_minimum_peak, plan
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks.models import medium
from benchmarks.results import add_out_argument, markdown_table, write_result
from benchmarks.step_timing import forward_backward_s, keep_freed_memory, rotated, standard_error

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
    predicted_s: list[float] = field(default_factory=list)  # to recompute
    recording_s: list[float] = field(default_factory=list)  # predicted, in forward
    forward_s: list[float] = field(default_factory=list)  # measured: planned minus plain forward
    backward_s: list[float] = field(default_factory=list)  # measured: planned minus plain backward

    @property
    def predicted_extra_s(self) -> list[float]:
        return [sum(both) for both in zip(self.predicted_s, self.recording_s, strict=True)]

    @property
    def extra_s(self) -> list[float]:
        """Return the planned step's time minus the plain step's, by round."""
        return [sum(both) for both in zip(self.forward_s, self.backward_s, strict=True)]

    @property
    def is_precise(self) -> bool:
        """Return True if more rounds would change the measurement little."""
        return all(
            standard_error(values) <= PRECISION * statistics.median(values)
            for values in (self.extra_s, self.backward_s)
        )

    @property
    def backward_error(self) -> float:
        """Return the error of predicted recompute time, as a fraction of the extra time of backward."""
        return _error(self.predicted_s, self.backward_s)

    @property
    def step_error(self) -> float:
        """Return the error of predicted recompute and recording time, as a fraction of the extra time."""
        return _error(self.predicted_extra_s, self.extra_s)


def _error(predicted_s: Sequence[float], measured_s: Sequence[float]) -> float:
    measured = statistics.median(measured_s)
    return statistics.median(predicted_s) / measured - 1 if measured else float("inf")


def measure_model(model: str, most_rounds: int) -> list[Row]:
    """Profile, plan and measure one model. Runs in a process of its own."""
    keep_freed_memory()
    torch.set_num_threads(1)
    plain, batch = medium.build(model)
    forward_backward_s(plain, batch)
    plans = plan_budgets(profile(plain, **batch))
    models = []
    for one_plan in plans:
        planned, _ = medium.build(model)
        ac_client.apply(planned, policy=one_plan.policy())
        models.append(planned)
    return measure_rounds(model, plain, models, batch, plans, most_rounds)


def plan_budgets(taken: Profile) -> list[Plan]:
    """Return a plan for each of `BUDGETS`."""
    smallest = find_minimum_peak(taken, gap=0.3, time_limit_s=15).found
    largest = bounds(build(taken)).ceiling
    return [
        plan(taken, budget_bytes=int(smallest + (largest - smallest) * part), time_limit_s=15)
        for part in BUDGETS
    ]


def measure_rounds(
    name: str,
    plain: nn.Module,
    models: Sequence[nn.Module],
    batch: Mapping[str, Any],
    plans: Sequence[Plan],
    most_rounds: int,
) -> list[Row]:
    """Return the predicted and the measured times of each plan, from up to `most_rounds` rounds."""
    for model in [*models, *models, plain]:
        forward_backward_s(model, batch)
    recorded = [ac_client.applied(model).report().recorded for model in models]
    rows = [Row(name, p.budget, len(p.recompute_set)) for p in plans]
    for i in range(most_rounds):
        if i >= FEWEST_ROUNDS and all(row.is_precise for row in rows):
            break
        graph = build(profile(plain, **batch))
        recording_s = recording_us() / 1e6
        times = {model: forward_backward_s(model, batch) for model in rotated([plain, *models], i)}
        forward_s, backward_s = times[plain]
        for row, one_plan, ops, model in zip(rows, plans, recorded, models, strict=True):
            row.plain_s.append(forward_s + backward_s)
            row.predicted_s.append(recompute_us(graph, one_plan.save_set) / 1e6)
            row.recording_s.append(recording_s * ops)
            row.forward_s.append(times[model][0] - forward_s)
            row.backward_s.append(times[model][1] - backward_s)
    return rows


HEAD = (
    "model",
    "budget",
    "rounds",
    "recomputed ops",
    "plain step, ms",
    "predicted: recompute, ms",
    "recording, ms",
    "measured: backward, ms",
    "forward, ms",
    "step, ms",
    "step error",
    "backward error",
)


def render(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, under a summary."""
    step = sum(abs(row.step_error) <= TOLERANCE for row in rows)
    backward = sum(abs(row.backward_error) <= TOLERANCE for row in rows)
    lines = [
        [
            row.model,
            format_bytes(row.budget),
            len(row.plain_s),
            row.recomputed,
            _ms(row.plain_s),
            _ms(row.predicted_s),
            _ms(row.recording_s),
            *(
                f"{_ms(s)} ± {standard_error(s) * 1e3:.0f}"
                for s in (row.backward_s, row.forward_s, row.extra_s)
            ),
            f"{row.step_error:+.0%}",
            f"{row.backward_error:+.0%}",
        ]
        for row in rows
    ]
    return (
        f"torch {torch.__version__}, one thread, in its CPU time; medians over rounds of a profile, a plain "
        f"step and a planned one; ± is the standard error. Predicted recompute and recording time is within "
        f"{TOLERANCE:.0%} of the extra time of the step in {step} of {len(rows)} rows, and predicted "
        f"recompute time alone is within {TOLERANCE:.0%} of the extra time of backward in {backward}.\n\n"
        + markdown_table(HEAD, lines)
    )


def _ms(values_s: Sequence[float]) -> str:
    return f"{statistics.median(values_s) * 1e3:.0f}"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=MODELS, help="a model; may be repeated")
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="at most, for each model")
    add_out_argument(parser)
    options = parser.parse_args()
    rows: list[Row] = []
    for model in options.only or MODELS:
        rows += run_in_child(measure_model, model, options.rounds)
        print(*render(rows).splitlines()[-len(BUDGETS) :], sep="\n", file=sys.stderr, flush=True)
    write_result(render(rows), options.out)


if __name__ == "__main__":
    main()
