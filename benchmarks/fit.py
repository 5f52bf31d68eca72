"""Compare the sizes that `fit` finds with real training steps on the CPU, over 27 models and 9 loops.

    python -m benchmarks.fit [--only PATTERN] [--out FILE]

The budget of a model is the measured peak of its step at the size `SIZE_OF_BUDGET`, with nothing recomputed.
Real steps are planned from a profile of their own, and measured by the allocator. Each row says

- the size of `fit`, and the largest whose real step has a plan and stays within the budget. The size of `fit`
  must not be larger, and at most one smaller;
- the same with nothing recomputed;
- how many of ten sizes have the measured peak to the byte, and the worst error;
- for loops with an optimizer, the fastest size of `fit` and of a scan: planned real steps, with the
  optimizer's, of the sizes that `fit` planned and of a dozen up to its largest; how much longer a sample
  takes at the size of `fit`; and the errors of predicted times. The scan counts CPU time of this thread, the
  least of `TURNS` turns. `fit` takes times from a clock, so this column needs an idle machine.

`fit` runs steps of a few sizes on this machine. By the datasheet of another device it makes fake steps, which
do not see the workspaces of kernels (docs/profiling.md, "Where fake and real steps differ"). The loop with an
optimizer of 8 bits needs bitsandbytes, which is in no list of packages; without it, there are eight loops.

Exit with 1 if a size is wrong, if a peak is off by more than 0.3 %, or if fewer than nine of ten models have
all ten peaks to the byte.
"""

from __future__ import annotations

import importlib
import math
import operator
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import ac_client
from ac_client import Fit
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.model_loader import TrainingSetup
from autoac.planner import InfeasibleBudget, Policy, SolverOutOfTime, plan
from benchmarks.models import tiny, unfamiliar
from benchmarks.models.batches import Batch, ModelAndBatch
from benchmarks.models.modules import MessagePassing
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.steps import loss_of, rotated

SIZE_OF_BUDGET = 4
MOST = 32  # samples; the largest size to consider
TURNS, SCANNED = 25, 12  # of the scan
TEN = (4, 6, 7, 8, 9, 10, 11, 12, 13, 14)  # sizes between knots
WORST_PEAK, EXACT_MODELS = 0.003, 0.9
BY_PAIRS = ("ResNet",)  # whose batch norms need two samples, which count as one size
OTHERS = (
    "OPT",
    "Bloom",
    "GPT-NeoX",
    "Falcon",
    "Phi",
    "Qwen2",
    "Gemma 2",
    "DeBERTa v2",
    "XLNet",
    "BART",
    "Swin",
    "OLMo 2",
    "Cohere",
)
MODELS: dict[str, Callable[[], ModelAndBatch]] = {
    entry.name: lambda entry=entry: (entry.make(), entry.batch()) for entry in tiny.ZOO
} | {name: unfamiliar.MODELS[name] for name in OTHERS}


@dataclass(frozen=True, slots=True)
class Loop:
    """Describe how a model is trained; those of `MODELS` have neither an optimizer nor micro-batches."""

    model: Callable[[], ModelAndBatch]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    micro_batches: int = 1
    autocast: torch.dtype | None = None


class Adapted(nn.Module):
    """LoRA: a frozen product and two small ones that train."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def adapted() -> ModelAndBatch:
    """Return a Llama with LoRA in all of its layers."""
    model, batch = MODELS["Llama"]()
    model.requires_grad_(requires_grad=False)
    for module in list(model.get_submodule("model.layers").modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(module, name, Adapted(layer))
    return model, batch


class Gru(nn.Module):
    """A GRU over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(16, 32, 2, batch_first=True), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0]).square().mean()  # type: ignore[no-any-return]


class Graph(MessagePassing):
    """Messages from each node to another, whose edges follow from the number of nodes."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        nodes = torch.arange(len(x))
        return super().forward(x, nodes, nodes.flip(0))


def graph() -> ModelAndBatch:
    """Return messages along the edges of a graph, and its nodes."""
    return Graph(), {"x": torch.ones(512, 16)}


def eight_bits(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW of bitsandbytes, whose state has 8 bits."""
    optimizers: Any = importlib.import_module("bitsandbytes.optim")
    return optimizers.AdamW8bit(parameters, min_8bit_size=256)  # type: ignore[no-any-return]


ADAMW = partial(torch.optim.AdamW, foreach=False)
LOOPS = {name: Loop(model) for name, model in MODELS.items()} | {
    "U-Net, AdamW": Loop(MODELS["U-Net"], ADAMW),
    "mixture, AdamW": Loop(MODELS["Mixtral"], ADAMW),
    "T5, AdamW": Loop(MODELS["T5"], ADAMW),
    "ViT, bf16": Loop(MODELS["ViT"], ADAMW, autocast=torch.bfloat16),
    "GRU, AdamW": Loop(lambda: (Gru(), {"x": torch.ones(8, 40, 16)}), ADAMW),
    "graph, AdamW": Loop(graph, ADAMW),
    "LoRA, AdamW": Loop(adapted, ADAMW),
    "Llama, 4 micro-batches": Loop(MODELS["Llama"], ADAMW, micro_batches=4),
}
if find_spec("bitsandbytes"):
    LOOPS["Llama, 8 bits"] = Loop(MODELS["Llama"], eight_bits)


def build(name: str, size: int) -> dict[str, Any]:
    """Return the setup of a model, with a batch of `size` samples, or of that many eighths of its batch."""
    torch.manual_seed(0)
    loop = LOOPS[name]
    model, batch = loop.model()
    optimizer = loop.optimizer and loop.optimizer(p for p in model.parameters() if p.requires_grad)
    return {
        "model": model.train(),
        "kwargs": resized(batch, 2 * size if name in BY_PAIRS else size),
        "optimizer": optimizer,
        "accumulates": loop.micro_batches if loop.micro_batches > 1 else False,
    }


def resized(batch: Batch, size: int) -> Batch:
    """Return a batch of `size` samples, repeated as needed. Batches of more than 64 come in eighths."""
    rows = next(value.shape[0] for value in batch.values() if isinstance(value, Tensor))
    samples = torch.arange(size * max(1, rows // 8 if rows > 64 else 1)) % rows
    return {
        key: value.detach()[samples].requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for key, value in batch.items()
    }


def real_peak(name: str, size: int, policy: Policy | None = None) -> int:
    """Return the measured peak of a step, under a policy or plain."""
    loop = LOOPS[name]
    with AllocatorTimeline() as timeline:
        setup = build(name, size)
        model, batch, optimizer = setup["model"], setup["kwargs"], setup["optimizer"]
        if policy is not None:
            ac_client.apply(model, policy=policy, strict=True)
        for _ in range(1 if optimizer is None else 2):  # the second has state
            timeline.mark("step")
            for _ in range(loop.micro_batches):
                with torch.autocast("cpu", loop.autocast, enabled=loop.autocast is not None):
                    out = model(**batch)  # lives through backward, as `fit` assumes
                loss_of(out).backward()
                del out
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
                for value in batch.values():  # of a loader, which has no gradients of the step before
                    if isinstance(value, Tensor):
                        value.grad = None
    return timeline.peak_since("step")


def planned_fits(name: str, size: int, budget: int, found: Fit) -> bool:
    """Return True if the real step of `size` stays within the budget, under the plan of `fit` or another."""
    if any(row.size == size and real_peak(name, size, row.plan.policy()) <= budget for row in found.rows):
        return True
    profile = TrainingSetup(**build(name, size)).observe(None, LOOPS[name].autocast)
    try:
        policy = plan(profile, budget_bytes=budget, gap=1.0).policy()
    except (InfeasibleBudget, SolverOutOfTime):
        return False
    return real_peak(name, size, policy) <= budget


class Steps:
    """Planned training steps of one size, and the least CPU time that one took in this thread."""

    def __init__(self, name: str, size: int, policy: Policy) -> None:
        self._loop, setup = LOOPS[name], build(name, size)
        self._model, self._batch, self._optimizer = setup["model"], setup["kwargs"], setup["optimizer"]
        ac_client.apply(self._model, policy=policy, strict=True)
        self._samples = size * self._loop.micro_batches
        self.least_us = math.inf  # by sample

    def run(self) -> None:
        assert self._optimizer is not None
        began = time.thread_time()
        for _ in range(self._loop.micro_batches):
            with torch.autocast("cpu", self._loop.autocast, enabled=self._loop.autocast is not None):
                out = self._model(**self._batch)
            loss_of(out).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.least_us = min(self.least_us, (time.thread_time() - began) * 1e6 / self._samples)


@dataclass(frozen=True, slots=True)
class Scan:
    """Microseconds by sample of sizes, predicted and of real steps."""

    predicted_us: dict[int, float]
    real_us: dict[int, float]

    @property
    def fastest(self) -> int:
        return min(self.real_us, key=self.real_us.__getitem__)

    def longer(self, size: int) -> float:
        """Return how much longer a sample takes at `size` than at the fastest one, as a share."""
        return self.real_us[size] / self.real_us[self.fastest] - 1

    @property
    def errors(self) -> tuple[float, ...]:
        return tuple(self.predicted_us[size] / us - 1 for size, us in self.real_us.items())


def scan(name: str, found: Fit) -> Scan:
    """Return the times of sizes up to the largest, planned by their profiles, the steps taken in turns."""
    plans = {row.size: row.plan for row in found.rows}
    constraints, budget = found.row(found.largest).plan.constraints, found.budget_bytes
    for size in {max(1, found.largest * share // SCANNED) for share in range(1, SCANNED + 1)} - set(plans):
        profile = found.profile_of(size)
        with suppress(InfeasibleBudget, SolverOutOfTime):
            plans[size] = plan(profile, budget_bytes=budget, constraints=constraints, work_limit=1.0)
    steps = {size: Steps(name, size, planned.policy()) for size, planned in sorted(plans.items())}
    for turn in range(TURNS):
        for size in rotated(list(steps), turn):
            steps[size].run()
    predicted = {n: (p.step_us + p.extra_us + found.optimizer_us) / n for n, p in plans.items()}
    return Scan(predicted, {size: one.least_us for size, one in steps.items()})


def last(fits: Callable[[int], bool], guess: int) -> int:
    """Return the last size that fits, searched from `guess`."""
    if guess and not fits(guess):
        return next((size for size in range(guess - 1, 0, -1) if fits(size)), 0)
    while guess < MOST and fits(guess + 1):
        guess += 1
    return guess


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what `fit` found for one model, and what real steps say."""

    name: str
    found: Fit
    largest: int
    all_saved: int
    exact: int  # peaks to the byte
    errors: tuple[float, ...]  # of peaks
    cpu_s: float  # of `fit`
    scan: Scan | None  # of loops with an optimizer

    @property
    def is_right(self) -> bool:
        pairs = ((self.found.largest, self.largest), (self.found.all_saved, self.all_saved))
        return all(real - 1 <= found <= real for found, real in pairs) and self.worst <= WORST_PEAK

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors))


def measure(name: str) -> Row:
    """Return the row of one model."""
    budget = real_peak(name, SIZE_OF_BUDGET)
    began = time.process_time()
    found = ac_client.fit(partial(build, name), budget / 2**30, most=MOST, autocast=LOOPS[name].autocast)
    cpu_s = time.process_time() - began
    peaks = [found.peak_bytes(size) for size in TEN]
    real = [real_peak(name, size) for size in TEN]
    return Row(
        name,
        found,
        last(lambda size: planned_fits(name, size, budget, found), found.largest),
        last(lambda size: real_peak(name, size) <= budget, found.all_saved),
        sum(map(operator.eq, peaks, real)),
        tuple(peak / measured - 1 for peak, measured in zip(peaks, real, strict=True)),
        cpu_s,
        scan(name, found) if LOOPS[name].optimizer else None,
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table."""
    found = row.found
    return (
        row.name,
        f"{found.largest} / {row.largest}",
        f"{found.all_saved} / {row.all_saved}",
        f"{row.exact} of {len(TEN)}",
        f"{row.worst:.3%}",
        f"{row.cpu_s:.1f}",
        *_scanned(row),
        "" if row.is_right else "wrong",
    )


def _scanned(row: Row) -> tuple[str, ...]:
    if (times := row.scan) is None:
        return "", "", ""
    fastest = row.found.fastest
    errors = f"{min(times.errors):+.0%} to {max(times.errors):+.0%}"
    return f"{fastest} / {times.fastest}", f"{times.longer(fastest):.1%}", errors


HEAD = (
    *("model", "largest: fit / real", "all saved: fit / real", "exact peaks", "worst peak"),
    *("CPU seconds of fit", "fastest: fit / scan", "a sample takes longer by", "predicted times", ""),
)


def main() -> int:
    """Measure all models and print the table."""
    options = bench_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = shown(map(measure, chosen(LOOPS, options.only)), cells)
    exact = sum(row.exact == len(TEN) for row in rows)
    wrong = sum(not row.is_right for row in rows)
    summary = f"{len(rows)} models, {wrong} wrong; in {exact} all ten peaks are exact."
    write_result(f"{summary}\n\n{markdown_table(HEAD, map(cells, rows))}", options.out)
    return int(bool(wrong) or exact < EXACT_MODELS * len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
