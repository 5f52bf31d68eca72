"""Replay pipeline schedules: the order of work, the microbatches that a stage holds, the time of a step.

NOTE [ What is counted ]

A microbatch is *in flight* on a stage from the beginning of its forward there to the end of its backward.
Where a schedule splits backward into an input half (gradients that the stage before waits for) and a
weight half, it is in flight until the weight half has ended, since that half still reads saved tensors. The
numbers here come from replaying each stage's order of actions; the closed forms of the papers are in the
tests and in docs/pipelines.md.

A stage may hold several *chunks* of the model (virtual stages). Then each (chunk, microbatch) counts by
itself, and is about a chunk's part of the stage in size.

Sources: GPipe (Huang et al., NeurIPS 2019). 1F1B and interleaved 1F1B (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021). ZB-H1, ZB-H2 and ZB-V (Qi
et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, sections 2 and 6), in the forms that are handcrafted
for halves that take equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from autoac.planner.errors import InvalidPipeline


class Schedule(StrEnum):
    """The order in which stages work on microbatches."""

    GPIPE = "gpipe"  # all forwards, then all backwards
    ONE_F_ONE_B = "1f1b"  # backward as soon as it can
    INTERLEAVED = "interleaved-1f1b"  # the same over several chunks for each stage
    ZB_H1 = "zb-h1"  # weight halves fill the end; no more in flight than the first stage of 1F1B
    ZB_H2 = "zb-h2"  # more forwards at the start, no bubble
    ZB_V = "zb-v"  # two chunks for each stage, down and up again


class WorkKind(Enum):
    """A kind of work that a stage does for a microbatch."""

    FORWARD = auto()
    BACKWARD = auto()  # both halves in one
    INPUT = auto()
    WEIGHT = auto()


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a stage, for one microbatch of one chunk."""

    kind: WorkKind
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The microbatches that a stage has in flight during one action, by chunk."""

    action: Action
    backward: tuple[int, ...]  # microbatches whose forward has begun and whose backward has not ended
    weights: tuple[int, ...]  # whose input half has ended and whose weight half has not

    @property
    def total(self) -> int:
        """Return the number of (chunk, microbatch) pairs in flight."""
        return sum(self.backward) + sum(self.weights)


@dataclass(frozen=True, slots=True)
class Cost:
    """The time that a stage takes for one microbatch of one chunk, in microseconds."""

    forward_us: float
    input_us: float  # of backward; without a split the halves run one after the other
    weight_us: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """The time of one step of the pipeline, in microseconds; tuples are by stage."""

    step_us: float  # from the first action to the end of the last
    busy_us: tuple[float, ...]
    bubble_us: tuple[float, ...]  # idle between the first and the last action of the stage

    @property
    def bottleneck(self) -> int:
        """Return the stage that works longest."""
        return max(range(len(self.busy_us)), key=lambda stage: (self.busy_us[stage], -stage))


def in_flight(
    schedule: Schedule | str, stage: int, n_stages: int, n_microbatches: int, *, chunks: int | None = None
) -> int:
    """Return the most (chunk, microbatch) pairs that `stage` holds at once. See NOTE [ What is counted ].

    Args:
        schedule: a Schedule, or its name.
        stage: from 0; the first one gets the batch.
        n_stages: devices in the pipeline.
        n_microbatches: in one step.
        chunks: of the model for each stage; 1, where the schedule does not ask for several.

    Raises:
        InvalidPipeline: no such schedule, stage or number.

    >>> [in_flight("1f1b", stage, 4, 8) for stage in range(4)], in_flight("gpipe", 0, 4, 8)
    ([4, 3, 2, 1], 8)
    """
    return max(now.total for now in stage_loads(schedule, stage, n_stages, n_microbatches, chunks=chunks))


def stage_loads(
    schedule: Schedule | str, stage: int, n_stages: int, n_microbatches: int, *, chunks: int | None = None
) -> tuple[StageLoad, ...]:
    """Return what `stage` has in flight during each of its actions. Arguments and errors: see `in_flight`."""
    order = actions(schedule, stage, n_stages, n_microbatches, chunks=chunks)
    n_chunks = 1 + max(action.chunk for action in order)
    backward, weights = [0] * n_chunks, [0] * n_chunks
    loads = []
    for action in order:
        if action.kind is WorkKind.FORWARD:
            backward[action.chunk] += 1
        loads.append(StageLoad(action, tuple(backward), tuple(weights)))
        match action.kind:
            case WorkKind.BACKWARD:
                backward[action.chunk] -= 1
            case WorkKind.INPUT:
                backward[action.chunk] -= 1
                weights[action.chunk] += 1
            case WorkKind.WEIGHT:
                weights[action.chunk] -= 1
            case WorkKind.FORWARD:
                pass
    return tuple(loads)


def actions(
    schedule: Schedule | str, stage: int, n_stages: int, n_microbatches: int, *, chunks: int | None = None
) -> tuple[Action, ...]:
    """Return the actions of `stage` in one step, in order. Arguments and errors: see `in_flight`."""
    kind, v = _checked(schedule, stage, n_stages, n_microbatches, chunks)
    p, m = n_stages, n_microbatches
    match kind:
        case Schedule.GPIPE:
            return _in_turn(m, warmup=m)
        case Schedule.ONE_F_ONE_B:
            return _in_turn(m, warmup=p - stage)
        case Schedule.INTERLEAVED:
            return _interleaved(stage, p, m, v)
        case Schedule.ZB_H1:
            return _in_turn(m, warmup=p - stage, waiting=stage)
        case Schedule.ZB_H2:
            return _in_turn(m, warmup=2 * (p - stage) - 1, waiting=2 * stage)
        case Schedule.ZB_V:
            return _zb_v(stage, p, m)


def times(schedule: Schedule | str, costs: Sequence[Sequence[Cost]], n_microbatches: int) -> PipelineTimes:
    """Replay the schedule on all stages and return how long a step takes when sending costs nothing.

    Args:
        schedule: a Schedule, or its name.
        costs: for each stage, one cost for each of its chunks.
        n_microbatches: in one step.

    Raises:
        InvalidPipeline: as for `in_flight`; or stages differ in their number of chunks.
    """
    p, v = len(costs), len(costs[0]) if costs else 0
    if any(len(of_stage) != v for of_stage in costs):
        raise InvalidPipeline(f"each stage must have {v} chunks, like the first one")
    orders = [actions(schedule, stage, p, n_microbatches, chunks=v) for stage in range(p)]
    folded = Schedule(schedule) is Schedule.ZB_V
    done: dict[tuple[bool, int, int], float] = {}  # (is forward, position in the model, microbatch) -> end
    clock, begin, busy, at = [0.0] * p, [-1.0] * p, [0.0] * p, [0] * p
    moved = True
    while moved:
        moved = False
        for stage in range(p):
            while at[stage] < len(orders[stage]):
                action = orders[stage][at[stage]]
                chunk, microbatch = action.chunk, action.microbatch
                position = (2 * p - 1 - stage) if folded and chunk else chunk * p + stage
                cost = costs[stage][chunk]
                needs: list[tuple[bool, int, int]] = []
                match action.kind:
                    case WorkKind.FORWARD:
                        needs, us = [(True, position - 1, microbatch)] if position else [], cost.forward_us
                    case WorkKind.WEIGHT:
                        us = cost.weight_us
                    case WorkKind.INPUT | WorkKind.BACKWARD:
                        last = position == p * v - 1
                        needs = [(True, position, microbatch) if last else (False, position + 1, microbatch)]
                        us = cost.input_us + (cost.weight_us if action.kind is WorkKind.BACKWARD else 0.0)
                if any(need not in done for need in needs):
                    break
                start = max([clock[stage], *(done[need] for need in needs)])
                if begin[stage] < 0:
                    begin[stage] = start
                clock[stage] = start + us
                busy[stage] += us
                if action.kind is not WorkKind.WEIGHT:
                    done[action.kind is WorkKind.FORWARD, position, microbatch] = clock[stage]
                at[stage] += 1
                moved = True
    assert all(at[stage] == len(orders[stage]) for stage in range(p)), "the orders wait for one another"
    idle = [clock[stage] - begin[stage] - busy[stage] for stage in range(p)]
    return PipelineTimes(max(clock), tuple(busy), tuple(idle))


def _checked(
    schedule: Schedule | str, stage: int, n_stages: int, n_microbatches: int, chunks: int | None
) -> tuple[Schedule, int]:
    try:
        kind = Schedule(schedule)
    except ValueError:
        raise InvalidPipeline(
            f"schedule must be one of {', '.join(kind.value for kind in Schedule)}, got {schedule!r}"
        ) from None
    if n_stages < 1 or n_microbatches < 1:
        raise InvalidPipeline(
            f"n_stages and n_microbatches must be at least 1, got {n_stages} and {n_microbatches}"
        )
    if not 0 <= stage < n_stages:
        raise InvalidPipeline(f"stage must be from 0 to {n_stages - 1}, got {stage}")
    takes = {Schedule.ZB_V: 2, Schedule.INTERLEAVED: chunks or 2}.get(kind, 1)
    if chunks is not None and chunks != takes:
        raise InvalidPipeline(f"chunks must be {takes} for {kind.value}, got {chunks}")
    if kind is Schedule.INTERLEAVED and n_microbatches % n_stages:
        raise InvalidPipeline(
            f"n_microbatches must be a multiple of the {n_stages} stages for {kind.value}, got"
            f" {n_microbatches}"
        )
    return kind, takes


def _in_turn(m: int, warmup: int, waiting: int | None = None) -> tuple[Action, ...]:
    """Return `warmup` forwards, then a backward and a forward in turn, and at last the other backwards.

    With `waiting`, each backward is split, and up to so many weight halves wait.
    """
    order: list[Action] = []
    forward, weight = min(warmup, m), 0
    order += [Action(WorkKind.FORWARD, 0, k) for k in range(forward)]
    for k in range(m):
        order.append(Action(WorkKind.BACKWARD if waiting is None else WorkKind.INPUT, 0, k))
        if waiting is not None and k + 1 - weight > waiting:
            order.append(Action(WorkKind.WEIGHT, 0, weight))
            weight += 1
        if forward < m:
            order.append(Action(WorkKind.FORWARD, 0, forward))
            forward += 1
    left = range(weight, m) if waiting is not None else ()
    return (*order, *(Action(WorkKind.WEIGHT, 0, k) for k in left))


def _interleaved(stage: int, p: int, m: int, v: int) -> tuple[Action, ...]:
    """Return groups of `p` microbatches, chunk after chunk; in backward the last chunk comes first."""

    def pair(i: int) -> tuple[int, int]:
        group, within = divmod(i, p * v)
        chunk, microbatch = divmod(within, p)
        return chunk, group * p + microbatch

    total = m * v
    warmup = min((p - stage - 1) * 2 + (v - 1) * p, total)
    forwards = [Action(WorkKind.FORWARD, *pair(i)) for i in range(total)]
    backwards = [
        Action(WorkKind.BACKWARD, v - 1 - chunk, microbatch) for chunk, microbatch in map(pair, range(total))
    ]
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return tuple(order + backwards[total - warmup :])


def _zb_v(stage: int, p: int, m: int) -> tuple[Action, ...]:
    """Return ZB-V for halves that take equally long, laid out for 2p - 1 microbatches or more."""
    laid_out = max(2 * p - 1, m)
    order: list[Action] = []
    done = {
        (kind, chunk): 0 for kind in (WorkKind.FORWARD, WorkKind.INPUT, WorkKind.WEIGHT) for chunk in (0, 1)
    }

    def do(chunk: int, *kinds: WorkKind) -> None:
        for kind in kinds:
            order.append(Action(kind, chunk, done[kind, chunk]))
            done[kind, chunk] += 1

    for _ in range(2 * (p - stage) - 1):
        do(0, WorkKind.FORWARD)
    for _ in range(stage):
        do(1, WorkKind.FORWARD)
        do(0, WorkKind.FORWARD)
    for _ in range(p - stage):
        do(1, WorkKind.FORWARD, WorkKind.INPUT, WorkKind.WEIGHT)
    while done[WorkKind.FORWARD, 1] < laid_out:
        if done[WorkKind.FORWARD, 0] < laid_out:
            do(0, WorkKind.FORWARD)
        do(0, WorkKind.INPUT, WorkKind.WEIGHT)
        do(1, WorkKind.FORWARD, WorkKind.INPUT, WorkKind.WEIGHT)
    for _ in range(stage):
        do(0, WorkKind.INPUT)
        do(1, WorkKind.INPUT)
    for _ in range(p - stage):
        do(0, WorkKind.INPUT, WorkKind.WEIGHT)
    for chunk in (1, 0):
        while done[WorkKind.WEIGHT, chunk] < laid_out:
            do(chunk, WorkKind.WEIGHT)
    return tuple(action for action in order if action.microbatch < m)
