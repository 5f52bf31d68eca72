"""Compare the planner's pipeline orders with those of torch.distributed.pipelining."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from autoac.planner.pipeline.schedules import Schedule, WorkKind, actions

KINDS = {
    theirs.FORWARD: WorkKind.FORWARD,
    theirs.FULL_BACKWARD: WorkKind.BACKWARD,
    theirs.BACKWARD_INPUT: WorkKind.INPUT,
    theirs.BACKWARD_WEIGHT: WorkKind.WEIGHT,
}


def of_torch(schedule: Any, p: int, m: int, v: int, rank: int) -> list[tuple[WorkKind, int, int]]:
    """Return torch's order for one rank, as (kind, chunk, microbatch)."""
    rounds = max(1, m // p)
    fields = SimpleNamespace(
        pp_group_size=p,
        num_stages=p * v,
        n_local_stages=v,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
        _n_microbatches=m,
    )
    order = schedule._calculate_single_rank_operations(fields, rank)
    return [
        (KINDS[a.computation_type], int(a.stage_index >= p), a.microbatch_index)
        for a in order
        if a is not None
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 4), (8, 16)])
@pytest.mark.parametrize(
    ("ours", "schedule"),
    [
        (Schedule.INTERLEAVED, theirs.ScheduleInterleaved1F1B),
        (Schedule.ZB_V, theirs.ScheduleZBVZeroBubble),
    ],
)
def test_stage_runs_the_same_actions_in_the_same_order(ours: Schedule, schedule: Any, p: int, m: int) -> None:
    for rank in range(p):
        order = [(a.kind, a.chunk, a.microbatch) for a in actions(ours, rank, p, m)]
        assert order == of_torch(schedule, p, m, 2, rank)
