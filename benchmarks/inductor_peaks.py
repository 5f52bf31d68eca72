"""Train models under Inductor within a budget, and compare peaks and gradients with unplanned Inductor's.

Inductor fuses ops and orders kernels by itself, so a prediction is off until a measured step has corrected
it. The steps are those of a user: whole steps inside `measure()`, as long as corrections follow. Then one
more step is measured by the allocator's record. Gradients are compared with those of the uncompiled model in
float64. Dropout is off, since float64 would draw other masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import build, find_minimum_peak
from autoac.profiler import profile
from benchmarks.models.batches import Batch
from benchmarks.models.tiny import ZOO, ZooModel
from benchmarks.results import bench_parser, chosen, markdown_table, shown, write_result
from benchmarks.steps import Trainee

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
    reference = _gradients(Trainee(_made(entry).double(), _doubled(entry.batch())))
    unplanned = _compiled(entry)
    error = _distance(_gradients(unplanned), reference)
    peak = unplanned.peak()
    torch.compiler.reset()

    trainee = _compiled(entry)
    found = profile(trainee.call, **trainee.batch)  # type: ignore[arg-type]
    static = build(found).static_bytes
    lowest = find_minimum_peak(found, time_limit_s=30).found
    run = Run(entry.name, int(lowest + share * (static + peak - lowest)), static + peak, error)
    ac_client.apply(trainee.call, run.budget / 2**30)  # type: ignore[type-var]
    for _ in range(2):  # the first is observed, the second compiles the plan
        trainee.step()
    handle = ac_client.applied(trainee.model)
    optimizer = torch.optim.SGD(trainee.model.parameters(), lr=0.0)  # ends the step, and keeps the numbers
    for _ in range(MOST_MEASURED):
        before = handle.report()
        trainee.model.zero_grad()
        with handle.measure():
            trainee.step()
            optimizer.step()
        after = handle.report()
        run.rounds.append((before.predicted_peak_bytes or 0, after.measured_peak_bytes or 0))
        if after.corrections == before.corrections:
            break
    run.error = _distance(_gradients(trainee), reference)
    run.measured = static + trainee.peak()
    report = handle.report()
    run.predicted, run.recomputed = report.predicted_peak_bytes or 0, report.recomputed
    run.corrections = report.corrections
    return run


def _made(entry: ZooModel) -> nn.Module:
    torch.manual_seed(0)
    model = entry.make().train()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
    return model


def _compiled(entry: ZooModel) -> Trainee:
    model = _made(entry)
    return Trainee(model, entry.batch(), torch.compile(model))


def _doubled(batch: Batch) -> Batch:
    return {
        name: value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _gradients(trainee: Trainee) -> Tensor:
    """Return all gradients of a step in one row, in float64."""
    trainee.step()
    return torch.cat([gradient.double().flatten() for gradient in trainee.gradients()])


def _distance(gradients: Tensor, reference: Tensor) -> float:
    return float((gradients - reference).norm() / reference.norm())


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
    parser = bench_parser(__doc__)
    parser.set_defaults(only=MODELS)
    parser.add_argument("--share", type=float, default=0.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    zoo = {entry.name: entry for entry in ZOO}
    runs = (train(zoo[name], options.share) for name in chosen(zoo, options.only))
    write_result(markdown_table(HEAD, map(row_of, shown(runs, row_of))), options.out)


if __name__ == "__main__":
    main()
