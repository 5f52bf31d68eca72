"""From what a hollow step left behind to the columns of a Profile. Pure: no torch calls, no clock."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoac.planner.formats.profile import (
    BackwardSteps,
    Environment,
    OpFlag,
    Ops,
    Profile,
    Ragged,
    SavedTensors,
    StaticBytes,
    Storages,
    Values,
)
from autoac.planner.units import rounded_bytes
from autoac.profiler.capture.allocations import Allocations, Block
from autoac.profiler.capture.op_recorder import RecordedStorage
from autoac.profiler.steps.hollow import HollowStep
from autoac.profiler.timing.op_timer import BETWEEN


@dataclass(slots=True)
class _Step:
    """A stretch of backward in the making. Places are positions in the allocator's record."""

    first: int  # place
    began: int  # mark at or before it, for the time
    name: str = ""
    unpacks: list[int] = field(default_factory=list)
    work: int = -1  # place at which its work begins; -1: not yet
    drops: list[int] = field(default_factory=list)


def assemble(
    step: HollowStep,
    *,
    model: str,
    inputs: Sequence[str],
    environment: Environment,
    static: StaticBytes,
    optimizer_workspace_nbytes: int,
    notes: Sequence[str],
) -> Profile:
    """The Profile of a hollow step."""
    record, saved, forward = step.allocations, step.saved, step.forward
    at = record.places
    blocks = [_block(record, storage) for storage in forward.storages]
    mine = [block for block in blocks if block is not None]
    copies = [block for copy in saved.copies if (block := _block(record, copy)) is not None]
    other = _Levels.of(record, hidden=mine + copies, lasting=step.lasting)
    asked = _asked(blocks, forward.storages, environment.allocator_rounding)
    n = len(forward.ops)
    made: list[list[Block]] = [[] for _ in forward.ops]
    for value in forward.values:
        if value.previous < 0 and (output := blocks[value.storage]) is not None:
            made[value.op].append(output)

    steps = _cut(step, other)
    ends = [following.first for following in steps[1:]] + [at[step.backward_ended]]
    end_marks = [following.began for following in steps[1:]] + [step.backward_ended]
    moments = _Moments([at[op.began] for op in forward.ops], at[step.backward_began], ends)

    dropped = [n + len(steps)] * len(saved.values)
    for event in saved.events:
        if event.kind == "drop":
            dropped[event.saved] = moments.forward(at[event.mark])
    for j, cut in enumerate(steps):
        for h in cut.drops:
            dropped[h] = n + j + 1
    modules = _Names(["."])
    overloads, nodes, reasons = _Names(), _Names(), _Names()
    measured = [step.measured[op.signature] for op in forward.ops]
    between_us = step.measured[BETWEEN][0] if BETWEEN in step.measured else 0.0
    flags = [
        OpFlag.RANDOM * op.random
        | OpFlag.MUTATES * op.facts.mutates
        | OpFlag.COLLECTIVE * op.facts.collective
        | OpFlag.MUST_RECOMPUTE * op.must_recompute
        for op in forward.ops
    ]
    return Profile(
        model=model,
        inputs=tuple(inputs),
        environment=environment,
        static=static,
        gradient_nbytes=other.at(at[step.backward_ended]),
        optimizer_workspace_nbytes=optimizer_workspace_nbytes,
        ops=Ops(
            module=tuple(modules.index(op.module) for op in forward.ops),
            overload=tuple(overloads.index(op.facts.name) for op in forward.ops),
            reads=Ragged.of([op.reads for op in forward.ops]),
            runtime_us=tuple(round(runtime + between_us, 3) for runtime, _, _ in measured),
            spread_us=tuple(spread for _, spread, _ in measured),
            flops=tuple(op.flops for op in forward.ops),
            workspace_nbytes=tuple(
                other.workspace(at[op.began], at[op.ended], outputs)
                for op, outputs in zip(forward.ops, made, strict=True)
            ),
            other_nbytes=tuple(other.at(at[op.began]) for op in forward.ops),
            flags=tuple(int(flag) for flag in flags),
            must_save=tuple(reasons.index(op.must_save) if op.must_save else -1 for op in forward.ops),
        ),
        storages=Storages(
            nbytes=asked,
            slack_nbytes=tuple(
                block.nbytes - nbytes if block else 0 for block, nbytes in zip(blocks, asked, strict=True)
            ),
            released=tuple(
                moments.after(block.freed) if block and block.freed is not None else n + len(steps)
                for block in blocks
            ),
        ),
        values=Values(
            storage=tuple(value.storage for value in forward.values),
            op=tuple(value.op for value in forward.values),
            previous=tuple(value.previous for value in forward.values),
        ),
        saved=SavedTensors(
            value=tuple(saved.shown(h, until) for h, until in enumerate(dropped)),
            packed=tuple(saved.packed),
            dropped=tuple(dropped),
        ),
        backward=BackwardSteps(
            name=tuple(nodes.index(s.name or "backward") for s in steps),
            unpacks=Ragged.of([s.unpacks for s in steps]),
            runtime_us=tuple(
                (step.times_ns[end] - step.times_ns[s.began]) / 1e3
                for s, end in zip(steps, end_marks, strict=True)
            ),
            other_nbytes=tuple(other.at(s.first) for s in steps),
            peak_nbytes=tuple(
                other.peak(s.work if s.work >= 0 else s.first, end)
                for s, end in zip(steps, ends, strict=True)
            ),
        ),
        modules=tuple(modules),
        overloads=tuple(overloads),
        nodes=tuple(nodes),
        reasons=tuple(reasons),
        notes=tuple(notes),
        forward_ends=tuple(forward.forward_ends) if len(forward.forward_ends) > 1 else (),
    )


def _block(record: Allocations, storage: RecordedStorage) -> Block | None:
    """The block behind a storage; None if the device's allocator did not make it."""
    return record.block_at(storage.address, storage.mark) if storage.address else None


def _asked(
    blocks: Sequence[Block | None], storages: Sequence[RecordedStorage], rounding: int
) -> tuple[int, ...]:
    """The bytes of each block that its storage asked for, rounded; 0 without a block."""
    return tuple(
        min(rounded_bytes(storage.nbytes, rounding), block.nbytes) if block else 0
        for block, storage in zip(blocks, storages, strict=True)
    )


class _Names(list[str]):
    """A table of distinct names."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__(names)
        self._at = {name: i for i, name in enumerate(names)}

    def index(self, name: str) -> int:  # type: ignore[override]
        if name not in self._at:
            self._at[name] = len(self)
            self.append(name)
        return self._at[name]


@dataclass(frozen=True, slots=True)
class _Levels:
    """Bytes live in some of the blocks, after each change of the record."""

    after: list[int]  # after[i]: with the first i changes done
    active: list[int]  # places of the changes that count, ascending

    @classmethod
    def of(cls, record: Allocations, hidden: Sequence[Block], lasting: Sequence[Block] = ()) -> _Levels:
        """Bytes in the blocks that are not `hidden`; `lasting` ones are there all the time."""
        hide = {id(block) for block in (*hidden, *lasting)}
        live = sum(block.nbytes for block in lasting)
        after, active = [live], []
        for place, change in enumerate(record.changes):
            if id(change.block) not in hide:
                live += change.nbytes
                active.append(place)
            after.append(live)
        return cls(after, active)

    def at(self, place: int) -> int:
        return self.after[place]

    def peak(self, begin: int, end: int) -> int:
        """The most bytes live from place `begin` to place `end`."""
        return max(self.after[begin : end + 1])

    def workspace(self, begin: int, end: int, outputs: Sequence[Block]) -> int:
        """The most bytes that an op, from place `begin` to place `end`, holds beside all of its outputs.

        What it frees before it allocates an output, that output takes the place of.
        """
        most = max(
            self.after[place] + sum(block.nbytes for block in outputs if block.allocated < place)
            for place in range(begin, end + 1)
        )
        return max(0, most - self.after[begin] - sum(block.nbytes for block in outputs))

    def works(self, begin: int, end: int) -> bool:
        """Whether anything comes or goes from place `begin` to place `end`."""
        i = bisect.bisect_left(self.active, begin)
        return i < len(self.active) and self.active[i] < end


@dataclass(frozen=True, slots=True)
class _Event:
    """Something that may begin a new step, at a place; `mark` is at or before it."""

    place: int
    mark: int
    kind: str  # "unpack", "unpin", "drop"
    until: int = -1  # place at which an unpack is over
    saved: int = -1
    node: str = ""


def _events(step: HollowStep) -> list[_Event]:
    record, at = step.allocations, step.allocations.places
    events = []
    for event in step.saved.events:
        if not step.backward_began <= event.mark <= step.backward_ended:
            continue
        until = at[event.ended] if event.ended >= 0 else -1
        events.append(_Event(at[event.mark], event.mark, event.kind, until, event.saved, event.node))
        block = _block(record, event.stand_in) if event.stand_in is not None else None
        if block is not None and block.freed is not None:
            # The node has returned: what it unpacked is gone, what autograd holds is not yet.
            events.append(_Event(block.freed, event.ended, "unpin"))
    return sorted(events, key=lambda event: (event.place, event.mark))


def _cut(step: HollowStep, other: _Levels) -> list[_Step]:
    """Cut backward into steps: first unpacks, then work, then what was unpacked is let go, then drops.

    Autograd releases what it saved only after it has checked the node's gradients, which can allocate,
    and what a hook handed out is gone by then; so that work is a step of its own.
    """
    at = step.allocations.places
    begin, end = at[step.backward_began], at[step.backward_ended]
    current = _Step(begin, step.backward_began)
    steps = [current]
    closing = False  # the current step has let go of something
    previous = begin
    mark = step.backward_began  # the latest so far: what an old unpack gave out may go late
    for event in _events(step):
        mark = max(mark, event.mark)
        if other.works(previous, event.place):
            if closing:
                current, closing = _Step(previous, mark), False
                steps.append(current)
            if current.work < 0:
                current.work = previous
        if event.kind == "unpack":
            if closing or current.work >= 0:
                current, closing = _Step(event.place, mark), False
                steps.append(current)
            current.unpacks.append(event.saved)
            current.name = current.name or event.node
            previous = event.until
            continue
        if current.work < 0:
            current.work = previous
        closing = True
        if event.kind == "drop":
            current.drops.append(event.saved)
        previous = event.place
    if other.works(previous, end) and closing:
        steps.append(_Step(previous, step.backward_ended, work=previous))
    elif current.work < 0:
        current.work = previous
    return steps


@dataclass(frozen=True, slots=True)
class _Moments:
    """From places in the allocator's record to moments of a Profile."""

    op_began: list[int]
    backward_began: int
    step_ends: list[int]

    def forward(self, place: int) -> int:
        """The first forward op that begins after `place`."""
        return bisect.bisect_right(self.op_began, place)

    def after(self, place: int) -> int:
        """The first moment that begins after the change at `place`."""
        if place < self.backward_began:
            return self.forward(place)
        n = len(self.op_began)
        return n + min(bisect.bisect_right(self.step_ends, place) + 1, len(self.step_ends))
