"""Compare our plans of a Liger-like Llama with torch's checkpoint around each of its blocks.

    python -m benchmarks.liger_like [--rounds 15] [--out FILE]

Norms, rotations, activations and the loss are Functions whose kernels PyTorch does not dispatch
(unseen_kernels/liger_like.py). One table has our minimum peak and the baseline's peak, both by the
allocator's record; the other has the times of steps planned at the baseline's peak. The steps of plain,
torch and ours rotate in one process, and the medians of the ratios are quoted. Gradients are compared with
the plain step's.

Exit with 1 if our minimum peak is above the baseline's, a gradient differs, or the step takes more than
`LIMIT` of the baseline's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.forked_call import run_in_child
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.measure.recording_overhead import host_times
from autoac.planner import InfeasibleBudget, Plan, find_minimum_peak, plan
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks.results import add_out_argument, markdown_table, write_result
from benchmarks.step_timing import keep_freed_memory, rotated, standard_error
from benchmarks.torch_checkpoint import wrap_blocks
from benchmarks.unseen_kernels.liger_like import LigerLikeLlama

LIMIT = 0.95  # of the step time, ours / torch's, at torch's peak
SAMPLES, LENGTH, VOCABULARY = 4, 128, 512


def make() -> LigerLikeLlama:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return LigerLikeLlama(vocabulary=VOCABULARY)


def tokens() -> Tensor:
    """Return the batch."""
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))


def in_checkpoints(model: LigerLikeLlama) -> None:
    wrap_blocks(model.blocks, "checkpoint")


class Trainee:
    """A model in training, with its batch."""

    def __init__(self, prepare: Callable[[LigerLikeLlama], object]) -> None:
        self.model, self.batch = make(), tokens()
        prepare(self.model)

    def step(self) -> None:
        self.model(self.batch).backward()

    def timed(self) -> float:
        """Return the seconds of a step that begins without gradients."""
        self.model.zero_grad()
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def peak_of(prepare: Callable[[LigerLikeLlama], object]) -> int:
    """Return the peak of the second step, including everything allocated before it."""
    with AllocatorTimeline() as timeline:
        trainee = Trainee(prepare)
        trainee.step()
        trainee.model.zero_grad()
        timeline.mark("step 2")
        trainee.step()
        del trainee
    return timeline.peak_since("step 2")


def planned(model: nn.Module, made: Plan) -> None:
    ac_client.apply(model, policy=made.policy())


def measure(rounds: int) -> tuple[str, bool]:
    """Return the tables, and True if the limits hold. Runs in a process of its own."""
    keep_freed_memory()
    torch.set_num_threads(1)
    found = profile(make(), tokens()).model_copy(update={"replay_us": host_times().replay_us})
    plain_peak, their_peak = peak_of(lambda model: None), peak_of(in_checkpoints)
    minimum = find_minimum_peak(found)
    smallest = plan(found, budget_bytes=minimum.found)
    our_peak = peak_of(partial(planned, made=smallest))
    at_their_peak: Plan | None = None
    try:
        at_their_peak = plan(found, budget_bytes=their_peak)
    except InfeasibleBudget:
        pass  # the first table says why: our minimum is above
    peaks = markdown_table(
        ("", "peak", "predicted", "recomputed ops"),
        [
            ("plain", format_bytes(plain_peak), "", 0),
            ("torch's checkpoint around each block", format_bytes(their_peak), "", ""),
            (
                "our minimum",
                format_bytes(our_peak),
                format_bytes(minimum.found),
                len(smallest.recompute_set),
            ),
        ],
    )
    plain, theirs = Trainee(lambda model: None), Trainee(in_checkpoints)
    ours = Trainee(partial(planned, made=at_their_peak or smallest))
    least = Trainee(partial(planned, made=smallest))
    trainees = {"plain": plain, "torch": theirs, "ours at torch's peak": ours, "ours at the minimum": least}
    for trainee in trainees.values():
        trainee.timed()
        trainee.timed()
    times: dict[str, list[float]] = {name: [] for name in trainees}
    for i in range(rounds):
        for name, trainee in rotated(list(trainees.items()), i):
            times[name].append(trainee.timed())
    equal = {
        name: all(map(torch.equal, trainee.gradients(), plain.gradients()))
        for name, trainee in trainees.items()
    }
    ratios = {name: [a / b for a, b in zip(times[name], times["torch"], strict=True)] for name in trainees}
    steps = markdown_table(
        ("", "step, ms", "/ torch's", "gradients equal to plain"),
        [
            (
                name,
                f"{statistics.median(times[name]) * 1e3:.1f}",
                f"{statistics.median(ratios[name]):.3f} ± {standard_error(ratios[name]):.3f}",
                "yes" if equal[name] else "no",
            )
            for name in trainees
        ],
    )
    holds = (
        our_peak <= their_peak
        and at_their_peak is not None
        and all(equal.values())
        and statistics.median(ratios["ours at torch's peak"]) <= LIMIT
    )
    return f"{peaks}\n\n{steps}", holds


def main() -> int:
    """Measure, and write the tables; return 1 if a limit does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    add_out_argument(parser)
    options = parser.parse_args()
    text, holds = run_in_child(measure, options.rounds)
    write_result(text, options.out)
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
