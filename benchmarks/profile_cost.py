"""Measure the memory and time that a profile costs.

    python -m benchmarks.profile_cost [--only GPT-2] [--pairs 5] [--out FILE]

Each model of models/medium.py runs in a process of its own, on one thread.

*Memory*: the allocator's record of an observed step and of a plain step, each above what was allocated
before, as for a step that adds to gradients.

*Time*: plain steps and whole profiles take turns; the median of the ratios is quoted, in CPU time of the
thread, which other processes do not add to. *Fake*: Llama 3 8B on the meta device for an H100, profiled
twice in a process that has imported everything, in CPU seconds of all its threads; resident memory is the
kernel's count, imports included.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ac_client.measure.forked_call import run_in_child
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner.units import format_bytes
from autoac.profiler import DATASHEETS, profile
from autoac.profiler.observed_step import ObservedStep
from autoac.profiler.steps.training_loop import TrainingStep
from benchmarks.models import medium
from benchmarks.models.large import llama
from benchmarks.results import add_out_argument, markdown_table, write_result
from benchmarks.step_timing import forward_backward_s

PAIRS = 5
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """The cost of a model's profile, compared with a plain step."""

    model: str
    plain_nbytes: int  # peak above what was allocated before
    observed_nbytes: int
    plain_s: float
    ratios: Sequence[float]  # time of a profile / time of a plain step, of each pair

    @property
    def memory(self) -> float:
        return self.observed_nbytes / self.plain_nbytes

    @property
    def time(self) -> float:
        return statistics.median(self.ratios)


@dataclass(frozen=True, slots=True)
class FakeCost:
    """The cost of two fake profiles of Llama 3 8B in one process."""

    ops: int
    seconds: Sequence[float]
    resident_nbytes: int  # peak


def measure_row(model: str, pairs: int) -> Row:
    """Measure one model. Runs in a process of its own."""
    torch.set_num_threads(1)
    plain, batch = medium.build(model)
    forward_backward_s(plain, batch)  # allocates the gradients
    step = ObservedStep(plain, (), batch, CPU)
    step.run(TrainingStep(plain, (), batch), lambda _leaves: None)
    observed_nbytes = step.peak_nbytes - step.profile(plain).static.total
    with AllocatorTimeline() as timeline:
        forward_backward_s(plain, batch)
    ratios, steps = [], []
    for _ in range(pairs):
        steps.append(sum(forward_backward_s(plain, batch)))
        began = time.thread_time()
        profile(plain, **batch)
        ratios.append((time.thread_time() - began) / steps[-1])
    return Row(model, timeline.peak_bytes, observed_nbytes, statistics.median(steps), ratios)


def measure_fake() -> FakeCost:
    """Profile Llama 3 8B twice. Runs in a process of its own."""
    torch.set_num_threads(2)
    seconds = []
    for _ in range(2):
        began = time.process_time()
        model, batch = llama(32)
        taken = profile(model, **batch, on=DATASHEETS["h100"])
        seconds.append(time.process_time() - began)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return FakeCost(len(taken.ops), seconds, resident)


HEAD = (
    "model",
    "plain step, ms",
    "plain peak",
    "observed peak",
    "observed / plain",
    "profile / step",
)


def render(rows: Sequence[Row], fake: FakeCost) -> str:
    """Return the table as Markdown, under a summary."""
    lean = sum(row.memory <= 1 / 2 for row in rows)
    quick = sum(row.time <= 2 for row in rows)
    first, second = fake.seconds
    lines = [
        [
            row.model,
            f"{row.plain_s * 1e3:.0f}",
            format_bytes(row.plain_nbytes),
            format_bytes(row.observed_nbytes),
            f"{row.memory:.2f}",
            f"{row.time:.2f}",
        ]
        for row in rows
    ]
    return (
        f"torch {torch.__version__}, one thread, {min(len(row.ratios) for row in rows)} pairs of a step "
        f"and a profile. An observed step needs at most half of the memory in {lean} of {len(rows)} "
        f"models, and a profile takes at most 2 plain steps in {quick}.\n\n"
        f"{markdown_table(HEAD, lines)}\n\n"
        f"A fake profile of Llama 3 8B, 1 x 8192 tokens, for an H100 ({fake.ops} ops) takes {first:.1f} CPU "
        f"seconds, and a second one in the same process {second:.1f}, imports not counted. Resident memory "
        f"peaks at {format_bytes(fake.resident_nbytes)}, imports included."
    )


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=medium.MODELS, help="a model; may be repeated")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    add_out_argument(parser)
    options = parser.parse_args()
    fake = run_in_child(measure_fake)
    rows = []
    for model in options.only or medium.MODELS:
        rows.append(run_in_child(measure_row, model, options.pairs))
        print(f"{model}: {rows[-1].memory:.2f} of the memory, {rows[-1].time:.2f} steps", file=sys.stderr)
    write_result(render(rows, fake), options.out)


if __name__ == "__main__":
    main()
