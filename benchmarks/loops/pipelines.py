"""The schedules of torch.distributed.pipelining on ranks of a CPU, as rows of the table.

    python -m benchmarks.loops --pipelines [--only "*, 4 ranks*"] [--shares 0.6 0.3]

Each schedule runs plainly, with torch's checkpoint around each block, and planned for the smallest peak of
each rank, then at shares of the way from that to plain's peak. The row of a smallest peak names the
checkpoint's peak, and has a fault *above checkpoint* if ours is larger.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.loops.runs import OnCpu, Row, Run, judged
from benchmarks.loops.written_loops import WIDTH, Block, Env
from benchmarks.results import chosen
from benchmarks.torch_checkpoint import wrap_blocks

ROWS = 512  # of a microbatch
SECONDS = 600  # for the runs of one script
TRIES = 8  # to find the smallest peaks of all ranks


class Setting(NamedTuple):
    """Say what runs: a schedule on ranks, each with parts of the model.

    Attributes:
        infers: the stages infer the shapes of their inputs in the first step.
    """

    schedule: str
    ranks: int
    parts: int = 1
    infers: bool = False

    @property
    def name(self) -> str:
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        return f"{self.schedule}, {self.ranks} ranks{parts}{', shapes inferred' if self.infers else ''}"

    def stages(self, rank: int) -> list[int]:
        if self.schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):  # the last rank turns around
            return [rank, 2 * self.ranks - 1 - rank]
        return [rank + self.ranks * part for part in range(self.parts)]


SETTINGS = {
    setting.name: setting
    for n in (2, 4)
    for setting in (
        Setting("ScheduleGPipe", n),
        Setting("ScheduleGPipe", n, infers=True),
        Setting("Schedule1F1B", n),
        Setting("Schedule1F1B", n, infers=True),
        Setting("ScheduleInterleaved1F1B", n, 2),
        Setting("ScheduleInterleaved1F1B", n, 3),
        Setting("ScheduleInterleavedZeroBubble", n, 2),
        Setting("ScheduleZBVZeroBubble", n, 2),
        Setting("ScheduleDualPipeV", n, 2),
    )
}


def pipeline(setting: Setting, rank: int, checkpoints: bool, env: Env) -> None:
    """Train the stages of a rank.

    Args:
        checkpoints: torch's checkpoint is around each block.
    """
    numbers, last = setting.stages(rank), setting.parts * setting.ranks - 1
    microbatches = 2 * setting.ranks  # a multiple of the ranks, and no fewer than stages of a V
    models = []
    for number in numbers:
        torch.manual_seed(number)
        models.append(nn.Sequential(Block(), Block()))
        if checkpoints:
            wrap_blocks(models[-1], "checkpoint")
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    for model in models:
        env.plan(model, optimizer)
        env.keep(model)
    like: Any = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    given = {} if setting.infers else {"input_args": like, "output_args": like}
    device = torch.device("cpu")
    stages: list[Any] = [
        PipelineStage(model, number, last + 1, device, **given)
        for number, model in zip(numbers, models, strict=True)
    ]
    schedule = getattr(schedules, setting.schedule)(
        stages if len(stages) > 1 else stages[0], microbatches, loss_fn=lambda a, b: F.mse_loss(a, b)
    )
    for i in env.steps():
        with env.step():
            generator = torch.Generator().manual_seed(i)
            x, y = (torch.randn(microbatches * ROWS, WIDTH, generator=generator) for _ in range(2))
            first: list[Tensor] = [x] if 0 in numbers else []
            target = {"target": y} if last in numbers else {}
            del x, y
            schedule.step(*first, **target, return_outputs=False)
            del first, target
            optimizer.step()
            optimizer.zero_grad()


def print_sizes(name: str, rank: int) -> None:
    """Print as JSON what a step of the rank needs plainly, and with checkpoints."""
    peaks = [
        max(Run(functools.partial(pipeline, SETTINGS[name], rank, checkpoints), OnCpu(), None).peaks)
        for checkpoints in (False, True)
    ]
    print(json.dumps(peaks), flush=True)


def print_row(name: str, rank: int, label: str, budget: int) -> None:
    """Print the row of the rank as JSON, and the smallest peak that is named if the budget is refused."""
    loop = functools.partial(pipeline, SETTINGS[name], rank, False)
    planned = Run(loop, OnCpu(), budget)
    error: BaseException | None = planned.error
    while error is not None and not hasattr(error, "smallest_found"):
        error = error.__cause__
    plain = planned if planned.error else Run(loop, OnCpu(), None)
    row = judged(f"{name}, rank {rank} {label}", budget, plain, planned)
    print(json.dumps([getattr(error, "smallest_found", 0), asdict(row)]), flush=True)


def of_ranks(call: str, ranks: int) -> list[Any]:
    """Return what each rank prints in a call of a function of this file, which can use `rank`."""
    from ranks import outputs_of_ranks  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        script = f"from benchmarks.loops import pipelines; pipelines.{call}"
        outputs = outputs_of_ranks(script, Path(folder) / "store", world=ranks, timeout=SECONDS)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def rows_of(name: str, label: str, budgets: list[int], tries: int = 1) -> list[Row]:
    """Return the row of each rank under its budget, or the smallest peak that is named in a few tries."""
    for _ in range(tries):
        found = of_ranks(f"print_row({name!r}, rank, {label!r}, {budgets}[rank])", len(budgets))
        if not any(needs for needs, _ in found):
            break
        budgets = [needs or budget for budget, (needs, _) in zip(budgets, found, strict=True)]
    return [Row(**{key: _tuples(value) for key, value in row.items()}) for _, row in found]


def examine(name: str, shares: list[float]) -> Iterator[Row]:
    """Yield the rows of a setting: the smallest peak of each rank, and for each share."""
    sizes = of_ranks(f"print_sizes({name!r}, rank)", SETTINGS[name].ranks)
    least = []
    for row, (plain, checkpoint) in zip(
        rows_of(name, "smallest", [1] * len(sizes), TRIES), sizes, strict=True
    ):
        peak = max(row.peaks, default=0)
        above = (f"above checkpoint: by {peak - checkpoint:,}",) if peak > checkpoint else ()
        yield replace(
            row, loop=f"{row.loop} (checkpoint {checkpoint:,})", plain=plain, faults=row.faults + above
        )
        least.append(peak)
    for share in shares:
        budgets = [int(a + share * (plain - a)) for a, (plain, _) in zip(least, sizes, strict=True)]
        yield from rows_of(name, str(share), budgets)


def rows(shares: list[float], only: list[str] | None) -> Iterator[Row]:
    """Yield the rows of all settings, or of those whose names a pattern matches."""
    for name in chosen(SETTINGS, only or ["*"]):
        try:
            yield from examine(name, shares)
        except AssertionError as error:
            yield Row(name, 0, 0, faults=(f"crash: {error}",))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
