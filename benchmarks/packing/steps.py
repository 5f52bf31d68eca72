"""Train with dropout masks of one bit per element: peaks, recompute times and step times of planned models.

For each model the smallest peak is searched with masks of floating-point numbers, as torch has them on a CPU,
and with all masks as bits. Then both are planned at budgets between the smallest and the save-all peak. Here
only those masks are bits that the plan without would draw again: packing takes time, and where a mask can be
saved as it is, packing does not pay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.measure.recording_overhead import replay_us
from autoac.planner import Plan, Policy, Profile, bounds, build, find_minimum_peak, plan
from autoac.planner.problem.graph import SaveSet
from autoac.planner.units import format_bytes
from autoac.profiler import profile
from benchmarks.child_process import run_in_child
from benchmarks.models import medium
from benchmarks.models.batches import ModelAndBatch
from benchmarks.packing.packed_dropout import mask_bits, pack_masks, times_mask
from benchmarks.results import markdown_table
from benchmarks.step_timing import forward_backward_s, keep_freed_memory, rotated, standard_error

MODELS = ("GPT-2", "BERT")
SAMPLES = 4  # of the batch
BUDGETS = (0.02, 0.1, 0.25, 0.5)  # positions between the minimum peak and the save-all peak
GAP = 0.02
ELEMENTS = 3 * 4 * 256 * 256  # of the masks that are packed one at a time

NONE: frozenset[int] = frozenset()
DRAW = "/aten.bernoulli_.float#"  # in the key of the op that draws a mask

Builder = Callable[[], ModelAndBatch]


@dataclass(slots=True)
class Planned:
    """A model under a plan. Sizes in bytes, times in seconds."""

    masks: frozenset[int] | None  # positions of the masks that are packed; None: all
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
    """A model at a budget, with masks as torch has them and with some of them as bits."""

    model: str
    budget: int  # bytes; 0: each at its smallest peak
    masks: int  # of the model
    without: Planned
    packed: Planned

    @property
    def ratios(self) -> list[float]:
        """Return the step time with bits as a fraction of the one without, by round."""
        pairs = zip(self.packed.steps_s, self.without.steps_s, strict=True)
        return [packed / without for packed, without in pairs]


def build_model(name: str, samples: int = SAMPLES) -> ModelAndBatch:
    """Return a model of models/medium.py with attention as separate ops, whose dropout can be replaced."""
    model, batch = medium.build(name)
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    return model, {key: value[:samples] for key, value in batch.items()}


def with_masks(builder: Builder, masks: frozenset[int] | None) -> ModelAndBatch:
    """Return the model with these masks as bits."""
    model, batch = builder()
    if masks is None or masks:
        pack_masks(model, masks)
    return model, batch


def profiled(builder: Builder, masks: frozenset[int] | None) -> Profile:
    model, batch = with_masks(builder, masks)
    return profile(model, **batch).model_copy(update={"replay_us": replay_us()})


def drawn_again(found: Plan) -> frozenset[int]:
    """Return the positions of the masks that backward draws again under the plan."""
    draws = [op.id for op in found.graph.ops if DRAW in op.name and "@" not in op.name]
    return frozenset(i for i, op in enumerate(draws) if op in found.recompute_set)


def planned(found: Plan, masks: frozenset[int] | None) -> Planned:
    return Planned(masks, found.peak, found.recompute_us, found.policy().to_json())


def plan_model(name: str, builder: Builder) -> list[Row]:
    """Plan the model at its smallest peaks and at each of `BUDGETS`. Runs in a process of its own."""
    keep_freed_memory()
    torch.set_num_threads(1)
    taken: dict[frozenset[int] | None, Profile] = {}

    def at(budget: int, masks: frozenset[int] | None, start: Collection[SaveSet] = ()) -> Plan:
        if masks not in taken:
            taken[masks] = profiled(builder, masks)
        return plan(taken[masks], budget_bytes=budget, gap=GAP, start=start)

    ends = []
    for masks in (NONE, None):
        taken[masks] = profiled(builder, masks)
        least = find_minimum_peak(taken[masks], gap=GAP, time_limit_s=60)
        ends.append(planned(at(least.found, masks, [least.save_set]), masks))
    keys = taken[NONE].keys()
    count = sum(DRAW in key for key in keys)
    rows = [Row(name, 0, count, *ends)]
    smallest, largest = ends[0].predicted, bounds(build(taken[NONE])).ceiling
    for part in BUDGETS:
        budget = int(smallest + (largest - smallest) * part)
        without = at(budget, NONE)
        masks = drawn_again(without)
        rows.append(Row(name, budget, count, planned(without, NONE), planned(at(budget, masks), masks)))
    return rows


def peak_of(builder: Builder, subject: Planned) -> int:
    """Return the peak of the second planned step in bytes. Runs in a process of its own."""
    torch.set_num_threads(1)
    with AllocatorTimeline() as timeline:
        model, batch = with_masks(builder, subject.masks)
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
        model, _ = with_masks(builder, subject.masks)
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
    """Return a line with the times to draw a mask, to pack it, and to multiply by it."""
    torch.set_num_threads(1)
    x = torch.randn(ELEMENTS)
    mask = torch.empty_like(x).bernoulli_(0.9).div_(0.9)
    bits = mask_bits(mask)
    ways: dict[str, Callable[[], Tensor]] = {
        "draw": lambda: torch.empty_like(x).bernoulli_(0.9).div_(0.9),
        "pack": lambda: mask_bits(mask),
        "multiply by the mask": lambda: x * mask,
        "multiply by bits": lambda: times_mask(x, bits, 0.9),
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
            f"{row.masks if row.packed.masks is None else len(row.packed.masks)} of {row.masks}",
            *(f"{subject.predicted:,}, {subject.measured:,}" for subject in (row.without, row.packed)),
            *(f"{subject.recompute_us / 1e3:.0f}" for subject in (row.without, row.packed)),
            f"{statistics.median(row.ratios):.3f} ± {standard_error(row.ratios):.3f}",
            "yes" if row.without.holds and row.packed.holds else "no",
        ]
        for row in rows
    ]
    return f"torch {torch.__version__}, one thread, in its CPU time. {price}\n\n{markdown_table(HEAD, lines)}"
