"""Step time at equal peak: our plans beside torch's checkpoints, whole and selective.

    python -m benchmarks.step_time [--only GPT-2] [--rounds 15] [--samples 2] [--clock wall]

For each of six models of medium.py: blocks are wrapped in `torch.utils.checkpoint`, whole and selective
(matmuls, convolutions and attention saved), and the peak of a whole step is measured by the allocator's own
record. The plain model is planned with each of these peaks as its budget, and its peak is measured likewise.
Then all four and the plain model take steps in turn, in an order that changes, and each round gives one
ratio ours / theirs for each baseline; the median of the rounds is printed with its standard error. Gradients
are compared with the baseline's bit for bit. Each model runs in a process of its own, on one thread, which
gives no memory back to the kernel (`recompute_time.keep_memory`).

The exit status is 1 if a ratio is above `MOST`, a peak is above its budget, or a gradient differs.
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
from ac_client.demo.baselines import (
    BASELINES,
    SAVED_BY_SELECTIVE,
    Baseline,
    replayed_us,
    wrap_blocks,
)
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.measure.recording_overhead import replay_us
from autoac.planner import Policy, plan
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks.models import medium
from benchmarks.models.batches import ModelAndBatch
from benchmarks.peak import alone
from benchmarks.recompute_time import error, keep_memory

BLOCKS = {
    "GPT-2": r"transformer\.h\.\d+",
    "Llama": r"model\.layers\.\d+",
    "T5": r"(en|de)coder\.block\.\d+",
    "ViT": r"vit\.(encoder\.layer|layers)\.\d+",
    "ResNet": r"resnet\.encoder\.stages\.\d+\.layers\.\d+",
    "Mamba": r"backbone\.layers\.\d+",
}
"""The six models, and what the paths of their blocks look like."""

SAVED = (*SAVED_BY_SELECTIVE, "aten.convolution.default")

MOST: dict[Baseline, float] = {"checkpoint": 0.93, "selective": 0.80}
"""The largest part of the baseline's time that a step of ours may take."""

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


@dataclass(slots=True)
class Row:
    """A model beside one baseline. Times in seconds."""

    model: str
    baseline: Baseline
    peak: int  # of the baseline, measured, in bytes
    ours: int  # of our step under that budget, measured
    recomputed: int  # ops of ours
    recompute_part: float  # our predicted recompute time, as a part of the baseline's
    equal: bool  # gradients, bit for bit
    plain_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    ours_s: list[float] = field(default_factory=list)

    @property
    def least(self) -> float:
        """Return the plain step's time as a part of the baseline's: no plan takes less."""
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
        return self.equal and self.ours <= self.peak and self.ratio <= MOST[self.baseline]


def made(name: str, samples: int) -> ModelAndBatch:
    """The model of models/medium.py, and the first `samples` of its batch; 0: all of them."""
    model, batch = medium.build(name)
    return model, {key: value[:samples] if samples else value for key, value in batch.items()}


class Trainee:
    """A model in training."""

    def __init__(self, name: str, samples: int, prepare: Callable[[nn.Module], object]) -> None:
        self.model, self._batch = made(name, samples)
        prepare(self.model)

    def step(self) -> None:
        """Forward and backward; gradients are made anew in each."""
        torch.manual_seed(0)
        out = self.model(**self._batch)
        (out["loss"] if isinstance(out, dict) else out.loss).backward()

    def timed(self, clock: Callable[[], float]) -> float:
        """Seconds of a step."""
        self.model.zero_grad()
        began = clock()
        self.step()
        return clock() - began

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def peak_of(name: str, samples: int, prepare: Callable[[nn.Module], object]) -> int:
    """The most bytes live in the second step, all that is there before it included."""
    with AllocatorTimeline() as timeline:
        trainee = Trainee(name, samples, prepare)
        trainee.step()
        trainee.model.zero_grad()
        timeline.mark("step 2")
        trainee.step()
        del trainee
    return timeline.peak_since("step 2")


def block_paths(name: str, model: nn.Module) -> list[str]:
    """The paths of the model's blocks."""
    return [path for path, _ in model.named_modules() if re.fullmatch(BLOCKS[name], path)]


def checkpointed(name: str, baseline: Baseline, model: nn.Module) -> None:
    """Wrap the blocks of `model`."""
    paths = block_paths(name, model)
    assert paths
    wrap_blocks([model.get_submodule(path) for path in paths], baseline, SAVED)


def rows(name: str, samples: int, rounds: int, clock: str) -> list[Row]:
    """Measure one model; run it in a process of its own."""
    keep_memory()
    torch.set_num_threads(1)
    model, batch = made(name, samples)
    found = profile(model, **batch).model_copy(update={"replay_us": replay_us()})
    paths = block_paths(name, model)
    del model
    result: list[Row] = []
    plain, plain_s = Trainee(name, samples, lambda model: model), list[float]()
    plain.timed(time.perf_counter)
    turns = [(plain_s, plain)]
    for baseline in BASELINES:
        wrap = partial(checkpointed, name, baseline)
        peak = peak_of(name, samples, wrap)
        policy: Policy = (decided := plan(found, budget_bytes=peak)).policy()
        apply = partial(ac_client.apply, policy=policy)
        row = Row(
            name,
            baseline,
            peak,
            peak_of(name, samples, apply),
            len(decided.recompute_set),
            decided.recompute_us / replayed_us(found, paths, baseline, SAVED),
            equal=True,
        )
        theirs, ours = Trainee(name, samples, wrap), Trainee(name, samples, apply)
        for trainee in (theirs, ours, ours):
            trainee.timed(time.perf_counter)
        row.equal = all(map(torch.equal, ours.gradients(), theirs.gradients()))
        turns += [(row.theirs_s, theirs), (row.ours_s, ours)]
        result.append(row)
    for i in range(rounds):
        first = i % len(turns)
        for times, trainee in turns[first:] + turns[:first]:
            times.append(trainee.timed(CLOCKS[clock]))
    for row in result:
        row.plain_s = plain_s
    return result


def render(found: list[Row], clock: str) -> str:
    """The table."""
    lines = [
        f"torch {torch.__version__}, one thread, {clock} time, medians over {len(found[0].ours_s)} rounds; "
        "± is the standard error.",
        "",
        "| model | beside | its peak | our peak | recomputed ops | our recompute / theirs, predicted "
        "| their step, ms | our step, ms | plain / theirs | ours / theirs | at most | holds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        cells = [
            row.model,
            row.baseline,
            format_bytes(row.peak),
            format_bytes(row.ours),
            str(row.recomputed),
            f"{row.recompute_part:.2f}",
            f"{statistics.median(row.theirs_s) * 1e3:.0f}",
            f"{statistics.median(row.ours_s) * 1e3:.0f}",
            f"{row.least:.3f}",
            f"{row.ratio:.3f} ± {error(row.ratios):.3f}",
            f"{MOST[row.baseline]:.2f}",
            "yes" if row.holds else "gradients differ" if not row.equal else "no",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(BLOCKS), help="may be given again")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--samples", type=int, default=2, help="of the batch; 0: all, a step of a second")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu on a busy machine")
    given = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    found: list[Row] = []
    for name in given.only or BLOCKS:
        began = time.monotonic()
        found += alone(rows, name, given.samples, given.rounds, given.clock)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(render(found, given.clock))
    return int(not all(row.holds for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
