"""Train one model on the current GPU, plain and planned, in fp32 and in bf16.

The page is meant to be attached to an issue. It names versions, the device and figures, and neither hosts nor
paths. What else only a GPU can settle is checked by `pytest -m gpu` and `benchmarks.gpu_quarter`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ac_client
from ac_client.doctor.device_facts import error_in_words, machine_facts
from ac_client.errors import CommandError
from autoac.planner import bounds, build
from autoac.planner.units import GIB, exact_bytes
from autoac.profiler import observe
from autoac.profiler.timing.on_device import seconds

BUDGET = 0.5  # of the way from the smallest peak that is proven to the one with nothing recomputed
PEAK_TOLERANCE = 0.01  # of the predicted peak
NOISE = 4.0  # a planned step may differ from a plain one by this factor of what two plain ones differ
STEPS = 3  # the first is observed, the second planned; the peak is that of the last
TIMED = 3


@dataclass(frozen=True, slots=True)
class SampleSize:
    """Size of the model and of its batch."""

    layers: int = 8
    width: int = 768
    tokens: int = 1024
    vocabulary: int = 16_000
    batch: int = 4


class SampleModel(nn.Module):
    """A decoder with dropout that returns its loss."""

    def __init__(self, size: SampleSize) -> None:
        super().__init__()
        width, heads = size.width, max(size.width // 64, 2)
        self.tokens = nn.Embedding(size.vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
            for _ in range(size.layers)
        )
        self.head = nn.Linear(width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.tokens(ids), ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(-1, 1).flatten())


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """Figures of one training, by counters of the allocator and clocks of device and host."""

    peak_bytes: int
    device_ms: float  # of forward and backward
    host_us: float  # of launching them, for each op of forward
    numbers: dict[str, Tensor]  # loss and gradients of the last step, on the CPU


@dataclass(frozen=True, slots=True)
class PrecisionReport:
    """Plain and planned training in one precision. `wrong` says what does not hold."""

    lines: Mapping[str, str]
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The facts of the machine, and a report for each precision."""

    machine: Mapping[str, str]
    precisions: Mapping[str, PrecisionReport]

    @property
    def wrong(self) -> list[str]:
        """Return what does not hold, by precision."""
        return [f"{name}: {text}" for name, found in self.precisions.items() for text in found.wrong]

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps({"ok": not self.wrong} | asdict(self), indent=1)

    def to_markdown(self) -> str:
        """Return the report as a page: what is wrong first, then the figures and the machine."""
        lines = ["# autoac doctor --gpu", "", *(f"- WRONG: {text}" for text in self.wrong)]
        lines += [] if self.wrong else ["Nothing is wrong."]
        for name, found in (*self.precisions.items(), ("machine", None)):
            facts = self.machine if found is None else found.lines
            lines += ["", f"## {name}", "", "| | |", "| --- | --- |"]
            lines += [f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in facts.items()]
        return "\n".join(lines)


def examine_gpu(size: SampleSize = SampleSize()) -> GpuReport:
    """Train a model of `size` on the current GPU. An error of a training is part of the report.

    Raises:
        CommandError: torch found no GPU.
    """
    if not torch.cuda.is_available():
        cuda, hip = torch.version.cuda, torch.version.hip
        built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "none"
        raise CommandError(
            f"doctor --gpu needs a GPU, got none: torch {torch.__version__} is built for {built}"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    found = {}
    for precision in ("fp32", "bf16"):
        try:
            found[precision] = _compare(size, precision, device)
        except Exception as error:  # noqa: BLE001 - the error is the finding
            found[precision] = PrecisionReport({}, (error_in_words(error),))
    return GpuReport(machine_facts(device), found)


def _compare(size: SampleSize, precision: str, device: torch.device) -> PrecisionReport:
    """Train in one precision: plain twice, since kernels may not be deterministic, and planned once."""
    model, optimizer, ids = _made(size, device)
    with _autocast(precision):
        profile = observe(model, (ids,), {}, optimizer=optimizer)
    del model, optimizer, ids
    known, ops = bounds(build(profile)), len(profile.ops)
    budget = int(known.floor + BUDGET * (known.ceiling - known.floor))
    plain, again = (_train(size, precision, device, ops)[0] for _ in range(2))
    planned, report = _train(size, precision, device, ops, budget)
    assert report is not None, "it was planned"
    predicted = report.predicted_peak_bytes or 0
    plain_ms = (sum(profile.ops.runtime_us) + sum(profile.backward.runtime_us)) / 1e3
    noise, distance = _distance(plain, again), _distance(plain, planned)
    lines = {
        "bits": f"plain from plain {noise:.2e}, planned from plain {distance:.2e}",
        "recomputed": f"{report.recomputed} of {report.ops} ops",
        "peak, plain": f"predicted {exact_bytes(known.ceiling)}, measured {exact_bytes(plain.peak_bytes)}",
        "peak, planned": f"predicted {exact_bytes(predicted)}, measured {exact_bytes(planned.peak_bytes)}, "
        f"budget {exact_bytes(budget)}",
        "time, plain": f"predicted {plain_ms:.2f} ms, device {plain.device_ms:.2f} ms",
        "time, planned": f"predicted {plain_ms + (report.recompute_us or 0) / 1e3:.2f} ms, "
        f"device {planned.device_ms:.2f} ms",
        "host": f"{plain.host_us:.1f} us an op of forward, planned {planned.host_us:.1f} us",
    }
    off = [
        name
        for name, sides in (
            ("peak, plain", (known.ceiling, plain.peak_bytes)),
            ("peak, planned", (predicted, planned.peak_bytes)),
        )
        if abs(sides[1] - sides[0]) > PEAK_TOLERANCE * sides[0]
    ]
    wrong = [f"{name} is more than {PEAK_TOLERANCE:.0%} off: {lines[name]}" for name in off]
    if planned.peak_bytes > budget:
        wrong.append(f"the planned peak is over its budget: {lines['peak, planned']}")
    if distance > NOISE * noise:
        wrong.append(f"planned gradients differ from plain ones: {lines['bits']}")
    if not report.recomputed or report.off_path:
        wrong.append(report.off_path or "nothing was recomputed")
    return PrecisionReport(lines, tuple(wrong))


def _autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else nullcontext()


def _made(size: SampleSize, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """Return model, optimizer and batch, with the same numbers in each call."""
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = SampleModel(size).to(device)
    ids = torch.arange(size.batch * size.tokens, device=device) * 7919 % size.vocabulary
    return model, torch.optim.AdamW(model.parameters()), ids.reshape(size.batch, size.tokens)


def _train(
    size: SampleSize, precision: str, device: torch.device, ops: int, budget_bytes: int | None = None
) -> tuple[TrainedSample, ac_client.Report | None]:
    model, optimizer, ids = _made(size, device)
    if budget_bytes is not None:
        ac_client.apply(model, budget_bytes / GIB, optimizer=optimizer, host_budget_gb=0)

    def forward_backward() -> Tensor:
        with _autocast(precision):
            loss: Tensor = model(ids)
        loss.backward()
        return loss.detach()

    for i in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(i)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        loss = forward_backward()
        numbers = {"loss": loss.cpu()} if i == STEPS - 1 else {}
        del loss
        optimizer.step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    report = ac_client.applied(model).report() if budget_bytes is not None else None
    numbers |= {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    device_s = [seconds(forward_backward, device, optimizer.zero_grad) for _ in range(TIMED)]
    host_s = []
    for _ in range(TIMED):
        optimizer.zero_grad()
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        forward_backward()
        host_s.append(time.perf_counter() - began)
    times = statistics.median(device_s) * 1e3, statistics.median(host_s) * 1e6 / ops
    return TrainedSample(peak, *times, numbers), report


def _distance(one: TrainedSample, other: TrainedSample) -> float:
    """Return the largest relative difference of a tensor; 0.0 only if all bits are equal."""
    largest = 0.0
    for name, mine in one.numbers.items():
        theirs = other.numbers[name]
        if not torch.equal(mine, theirs):
            scale = float(mine.double().norm()) or 1.0
            difference = float((mine.double() - theirs.double()).norm()) / scale
            largest = max(largest, difference) if difference == difference else math.inf
    return largest
