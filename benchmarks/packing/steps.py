"""Train with and without dropout masks as bits: peaks, recompute times and step times of planned models.

For each model the smallest peak is searched, without packing and with it. Then both ways are planned at
budgets between the smallest peak without packing and the save-all peak.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.measure.recording_overhead import replay_us
from autoac.planner import Plan, Policy, Profile, bounds, build, plan
from autoac.planner.minimum_peak import WORK_LIMIT, search_minimum_peak
from autoac.planner.problem.graph import SaveSet
from autoac.planner.solver.start.search_problem import Problem
from autoac.planner.solver.time_limit import Allowance, Stopwatch
from autoac.planner.solver.variables import Options
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from autoac.profiler.packing.dropout_masks import PackedMask
from benchmarks.child_process import run_in_child
from benchmarks.models import medium
from benchmarks.models.batches import ModelAndBatch
from benchmarks.results import markdown_table
from benchmarks.step_timing import forward_backward_s, keep_freed_memory, rotated, standard_error

MODELS = ("GPT-2", "BERT")
SAMPLES = 4  # of the batch
BUDGETS = (0.02, 0.1, 0.25, 0.5)  # positions between the minimum peak and the save-all peak
GAP = 0.02
ELEMENTS = 3 * 4 * 256 * 256  # of the mask whose packing is timed by itself
TIME_LIMIT_S = 60.0

Builder = Callable[[], ModelAndBatch]


@dataclass(slots=True)
class Planned:
    """A model under a plan. Sizes in bytes, times in seconds."""

    masks: int  # that are packed
    predicted: int  # peak
    recompute_us: float
    policy: str
    measured: int = 0  # peak
    equal: bool = False  # its gradients and those of the plain model
    steps_s: list[float] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.equal and self.measured == self.predicted


@dataclass(slots=True)
class Row:
    """A model at a budget, planned without packing and with it."""

    model: str
    budget: int  # bytes; 0: each at its smallest peak
    masks: int  # of the model
    without: Planned
    packed: Planned

    @property
    def ratios(self) -> list[float]:
        """Return the step time with packing as a fraction of the one without, by round."""
        pairs = zip(self.packed.steps_s, self.without.steps_s, strict=True)
        return [packed / without for packed, without in pairs]


def build_model(name: str, samples: int = SAMPLES) -> ModelAndBatch:
    """Return a model of models/medium.py with attention as separate ops, so that its masks are tensors."""
    model, batch = medium.build(name)
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    return model, {key: value[:samples] for key, value in batch.items()}


def planned(found: Plan) -> Planned:
    return Planned(len(found.graph.packs), found.peak, found.recompute_us, found.policy().to_json())


def smallest(taken: Profile, options: Options) -> Plan:
    """Return the plan at the smallest peak that is found."""
    allowance = Allowance(WORK_LIMIT, Stopwatch(TIME_LIMIT_S), None)
    least = search_minimum_peak(Problem(build(taken), options), allowance, GAP)
    return plan_within(taken, options, least.found, [least.save_set])


def plan_within(taken: Profile, options: Options, budget: int, start: Iterable[SaveSet] = ()) -> Plan:
    return plan(taken, budget_bytes=budget, gap=GAP, start=start, options=options)


def plan_model(name: str, builder: Builder) -> list[Row]:
    """Plan the model at its smallest peaks and at each of `BUDGETS`. Runs in a process of its own."""
    keep_freed_memory()
    torch.set_num_threads(1)
    model, batch = builder()
    taken = profile(model, **batch).model_copy(update={"replay_us": replay_us()})
    both = Options(packing=False), Options()
    without, packed = (planned(smallest(taken, options)) for options in both)
    rows = [Row(name, 0, len(taken.packable), without, packed)]
    largest = bounds(build(taken)).ceiling
    for part in BUDGETS:
        budget = int(without.predicted + (largest - without.predicted) * part)
        ways = (planned(plan_within(taken, options, budget)) for options in both)
        rows.append(Row(name, budget, len(taken.packable), *ways))
    return rows


def peak_of(builder: Builder, subject: Planned) -> int:
    """Return the peak of the second planned step in bytes. Runs in a process of its own."""
    torch.set_num_threads(1)
    with AllocatorTimeline() as timeline:
        model, batch = builder()
        ac_client.apply(model, policy=Policy.from_json(subject.policy), strict=True)
        forward_backward_s(model, batch)
        model.zero_grad()
        timeline.mark("step 2")
        forward_backward_s(model, batch)
    return timeline.peak_since("step 2")


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def time_steps(builder: Builder, row: Row, rounds: int) -> Row:
    """Compare gradients with the plain model's, and time both steps. Runs in a process of its own."""
    keep_freed_memory()
    torch.set_num_threads(1)
    plain, batch = builder()
    forward_backward_s(plain, batch)
    models = []
    for subject in (row.without, row.packed):
        model, _ = builder()
        ac_client.apply(model, policy=Policy.from_json(subject.policy), strict=True)
        forward_backward_s(model, batch)
        subject.equal = all(map(torch.equal, gradients(model), gradients(plain)))
        models.append((subject, model))
    for i in range(rounds):
        for subject, model in rotated(models, i):
            model.zero_grad()
            subject.steps_s.append(sum(forward_backward_s(model, batch)))
    return row


def measure_model(name: str, builder: Builder, rounds: int) -> list[Row]:
    """Plan, then measure peaks, gradients and times."""
    rows = []
    for row in run_in_child(plan_model, name, builder):
        for subject in (row.without, row.packed):
            subject.measured = run_in_child(peak_of, builder, subject)
        rows.append(run_in_child(time_steps, builder, row, rounds))
    return rows


def price_of_packing(rounds: int) -> str:
    """Return a line with the times to draw a mask, to pack it, and to unpack it."""
    torch.set_num_threads(1)
    mask = torch.empty(ELEMENTS).bernoulli_(0.9).div_(0.9)
    packed = PackedMask(mask)
    ways: dict[str, Callable[[], object]] = {
        "draw": lambda: torch.empty(ELEMENTS).bernoulli_(0.9).div_(0.9),
        "pack": lambda: PackedMask(mask),
        "unpack": packed.unpack,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds):
        for way, run in rotated(list(ways.items()), i):
            began = time.thread_time()
            run()
            times[way].append(time.thread_time() - began)
    listed = ", ".join(f"{way} {statistics.median(values) * 1e3:.2f}" for way, values in times.items())
    return f"{ELEMENTS:,} elements, ms: {listed}."


HEAD = (
    "model",
    "budget",
    "masks as bits",
    "peak without: predicted, measured",
    "peak with: predicted, measured",
    "recompute without, ms",
    "recompute with, ms",
    "step, with / without",
    "holds",
)


def render_steps(rows: list[Row], price: str) -> str:
    """Return the table as Markdown."""
    lines = [
        [
            row.model,
            format_bytes(row.budget) if row.budget else "smallest",
            f"{row.packed.masks} of {row.masks}",
            *(f"{subject.predicted:,}, {subject.measured:,}" for subject in (row.without, row.packed)),
            *(f"{subject.recompute_us / 1e3:.0f}" for subject in (row.without, row.packed)),
            f"{statistics.median(row.ratios):.3f} ± {standard_error(row.ratios):.3f}",
            "yes" if row.without.holds and row.packed.holds else "no",
        ]
        for row in rows
    ]
    return f"torch {torch.__version__}, one thread, in its CPU time. {price}\n\n{markdown_table(HEAD, lines)}"
