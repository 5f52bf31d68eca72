"""The schedules of torch.distributed.pipelining on two ranks of a CPU, as rows of the table.

python -m benchmarks.loops --pipelines
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.loops.runs import OnCpu, Row, Run, judged
from benchmarks.loops.written_loops import WIDTH, Block, Env

MICROBATCHES, ROWS = 4, 512
SECONDS = 300  # for one schedule
STAGES = {  # of each rank
    "ScheduleGPipe": ((0,), (1,)),
    "Schedule1F1B": ((0,), (1,)),
    "ScheduleInterleaved1F1B": ((0, 2), (1, 3)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)),
    "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
}


def pipeline(name: str, rank: int, infers: bool, env: Env) -> None:
    """Train the stages of a rank.

    Args:
        infers: the stages infer the shapes of their inputs in the first step.
    """
    numbers, last = STAGES[name][rank], 2 * len(STAGES[name][0]) - 1
    models = []
    for number in numbers:
        torch.manual_seed(number)
        models.append(nn.Sequential(Block(), Block()))
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()])
    for model in models:
        env.plan(model, optimizer)
        env.keep(model)
    like: Any = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    given = {} if infers else {"input_args": like, "output_args": like}
    device = torch.device("cpu")
    stages: list[Any] = [
        PipelineStage(model, number, last + 1, device, **given)
        for number, model in zip(numbers, models, strict=True)
    ]
    schedule = getattr(schedules, name)(
        stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=lambda a, b: F.mse_loss(a, b)
    )
    for i in env.steps():
        with env.step():
            generator = torch.Generator().manual_seed(i)
            x, y = (torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator) for _ in range(2))
            first: list[Tensor] = [x] if 0 in numbers else []
            target = {"target": y} if last in numbers else {}
            del x, y
            schedule.step(*first, **target, return_outputs=False)
            del first, target
            optimizer.step()
            optimizer.zero_grad()


def print_row(name: str, share: float, rank: int, infers: bool) -> None:
    """Print the row of a rank as JSON: `share` of the way from what a step needs in any case to plain."""
    loop = functools.partial(pipeline, name, rank, infers)
    of_plain = OnCpu()
    plain = Run(loop, of_plain, None)
    least = of_plain.rest + plain.gradient_nbytes
    budget = int(least + share * (max(plain.peaks) - least))
    inferred = ", shapes inferred" if infers else ""
    row = judged(f"{name}{inferred}, rank {rank} {share}", budget, plain, Run(loop, OnCpu(), budget))
    print(json.dumps(asdict(row)), flush=True)


SCRIPT = "from benchmarks.loops.pipelines import print_row; print_row({name!r}, {share}, rank, {infers})"


def rows(shares: list[float]) -> Iterator[Row]:
    """Yield a row for each schedule, share and rank."""
    from ranks import outputs_of_ranks  # type: ignore[import-not-found]

    forms = [*((name, False) for name in STAGES), ("Schedule1F1B", True)]
    for name, infers in forms:
        for share in shares:
            script = SCRIPT.format(name=name, share=share, infers=infers)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    outputs = outputs_of_ranks(script, Path(folder) / "store", timeout=SECONDS)
                except AssertionError as error:
                    yield Row(f"{name} {share}", 0, 0, faults=(f"crash: {error}",))
                    continue
            for output in outputs:
                found = json.loads(output.splitlines()[-1])
                yield Row(**{key: _tuples(value) for key, value in found.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
