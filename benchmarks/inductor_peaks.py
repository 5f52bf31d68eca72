"""Train models under Inductor within a budget, and compare peaks and gradients with unplanned Inductor's.

Inductor fuses ops and orders kernels by itself, so a prediction is off until a measured step has corrected
it. The steps are those of a user: whole steps inside `measure()`, as long as corrections follow. Then one
more step is measured by the allocator's record. Gradients are compared with those of the uncompiled model in
float64. Dropout is off, since float64 would draw other masks.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import build, find_minimum_peak
from autoac.profiler import profile
from autoac.tape.capture.allocations import AllocationRecord
from benchmarks.models.batches import Batch
from benchmarks.models.tiny import ZOO, ZooModel
from benchmarks.results import add_out_argument, markdown_table, write_result

MODELS = ("GPT-2", "Llama", "ViT", "CLIP", "ResNet", "U-Net")
MOST_MEASURED = 3  # steps of one plan: the last has no correction left


@dataclass(slots=True)
class Run:
    """One model within one budget."""

    model: str
    budget: int
    unplanned: int  # peak without a plan
    unplanned_error: float  # distance of the gradients from those in float64, relative to their norm
    error: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)  # predicted and measured, plan by plan
    predicted: int = 0  # at the end
    measured: int = 0
    recomputed: int = 0  # ops
    corrections: int = 0


def train(entry: ZooModel, share: float) -> Run:
    """Train within a budget at `share` of the way from the smallest predicted peak to Inductor's own."""
    torch.compiler.reset()
    batch = entry.batch()
    reference = _gradients(_made(entry).double(), None, _doubled(batch))
    model = _made(entry)
    compiled: Any = torch.compile(model)
    error = _distance(_gradients(model, compiled, batch), reference)
    peak = _peak(model, compiled, batch)
    torch.compiler.reset()

    model = _made(entry)
    compiled = torch.compile(model)
    found = profile(compiled, **batch)
    static = build(found).static_bytes
    lowest = find_minimum_peak(found, time_limit_s=30).found
    run = Run(entry.name, int(lowest + share * (static + peak - lowest)), static + peak, error)
    ac_client.apply(compiled, run.budget / 2**30)
    for _ in range(2):  # the first is observed, the second compiles the plan
        model.zero_grad()
        _step(compiled, batch)
    handle = ac_client.applied(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # ends the step, and keeps the numbers
    for _ in range(MOST_MEASURED):
        before = handle.report()
        run.rounds.append(_measured(handle, model, compiled, batch, optimizer))
        if handle.report().corrections == before.corrections:
            break
    run.error = _distance(_gradients(model, compiled, batch), reference)
    run.measured = static + _peak(model, compiled, batch)
    report = handle.report()
    run.predicted, run.recomputed, run.corrections = (
        report.predicted_peak_bytes or 0,
        report.recomputed,
        report.corrections,
    )
    return run


def _measured(
    handle: Any, model: nn.Module, call: Callable[..., Any], batch: Batch, optimizer: torch.optim.Optimizer
) -> tuple[int, int]:
    """Measure a whole step. Return its predicted and its measured peak."""
    model.zero_grad()
    gc.collect()
    predicted = handle.report().predicted_peak_bytes
    with handle.measure():
        _step(call, batch)
        optimizer.step()
    return predicted, handle.report().measured_peak_bytes


def _made(entry: ZooModel) -> nn.Module:
    torch.manual_seed(0)
    model = entry.make().train()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
    return model


def _doubled(batch: Batch) -> Batch:
    return {
        name: value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _gradients(model: nn.Module, call: Callable[..., Any] | None, batch: Batch) -> Tensor:
    """Return all gradients in one row, in float64."""
    model.zero_grad()
    _step(model if call is None else call, batch)
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def _distance(gradients: Tensor, reference: Tensor) -> float:
    return float((gradients - reference).norm() / reference.norm())


def _peak(model: nn.Module, call: Callable[..., Any], batch: Batch) -> int:
    """Return the peak of a step beyond what exists before it, in bytes."""
    model.zero_grad()
    gc.collect()
    with AllocationRecord(torch.device("cpu")) as record:
        _step(call, batch)
    return max(accumulate(change.nbytes for change in record.changes))


def _step(call: Callable[..., Any], batch: Batch) -> None:
    for value in batch.values():
        if isinstance(value, Tensor):
            value.grad = None
    out = call(**batch)
    (out if isinstance(out, Tensor) else out["loss"]).backward()


HEAD = (
    "model",
    "unplanned peak",
    "budget",
    "predicted -> measured, plan by plan",
    "corrections",
    "predicted at the end",
    "measured",
    "measured / predicted",
    "ops again",
    "gradient error",
    "unplanned",
)


def row_of(run: Run) -> tuple[str, ...]:
    """Return the cells of a row. Sizes are in KB."""
    return (
        run.model,
        f"{run.unplanned / 1e3:.1f}",
        f"{run.budget / 1e3:.1f}",
        "; ".join(f"{predicted / 1e3:.1f} -> {measured / 1e3:.1f}" for predicted, measured in run.rounds),
        str(run.corrections),
        f"{run.predicted / 1e3:.1f}",
        f"{run.measured / 1e3:.1f}",
        f"{run.measured / run.predicted:.4f}",
        str(run.recomputed),
        f"{run.error:.1e}",
        f"{run.unplanned_error:.1e}",
    )


def main() -> None:
    """Train the models that are named, or six."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--only", nargs="+", choices=[e.name for e in ZOO], default=MODELS, metavar="MODEL")
    add_out_argument(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for entry in ZOO:
        if entry.name in options.only:
            rows.append(row_of(train(entry, options.share)))
            print(rows[-1], flush=True)
    write_result(markdown_table(HEAD, rows), options.out)


if __name__ == "__main__":
    main()
