"""Compare the step time of our plans with torch's checkpoints at equal peak.

    python -m benchmarks.step_time [--only GPT-2] [--rounds 15] [--samples 2] [--clock wall] [--out FILE]

For each of six models of models/medium.py, wrap the blocks in `torch.utils.checkpoint`, whole and selective
(matmuls, convolutions and attention saved), and measure the peak of a whole step by the allocator's record.
Plan the plain model with each of these peaks as its budget, and measure its peak likewise. Then the plain
model and the four others take steps in an order that rotates; each round gives one ratio ours / theirs for
each baseline, and the median is printed with its standard error. Gradients are compared with the baseline's
bit for bit. Each model runs in a process of its own, on one thread.

Exit with 1 if a ratio is above `LIMIT`, a peak is above its budget, or a gradient differs.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.forked_call import run_in_child
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.measure.recording_overhead import host_times
from autoac.planner import plan
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks.models import medium
from benchmarks.models.batches import ModelAndBatch
from benchmarks.results import add_out_argument, markdown_table, write_result
from benchmarks.step_timing import keep_freed_memory, loss_of, rotated, standard_error
from benchmarks.torch_checkpoint import BASELINES, SAVED_BY_SELECTIVE, Baseline, replayed_us, wrap_blocks

# The paths of each model's blocks.
BLOCKS = {
    "GPT-2": r"transformer\.h\.\d+",
    "Llama": r"model\.layers\.\d+",
    "T5": r"(en|de)coder\.block\.\d+",
    "ViT": r"vit\.(encoder\.layer|layers)\.\d+",
    "ResNet": r"resnet\.encoder\.stages\.\d+\.layers\.\d+",
    "Mamba": r"backbone\.layers\.\d+",
}

SAVED = (*SAVED_BY_SELECTIVE, "aten.convolution.default")

LIMIT: dict[Baseline, float] = {"checkpoint": 0.93, "selective": 0.80}  # of ours / theirs

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(slots=True)
class Row:
    """A model compared with one baseline. Times in seconds."""

    model: str
    baseline: Baseline
    peak: int  # of the baseline, measured, in bytes
    ours: int  # of our step under that budget, measured
    recomputed: int  # ops of ours
    recompute_ratio: float  # our predicted recompute time, as a fraction of the baseline's
    equal: bool  # gradients, bit for bit
    plain_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    ours_s: list[float] = field(default_factory=list)

    @property
    def plain_ratio(self) -> float:
        """Return the plain step's time as a fraction of the baseline's; no plan can be faster."""
        pairs = zip(self.plain_s, self.theirs_s, strict=True)
        return statistics.median(plain / theirs for plain, theirs in pairs)

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool:
        return self.equal and self.ours <= self.peak and self.ratio <= LIMIT[self.baseline]


def build(name: str, samples: int) -> ModelAndBatch:
    """Return a model of models/medium.py and the first `samples` of its batch, or all if `samples` is 0."""
    model, batch = medium.build(name)
    return model, {key: value[:samples] if samples else value for key, value in batch.items()}


class Trainee:
    """A model in training."""

    def __init__(self, name: str, samples: int, prepare: Callable[[nn.Module], object]) -> None:
        self.model, self._batch = build(name, samples)
        prepare(self.model)

    def step(self) -> None:
        """Run forward and backward."""
        torch.manual_seed(0)
        out = self.model(**self._batch)  # lives through backward, as in most training loops
        loss_of(out).backward()

    def timed(self, clock: Callable[[], float]) -> float:
        """Return the seconds of a step that begins without gradients."""
        self.model.zero_grad()
        began = clock()
        self.step()
        return clock() - began

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def peak_of(name: str, samples: int, prepare: Callable[[nn.Module], object]) -> int:
    """Return the peak of the second step, including everything allocated before it."""
    with AllocatorTimeline() as timeline:
        trainee = Trainee(name, samples, prepare)
        trainee.step()
        trainee.model.zero_grad()
        timeline.mark("step 2")
        trainee.step()
        del trainee
    return timeline.peak_since("step 2")


def block_paths(name: str, model: nn.Module) -> list[str]:
    """Return the module paths of the model's blocks."""
    return [path for path, _ in model.named_modules() if re.fullmatch(BLOCKS[name], path)]


def wrap_in_checkpoint(name: str, baseline: Baseline, model: nn.Module) -> None:
    """Wrap the blocks of `model` as the baseline does."""
    paths = block_paths(name, model)
    assert paths
    wrap_blocks([model.get_submodule(path) for path in paths], baseline, SAVED)


def measure_model(name: str, samples: int, rounds: int, clock: str) -> list[Row]:
    """Measure one model. Runs in a process of its own."""
    keep_freed_memory()
    torch.set_num_threads(1)
    model, batch = build(name, samples)
    taken = profile(model, **batch).model_copy(update={"replay_us": host_times().replay_us})
    paths = block_paths(name, model)
    del model
    result: list[Row] = []
    plain, plain_s = Trainee(name, samples, lambda model: model), list[float]()
    plain.timed(time.perf_counter)
    turns = [(plain_s, plain)]
    for baseline in BASELINES:
        wrap = partial(wrap_in_checkpoint, name, baseline)
        peak = peak_of(name, samples, wrap)
        one_plan = plan(taken, budget_bytes=peak)
        apply = partial(ac_client.apply, policy=one_plan.policy())
        row = Row(
            name,
            baseline,
            peak,
            peak_of(name, samples, apply),
            len(one_plan.recompute_set),
            one_plan.recompute_us / replayed_us(taken, paths, baseline, SAVED),
            equal=True,
        )
        theirs, ours = Trainee(name, samples, wrap), Trainee(name, samples, apply)
        for trainee in (theirs, ours, ours):
            trainee.timed(time.perf_counter)
        row.equal = all(map(torch.equal, ours.gradients(), theirs.gradients()))
        turns += [(row.theirs_s, theirs), (row.ours_s, ours)]
        result.append(row)
    for i in range(rounds):
        for times, trainee in rotated(turns, i):
            times.append(trainee.timed(CLOCKS[clock]))
    for row in result:
        row.plain_s = plain_s
    return result


HEAD = (
    "model",
    "baseline",
    "its peak",
    "our peak",
    "recomputed ops",
    "recompute, ours / theirs, predicted",
    "their step, ms",
    "our step, ms",
    "plain / theirs",
    "ours / theirs",
    "limit",
    "holds",
)


def render(rows: list[Row], clock: str) -> str:
    """Return the table as Markdown."""
    lines = [
        [
            row.model,
            row.baseline,
            format_bytes(row.peak),
            format_bytes(row.ours),
            row.recomputed,
            f"{row.recompute_ratio:.2f}",
            f"{statistics.median(row.theirs_s) * 1e3:.0f}",
            f"{statistics.median(row.ours_s) * 1e3:.0f}",
            f"{row.plain_ratio:.3f}",
            f"{row.ratio:.3f} ± {standard_error(row.ratios):.3f}",
            f"{LIMIT[row.baseline]:.2f}",
            "yes" if row.holds else "gradients differ" if not row.equal else "no",
        ]
        for row in rows
    ]
    return (
        f"torch {torch.__version__}, one thread, {clock} time, medians over {len(rows[0].ours_s)} rounds; "
        f"± is the standard error.\n\n{markdown_table(HEAD, lines)}"
    )


def main() -> int:
    """Measure, and write the table; return 1 if a row does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(BLOCKS), help="a model; may be repeated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--samples", type=int, default=2, help="of the batch; 0: all of them, a step of a second"
    )
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu on a busy machine")
    add_out_argument(parser)
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows: list[Row] = []
    for name in options.only or BLOCKS:
        began = time.monotonic()
        rows += run_in_child(measure_model, name, options.samples, options.rounds, options.clock)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    write_result(render(rows, options.clock), options.out)
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
