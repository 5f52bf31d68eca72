"""Compare real training steps at equal measured peak, on a CPU or on a GPU.

    python -m benchmarks.public.training [--device cuda] [--only GPT-2] [--rounds 9] [--out FILE]

Each other way to recompute takes steps first, and its peak is measured. That peak is the budget of our plan:
its predicted peak, its measured peak, and the time of both steps, in turn, are reported. The other ways:

- checkpoint: `torch.utils.checkpoint` around each block;
- selective: the same, with the outputs of matmuls, convolutions and attention saved;
- xformers-style: the same, with a program for each block that saves the most run time in half of its bytes
  (torch's copy of xformers' program, `torch.distributed._tools.sac_ilp`);
- activation_memory_budget: `torch.compile` with the backend "aot_eager", so that kernels are the same as in
  eager mode, and half of the memory that saving everything takes.

Peaks are the allocator's, of a whole step. Times on a CPU are CPU time of one thread, on a GPU events of its
stream. Gradients are compared with the plain model's, bit for bit. Each model runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import ac_client
from ac_client.doctor.sample_models import FULL, SAMPLES, Sample
from ac_client.doctor.sample_training import release_memory
from ac_client.measure.forked_call import run_in_child
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.measure.recording_overhead import host_times
from autoac.planner import InfeasibleBudget, Policy, plan
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks import step_time
from benchmarks.public.torch_ways import Prepare, TrainingCase, ways
from benchmarks.results import add_out_argument, markdown_table, write_result
from benchmarks.step_timing import keep_freed_memory, loss_of, rotated, standard_error

CPU_MODELS = ("GPT-2", "Llama", "ViT", "ResNet")
BATCH = 2  # samples of a step on a CPU


class Machine(Protocol):
    """The device that steps run on."""

    device: torch.device

    def peak_of(self, make: Callable[[], Trainee]) -> int:
        """Return the peak of the third step of a new trainee; compiled models compile in the first."""

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the seconds that `call` takes."""


class Cpu:
    """One thread of this machine's CPU."""

    device = torch.device("cpu")

    def peak_of(self, make: Callable[[], Trainee]) -> int:
        with AllocatorTimeline() as timeline:  # begins before the model, so that it knows all that is live
            trainee = make()
            trainee.step()
            trainee.step()
            timeline.mark("third step")
            trainee.step()
            del trainee
        return timeline.peak_since("third step")

    def seconds_of(self, call: Callable[[], object]) -> float:
        began = time.thread_time()
        call()
        return time.thread_time() - began


class Gpu:
    """A GPU of this machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def peak_of(self, make: Callable[[], Trainee]) -> int:
        release_memory()
        before = torch.cuda.memory_allocated(self.device)  # of the plain model, which stays for its times
        trainee = make()
        trainee.step()
        trainee.step()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        trainee.step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def seconds_of(self, call: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


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


class Trainee:
    """A model in training, from a fixed seed."""

    def __init__(self, case: TrainingCase, device: torch.device, prepare: Prepare) -> None:
        self.model, batch = case.make()
        self.model.to(device)
        self.batch: dict[str, Any] = {
            k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()
        }
        self.call = prepare(self.model)

    def step(self) -> None:
        torch.manual_seed(0)
        self.model.zero_grad()
        out = self.call(**self.batch)
        (out if isinstance(out, Tensor) else loss_of(out)).backward()

    def gradients(self) -> list[Tensor]:
        return [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]


def _apply(policy: Policy, model: nn.Module) -> nn.Module:
    ac_client.apply(model, policy=policy)
    return model


def leave_plain(model: nn.Module) -> nn.Module:
    """Return the model unchanged."""
    return model


def measure_case(case: TrainingCase, machine: Machine, rounds: int) -> list[TrainingRow]:
    """Return a row for each other way. Runs in a process of its own."""
    trainee = partial(Trainee, case, machine.device)
    plain = trainee(leave_plain)
    taken = profile(plain.model, **plain.batch)
    if machine.device.type == "cpu":
        taken = taken.model_copy(update={"replay_us": host_times().replay_us})
    plain.step()
    expected = plain.gradients()
    rows = []
    for way, prepare in ways(case, taken).items():
        try:
            peak = machine.peak_of(partial(trainee, prepare))
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
        row.ours = machine.peak_of(partial(trainee, apply))
        theirs, ours = trainee(prepare), trainee(apply)
        for one in (theirs, ours, theirs, ours):
            one.step()
        row.equal = all(map(torch.equal, ours.gradients(), expected))
        row.theirs_equal = all(map(torch.equal, theirs.gradients(), expected))
        turns = [(row.theirs_s, theirs), (row.ours_s, ours), (row.plain_s, plain)]
        for i in range(rounds):
            for times, one in rotated(turns, i):
                times.append(machine.seconds_of(one.step))
        del theirs, ours, turns
    return rows


HEAD = (
    *("model", "other way", "its peak", "our peak", "error of ours", "gradients"),
    *("its step / plain", "our step / plain", "ours / its"),
)


def render(rows: Sequence[TrainingRow], device: str) -> str:
    """Return the table as Markdown, the largest ratio first, under a summary."""
    done = sorted((r for r in rows if r.ours_s), key=lambda row: -statistics.median(row.ratios))
    exact = sum(row.predicted == row.ours for row in done)
    lines = [
        [
            *(row.case, row.way, format_bytes(row.theirs or 0), format_bytes(row.ours or 0)),
            f"{(row.ours or 0) / (row.predicted or 1) - 1:+.2%}",
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
        [row.case, row.way, "" if row.theirs is None else format_bytes(row.theirs), row.note, *[""] * 5]
        for row in rows
        if not row.ours_s
    ]
    broken = sum(not row.holds for row in rows)
    return (
        f"{device}, torch {torch.__version__}: {exact} of {len(done)} peaks as predicted to the byte, "
        f"{broken} over budget or with other gradients.\n\n{markdown_table(HEAD, lines)}"
    )


def _median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def cpu_cases() -> dict[str, TrainingCase]:
    """Return models whose step takes a second on a CPU, with the start of their batches."""

    def blocks(name: str, model: nn.Module) -> list[nn.Module]:
        return [m for path, m in model.named_modules() if re.fullmatch(step_time.BLOCKS[name], path)]

    return {
        name: TrainingCase(name, partial(step_time.build, name, BATCH), partial(blocks, name))
        for name in CPU_MODELS
    }


def gpu_cases() -> dict[str, TrainingCase]:
    """Return the models of `autoac doctor --gpu`, in float32."""

    def make(sample: Sample) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        return sample.make(FULL).train(), dict(sample.batch(FULL))

    def blocks(model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("blocks").children())

    return {sample.name: TrainingCase(sample.name, partial(make, sample), blocks) for sample in SAMPLES}


def _on_cpu(case: TrainingCase, rounds: int) -> list[TrainingRow]:
    keep_freed_memory()
    torch.set_num_threads(1)
    return measure_case(case, Cpu(), rounds)


def main() -> int:
    """Measure, and write the table; return 1 if a step of ours goes over budget or computes otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public.training", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--only", action="append", metavar="MODEL", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=9)
    add_out_argument(parser)
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    device = torch.device(options.device)
    cases = cpu_cases() if device.type == "cpu" else gpu_cases()
    if unknown := set(options.only or ()) - set(cases):
        parser.error(f"--only must name models of {', '.join(cases)}; got {', '.join(sorted(unknown))}")
    rows: list[TrainingRow] = []
    for name in options.only or cases:
        if device.type == "cpu":
            rows += run_in_child(_on_cpu, cases[name], options.rounds)
        else:
            torch.cuda.set_device(device)
            rows += measure_case(cases[name], Gpu(device), options.rounds)
        print(f"{name}: done", file=sys.stderr, flush=True)
    label = "CPU, one thread" if device.type == "cpu" else torch.cuda.get_device_name(device)
    write_result(render(rows, label), options.out)
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
