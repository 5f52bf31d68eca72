"""Compare our plans with torch's checkpoints at equal peaks, on a GPU.

    python -m benchmarks.gpu [--only '*bf16'] [--size full] [--out FILE]

The models are those of `autoac doctor --gpu`, which compares predictions with measurements. `--size large`
needs a GPU of 80 GB, and runs kernels so long that the host stays ahead of them. Each model is trained plain,
with torch's checkpoint around every block, with torch's selective checkpoint (matrix products and attention
saved), and with all saved tensors on the host (`save_on_cpu`); also under plans with the peak of each of the
two checkpoints as the budget, without and with moves to the host.

Peaks are `torch.cuda.max_memory_allocated` of a whole step, AdamW included; what the allocator reserves is
`max_memory_reserved`, next to the prediction from before the second step. Times are those of forward and
backward: on the device alone, and from an idle device to an idle device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ac_client.doctor.sample_models import CARD, FULL, SAMPLES, SIZES, Size
from ac_client.doctor.sample_training import PRECISIONS, Case, Trained, train
from autoac.planner import InfeasibleBudget
from autoac.planner.units import format_bytes
from benchmarks.results import add_out_argument, markdown_table, write_result
from benchmarks.torch_checkpoint import BASELINES, Baseline, wrap_blocks

LARGE = replace(CARD, layers=12, batch=8, images=64, stages=FULL.stages)
HOST_BYTES = 32 << 30  # of the host, for moved tensors


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train a case, measured. Sizes are in bytes."""

    case: str
    way: str
    measured: Trained | None  # None: it did not run
    budget: int | None = None  # that was planned for
    predicted: int | None = None
    note: str = ""

    @property
    def error(self) -> float | None:
        """Return the excess of the measured peak over the predicted one, as a fraction."""
        if self.predicted is None or self.measured is None:
            return None
        return self.measured.peak_bytes / self.predicted - 1

    @property
    def is_over_budget(self) -> bool:
        return (
            self.budget is not None and self.measured is not None and self.measured.peak_bytes > self.budget
        )


def wrapped(case: Case, baseline: Baseline) -> Case:
    """Return the case with torch's checkpoint around every block."""

    def make(size: Size) -> nn.Module:
        model = case.sample.make(size)
        blocks: nn.ModuleList = model.get_submodule("blocks")  # type: ignore[assignment]
        wrap_blocks(blocks, baseline)
        return model

    return replace(case, sample=replace(case.sample, make=make))


def on_host(case: Case) -> Case:
    """Return the case with everything that autograd saves on the host, as torch's `save_on_cpu` has it."""

    def make(size: Size) -> nn.Module:
        model = case.sample.make(size)
        forward = model.forward

        def saving(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return forward(*args, **kwargs)

        model.forward = saving
        return model

    return replace(case, sample=replace(case.sample, make=make))


def measure_case(case: Case) -> Iterator[Row]:
    """Yield a row for each way to train a case. One model is on the device at a time."""
    yield Row(case.name, "plain", train(case))
    for baseline in BASELINES:
        try:
            theirs = train(wrapped(case, baseline))
        except (RuntimeError, NotImplementedError) as error:
            yield Row(case.name, f"torch {baseline}", None, note=type(error).__name__)
            continue
        yield Row(case.name, f"torch {baseline}", theirs)
        budget = theirs.peak_bytes
        for host_bytes, way in ((0, f"ours, peak of {baseline}"), (HOST_BYTES, "the same, with moves")):
            try:
                ours = train(case, budget, host_bytes)
            except InfeasibleBudget as error:
                note = f"needs {format_bytes(error.smallest_found)}" if error.smallest_found else "infeasible"
                yield Row(case.name, way, None, budget, note=note)
                continue
            report = ours.report
            assert report is not None, "it was planned"
            note = f"{format_bytes(report.moved_bytes)} moved" if host_bytes else ""
            yield Row(case.name, way, ours, budget, report.predicted_peak_bytes, note)
    try:
        yield Row(case.name, "torch save_on_cpu", train(on_host(case)))
    except RuntimeError as error:
        yield Row(case.name, "torch save_on_cpu", None, note=type(error).__name__)


HEAD = (
    "model",
    "way",
    "budget",
    "predicted",
    "measured",
    "error",
    "reserved",
    "reserved, predicted",
    "device, ms",
    "/ plain",
    "idle to idle, ms",
    "",
)


def render(rows: Sequence[Row], device_name: str) -> str:
    """Return the table as Markdown, under a summary."""
    errors = [row.error for row in rows if row.error is not None]
    close = sum(abs(error) <= 0.01 for error in errors)
    plain_ms = {row.case: row.measured.device_ms for row in rows if row.way == "plain" and row.measured}
    lines = []
    for row in rows:
        sizes = [row.budget, row.predicted, row.measured.peak_bytes if row.measured else None]
        line = [row.case, row.way, *("" if size is None else format_bytes(size) for size in sizes)]
        if row.measured is None:
            lines.append([*line[:-1], *[""] * 7, row.note])
            continue
        ratio = row.measured.device_ms / plain_ms[row.case]
        predicted = row.measured.predicted_reserved_bytes
        line += ["" if row.error is None else f"{row.error:+.2%}", format_bytes(row.measured.reserved_bytes)]
        line += ["" if predicted is None else format_bytes(predicted), f"{row.measured.device_ms:.1f}"]
        lines.append([*line, f"{ratio:.3f}", f"{row.measured.wall_ms:.1f}", row.note])
    return (
        f"{device_name}, torch {torch.__version__}. {close} of {len(errors)} predicted peaks within 1 %, "
        f"{sum(row.is_over_budget for row in rows)} over budget.\n\n{markdown_table(HEAD, lines)}"
    )


def main() -> int:
    """Measure, and write the table; return 2 without a GPU, 1 if a planned step exceeded its budget."""
    sizes = {**SIZES, "large": LARGE}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases, such as '*bf16'")
    parser.add_argument("--size", default="full", choices=sizes)
    add_out_argument(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a GPU: torch found none", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[Row] = []
    for sample in SAMPLES:
        for precision in PRECISIONS:
            case = Case(sample, precision, sizes[options.size], device)
            if fnmatchcase(case.name, options.only):
                for row in measure_case(case):
                    rows.append(row)
                    time = f"{row.measured.device_ms:.1f} ms" if row.measured else row.note
                    print(f"{row.case}: {row.way}: {time}", file=sys.stderr, flush=True)
    write_result(render(rows, torch.cuda.get_device_name(device)), options.out)
    return int(any(row.is_over_budget for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
