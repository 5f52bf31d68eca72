"""The schedules of torch.distributed.pipelining, whose stages are planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import outputs_of_ranks

from ac_client.planning.facts.forwards_in_flight import ForwardsInFlight
from benchmarks.loops import pipelines

SCRIPT = """
import json
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
import ac_client

WIDTH, WORDS, ROWS, LENGTH, MICROBATCHES = 64, 96, 4, 64, 4

def made(number, last):
    torch.manual_seed(number)
    layers = [nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH), nn.GELU()]
    begin, end = [nn.Embedding(WORDS, WIDTH)] * (number == 0), [nn.Linear(WIDTH, WORDS)] * (number == last)
    return nn.Sequential(*begin, *layers, *end)

def trained(schedule, of_rank, plans, infers=False):
    last = world * len(of_rank[0]) - 1
    models = {number: made(number, last) for number in of_rank[rank]}
    for model in models.values():
        if plans:
            ac_client.apply(model, 1.0)
    found = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, WORDS, (MICROBATCHES * ROWS, LENGTH), generator=generator)
        hidden, words = (
            torch.empty(ROWS, LENGTH, n, device="meta", requires_grad=True) for n in (WIDTH, WORDS)
        )
        shapes = {
            number: {} if infers else {
                "input_args": ids[:ROWS].to("meta") if number == 0 else hidden,
                "output_args": words if number == last else hidden,
            }
            for number in models
        }
        stages = [
            PipelineStage(model, number, last + 1, torch.device("cpu"), **shapes[number])
            for number, model in models.items()
        ]
        for model in models.values():
            model.zero_grad()
        run = getattr(schedules, schedule)(
            stages if len(stages) > 1 else stages[0], MICROBATCHES,
            loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
        )
        run.step(*[ids] * (0 in models), target=ids.roll(-1, 1) if last in models else None)
        found += [p.grad.clone() for model in models.values() for p in model.parameters()]
    in_flight = [ac_client.applied(model).policy.predicted.microbatches for model in models.values() if plans]
    return found, in_flight

found = {}
for schedule, of_rank in (
    ("ScheduleGPipe", [[0], [1]]),
    ("Schedule1F1B", [[0], [1]]),
    ("ScheduleInterleaved1F1B", [[0, 2], [1, 3]]),
    ("ScheduleInterleavedZeroBubble", [[0, 2], [1, 3]]),
    ("ScheduleZBVZeroBubble", [[0, 3], [1, 2]]),
):
    plain, _ = trained(schedule, of_rank, False)
    ours, in_flight = trained(schedule, of_rank, True)
    found[schedule] = all(map(torch.equal, ours, plain)), in_flight
_, found["inferred"] = trained("Schedule1F1B", [[0], [1]], True, infers=True)
print(json.dumps(found))
"""


def test_stages_train_as_without_plans_and_are_planned_for_what_waits(tmp_path: Path) -> None:
    first, second = (json.loads(out.splitlines()[-1]) for out in outputs_of_ranks(SCRIPT, tmp_path / "store"))
    # Before torch 2.13 a stage without `input_args` runs without gradients first.
    assert (first.pop("inferred"), second.pop("inferred")) == ([2], [1])
    for schedule in first:
        assert first[schedule][0], schedule
        assert second[schedule][0], schedule
    assert [first[one][1] for one in ("ScheduleGPipe", "Schedule1F1B")] == [[4], [2]]
    assert [second[one][1] for one in ("ScheduleGPipe", "Schedule1F1B")] == [[4], [1]]
    assert first["ScheduleInterleaved1F1B"][1][0] == 4


@pytest.mark.parametrize(
    ("setting", "budgets"),
    [
        ("Schedule1F1B, 2 ranks", [1, 1]),  # then what the error names
        ("ScheduleInterleaved1F1B, 2 ranks, 3 parts", [20_198_902, 17_749_496]),
        ("ScheduleZBVZeroBubble, 2 ranks, 2 parts", [14_443_415, 16_306_272]),
    ],
)
def test_what_a_schedule_holds_besides_the_parts_is_counted(setting: str, budgets: list[int]) -> None:
    """Count targets, losses, what is being sent, buffers to receive into, and halves of backwards."""
    rows = pipelines.rows_of(setting, "0.6", budgets, tries=4)
    assert all(max(row.peaks) <= row.budget for row in rows)
    assert [row.faults for row in rows] == [(), ()]


def test_batch_of_a_stage_may_get_no_gradient() -> None:
    forwards, x = ForwardsInFlight(), torch.ones(2, requires_grad=True)
    forwards.note_gradients_of([x, x])
    torch._C._functions.UndefinedGrad()(x).sum().backward()
    assert not forwards.made
    (2 * x).sum().backward()
    assert list(forwards.made.values()) == [x.nbytes]
    x.grad = None
    assert not any(ref() for ref in forwards.made)
