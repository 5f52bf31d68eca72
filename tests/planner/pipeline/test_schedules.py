"""Compare replayed pipeline schedules with the closed forms that were published."""

from __future__ import annotations

import itertools

import pytest

from autoac.planner.errors import InvalidPipeline
from autoac.planner.pipeline.schedules import (
    Action,
    Cost,
    Schedule,
    WorkKind,
    actions,
    in_flight,
    stage_loads,
    times,
)

SIZES = [(1, 1), (1, 4), (2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (4, 12), (5, 20), (8, 16), (8, 32)]


def chunks_of(schedule: Schedule) -> int:
    return {Schedule.INTERLEAVED: 2, Schedule.ZB_V: 2}.get(schedule, 1)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_each_microbatch_goes_once_forward_and_once_back_in_order(schedule: Schedule, p: int, m: int) -> None:
    for stage in range(p):
        order = actions(schedule, stage, p, m)
        assert len(set(order)) == len(order)
        at = {action: i for i, action in enumerate(order)}
        for chunk, k in itertools.product(range(chunks_of(schedule)), range(m)):
            forward = at[Action(WorkKind.FORWARD, chunk, k)]
            if Action(WorkKind.BACKWARD, chunk, k) in at:
                assert forward < at[Action(WorkKind.BACKWARD, chunk, k)]
            else:
                assert forward < at[Action(WorkKind.INPUT, chunk, k)] < at[Action(WorkKind.WEIGHT, chunk, k)]
        last = stage_loads(schedule, stage, p, m)[-1]
        assert last.total == 1
        assert last.action.kind in (WorkKind.BACKWARD, WorkKind.WEIGHT)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_no_schedule_waits_for_itself(schedule: Schedule, p: int, m: int) -> None:
    cost = Cost(1.0, 1.0, 1.0)
    found = times(schedule, [[cost] * chunks_of(schedule)] * p, m)
    assert found.busy_us == (3.0 * m * chunks_of(schedule),) * p
    assert found.step_us >= 3 * m * chunks_of(schedule)


@pytest.mark.parametrize(("p", "m"), [size for size in SIZES if size[1] >= 2 * size[0]])
def test_in_flight_equals_the_published_forms(p: int, m: int) -> None:
    for s in range(p):
        assert in_flight("gpipe", s, p, m) == m  # Huang et al.: all of a step
        assert in_flight("1f1b", s, p, m) == p - s  # Narayanan et al., section 2.2
        for v in (2, 3):  # Megatron-LM: the warm-up and one; on the first stage pv + p - 1
            n = in_flight("interleaved-1f1b", s, p, m, chunks=v)
            assert n == min((p - s - 1) * 2 + (v - 1) * p + 1, m * v)
        # Qi et al., section 2.3, with i = s + 1 for the stage:
        i = s + 1
        assert in_flight("zb-h1", s, p, m) == p  # (p - i + 1) and (i - 1) that wait for the weight half
        assert in_flight("zb-h2", s, p, m) == 2 * p - 1  # (2p - 2i + 1) and (2i - 2)
        assert in_flight("zb-v", s, p, m) == 2 * p  # halves of a stage: p in all, on each stage
        for schedule, full, waiting in (
            ("zb-h1", p - i + 1, i - 1),
            ("zb-h2", 2 * p - 2 * i + 1, 2 * i - 2),
        ):
            forwards = [now for now in stage_loads(schedule, s, p, m) if now.action.kind is WorkKind.FORWARD]
            fullest = max(forwards, key=lambda now: (now.total, sum(now.weights)))
            assert (sum(fullest.backward), sum(fullest.weights)) == (full, waiting)


def test_first_stage_of_interleaved_1f1b_has_the_published_extra_share() -> None:
    # Korthikanti et al. 2022: 1 + (p - 1) / (pv) times what 1F1B holds.
    p, m = 8, 64
    for v in (1, 2, 4):
        n = in_flight("interleaved-1f1b", 0, p, m, chunks=v)
        assert n / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_few_microbatches_are_all_in_flight() -> None:
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZB_H1, Schedule.ZB_H2):
        assert in_flight(schedule, 0, 8, 2) == 2


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_forward_and_backward_both_meet_the_fullest_moment(schedule: Schedule, p: int, m: int) -> None:
    for stage in range(p):
        during = stage_loads(schedule, stage, p, m)
        most = max(now.total for now in during)
        kinds = {now.action.kind for now in during if now.total == most}
        assert WorkKind.FORWARD in kinds
        assert kinds & {WorkKind.BACKWARD, WorkKind.INPUT}


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 12), (8, 32)])
def test_bubbles_equal_the_published_forms(p: int, m: int) -> None:
    f, b, w = 2.0, 3.0, 2.0
    one = [[Cost(f, b, w)]] * p
    assert times("gpipe", one, m).step_us == (m + p - 1) * (f + b + w)
    assert times("1f1b", one, m).step_us == (m + p - 1) * (f + b + w)
    two = [[Cost(f / 2, b / 2, w / 2)] * 2] * p
    assert times("interleaved-1f1b", two, m).step_us == m * (f + b + w) + (p - 1) * (f + b + w) / 2
    even = [[Cost(1.0, 1.0, 1.0)]] * p
    assert max(times("zb-h1", even, m).bubble_us) == p - 1  # (p - 1)(f + b - w)
    assert max(times("zb-h2", even, m).bubble_us) == 0  # (p - 1)(f + b - 2w)
    assert max(times("zb-v", [[Cost(1.0, 1.0, 1.0)] * 2] * p, m).bubble_us) == 0


def test_the_slowest_stage_is_the_bottleneck() -> None:
    costs = [[Cost(1.0, 2.0)], [Cost(2.0, 4.0)], [Cost(1.0, 2.0)]]
    found = times("1f1b", costs, 10)
    assert found.bottleneck == 1
    assert found.step_us >= 60.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("2f2b", 0, 4, 8), "schedule must be one of gpipe, 1f1b, .*, got '2f2b'"),
        (("1f1b", 4, 4, 8), "stage must be from 0 to 3, got 4"),
        (("1f1b", 0, 4, 0), "got 4 and 0"),
        (("interleaved-1f1b", 0, 4, 6), "multiple of the 4 stages"),
    ],
)
def test_invalid_schedule_arguments_are_refused(arguments: tuple[str, int, int, int], says: str) -> None:
    with pytest.raises(InvalidPipeline, match=says):
        in_flight(*arguments)


def test_a_wrong_number_of_chunks_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match="chunks must be 2 for zb-v, got 3"):
        in_flight("zb-v", 0, 4, 8, chunks=3)
    with pytest.raises(InvalidPipeline, match="each stage must have 1 chunks"):
        times("1f1b", [[Cost(1, 1)], [Cost(1, 1)] * 2], 4)
