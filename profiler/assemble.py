"""From what a hollow step left behind to the columns of a Profile. Pure: no torch calls, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoac.planner.profile import (
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
from autoac.profiler.allocations import AllocationRecord, Block
from autoac.profiler.hollow import HollowStep
from autoac.profiler.record import RecordedStorage
from autoac.profiler.timing import by_signature


@dataclass(slots=True)
class _Step:
    """A stretch of backward in the making."""

    first: int  # mark
    name: str = ""
    unpacks: list[int] = field(default_factory=list)
    worked: int = -1  # mark after which its work began
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
    blocks = [_block(record, storage) for storage in forward.storages]
    mine = {id(block) for block in blocks if block is not None}
    copies = {id(block) for copy in saved.copies if (block := _block(record, copy)) is not None}
    other = _levels(record, hidden=mine | copies)
    n = len(forward.ops)

    steps = _cut(step, other)
    ends = [following.first for following in steps[1:]] + [step.backward_ended]
    moments = _Moments([op.began for op in forward.ops], step.backward_began, ends)

    dropped = [n + len(steps)] * len(saved.values)
    for event in saved.events:
        if event.kind == "drop":
            dropped[event.saved] = moments.after(event.mark)
    modules = _Names(["."])
    overloads, nodes, reasons = _Names(), _Names(), _Names()
    runtimes, spreads = by_signature(step.op_runtimes_us, [op.signature for op in forward.ops])
    flags = [
        OpFlag.RANDOM * op.random
        | OpFlag.MUTATES * op.facts.mutates
        | OpFlag.COLLECTIVE * op.facts.collective
        for op in forward.ops
    ]
    return Profile(
        model=model,
        inputs=tuple(inputs),
        environment=environment,
        static=static,
        gradient_nbytes=other.at(step.backward_ended),
        optimizer_workspace_nbytes=optimizer_workspace_nbytes,
        ops=Ops(
            module=tuple(modules.index(op.module) for op in forward.ops),
            overload=tuple(overloads.index(op.facts.name) for op in forward.ops),
            reads=Ragged.of([op.reads for op in forward.ops]),
            runtime_us=tuple(runtimes),
            spread_us=tuple(spreads),
            flops=tuple(op.flops for op in forward.ops),
            workspace_nbytes=tuple(
                other.peak(op.began, op.ended) - other.at(op.began) for op in forward.ops
            ),
            other_nbytes=tuple(other.at(op.began) for op in forward.ops),
            flags=tuple(int(flag) for flag in flags),
            must_save=tuple(reasons.index(op.must_save) if op.must_save else -1 for op in forward.ops),
        ),
        storages=Storages(
            nbytes=tuple(block.nbytes if block else 0 for block in blocks),
            released=tuple(
                moments.after(block.freed - 1) if block and block.freed is not None else n + len(steps)
                for block in blocks
            ),
        ),
        values=Values(
            storage=tuple(value.storage for value in forward.values),
            op=tuple(value.op for value in forward.values),
            previous=tuple(value.previous for value in forward.values),
        ),
        saved=SavedTensors(value=tuple(saved.values), packed=tuple(saved.packed), dropped=tuple(dropped)),
        backward=BackwardSteps(
            name=tuple(nodes.index(s.name or "backward") for s in steps),
            unpacks=Ragged.of([s.unpacks for s in steps]),
            runtime_us=tuple(
                (record.times_ns[end] - record.times_ns[s.first]) / 1e3 for s, end in zip(steps, ends, strict=True)
            ),
            other_nbytes=tuple(other.at(s.first) for s in steps),
            peak_nbytes=tuple(
                other.peak(s.worked if s.worked >= 0 else s.first, end) for s, end in zip(steps, ends, strict=True)
            ),
        ),
        modules=tuple(modules),
        overloads=tuple(overloads),
        nodes=tuple(nodes),
        reasons=tuple(reasons),
        notes=tuple(notes),
    )


def _block(record: AllocationRecord, storage: RecordedStorage) -> Block | None:
    """The block behind a storage; None if the device's allocator did not make it."""
    return record.block_at(storage.address, storage.mark) if storage.address else None


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
    """Bytes live at each mark, and the most between one mark and the next."""

    level: list[int]
    most: list[int]  # from mark k to mark k + 1
    active: list[bool]  # whether anything came or went between mark k and mark k + 1

    def at(self, mark: int) -> int:
        return self.level[mark]

    def peak(self, begin: int, end: int) -> int:
        """The most bytes live from mark `begin` to mark `end`."""
        return max([self.level[begin], *self.most[begin:end]])


def _levels(record: AllocationRecord, hidden: set[int]) -> _Levels:
    """Bytes in blocks that are not `hidden`, over the record."""
    n = len(record.times_ns)
    level, most, active = [0] * n, [0] * n, [False] * n
    current = passed = 0
    for change in record.changes:
        while passed < change.mark:
            level[passed] = most[passed] = current
            passed += 1
        if id(change.block) in hidden:
            continue
        current += change.nbytes
        if change.mark:
            most[change.mark - 1] = max(most[change.mark - 1], current)
            active[change.mark - 1] = True
    while passed < n:
        level[passed] = most[passed] = current
        passed += 1
    return _Levels(level, most, active)


def _cut(step: HollowStep, other: _Levels) -> list[_Step]:
    """Cut backward into steps in which all unpacks come first, then work, then releases."""
    events = [e for e in step.saved.events if step.backward_began <= e.mark <= step.backward_ended]
    steps = [_Step(step.backward_began)]
    if events:
        steps[0].worked = step.backward_began if any(other.active[step.backward_began : events[0].mark]) else -1
    previous = step.backward_began
    for event in events:
        current = steps[-1]
        worked = any(other.active[previous : event.mark])
        if worked and current.drops:
            # Work after releases belongs to no autograd node that unpacked anything.
            current = _Step(previous, worked=previous)
            steps.append(current)
        elif worked and current.worked < 0:
            current.worked = previous
        if event.kind == "unpack":
            if current.drops or current.worked >= 0:
                current = _Step(event.mark)
                steps.append(current)
            current.unpacks.append(event.saved)
            current.name = current.name or event.node
            previous = event.ended
        else:
            current.drops.append(event.saved)
            if current.worked < 0:
                current.worked = previous
            previous = event.mark
    if any(other.active[previous : step.backward_ended]) and steps[-1].drops:
        steps.append(_Step(previous, worked=previous))
    elif steps[-1].worked < 0:
        steps[-1].worked = previous
    return steps


@dataclass(frozen=True, slots=True)
class _Moments:
    """From marks to moments of a Profile."""

    op_began: list[int]
    backward_began: int
    step_ends: list[int]

    def after(self, mark: int) -> int:
        """The first moment that begins after something that happened right after `mark`."""
        n = len(self.op_began)
        if mark < self.backward_began:
            low = _first(self.op_began, mark)
            return min(low, n)
        return n + min(_first(self.step_ends, mark) + 1, len(self.step_ends))


def _first(ascending: Sequence[int], mark: int) -> int:
    """Position of the first entry beyond `mark`."""
    import bisect

    return bisect.bisect_right(ascending, mark)
