"""Turn the records of a profiled step into the columns of a Profile. Pure: calls no torch, reads no clock."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoac.planner.formats.profile import (
    BackwardSteps,
    OpFlag,
    Ops,
    Outputs,
    Profile,
    Ragged,
    SavedTensors,
    Storages,
    Temporaries,
    Values,
)
from autoac.planner.units import rounded_bytes
from autoac.profiler.steps.step_record import StepRecord
from autoac.tape.capture.allocations import AllocatedBlock, allocated_between
from autoac.tape.capture.fake_allocations import Allocations
from autoac.tape.capture.op_recorder import RecordedStorage
from autoac.tape.capture.saved_tensor_recorder import SavedEvent


def assemble(step: StepRecord, rounding: int, **head: Any) -> Profile:
    """Return the Profile of a profiled step, whose loop drops the outputs before backward.

    Args:
        step: its records.
        rounding: the device's allocator rounds sizes to multiples of this.
        head: the fields of the profile that the records do not have.
    """
    record, saved, forward = step.allocations, step.saved, step.forward
    at = record.positions
    blocks = [_block_of(record, storage) for storage in forward.storages]
    of_forward = [block for block in blocks if block is not None]
    registers = [block for held in saved.in_registers if (block := _block_of(record, held)) is not None]
    registers += [block for begin, end in saved.kernels for block in _temporaries(record, begin, end)]
    own = [block for begin, end in step.hidden for block in allocated_between(record, begin, end)]
    temporary = [
        (block, at[held.mark]) for held in step.temporary if (block := _block_of(record, held)) is not None
    ]
    other = _LiveBytes.of(
        record,
        hidden=[*of_forward, *registers, *own, *(block for block, _ in temporary), *step.workspaces],
    )
    requested = _requested_nbytes(blocks, forward.storages, rounding)
    n = len(forward.ops)
    outputs: list[list[AllocatedBlock]] = [[] for _ in forward.ops]
    for version in forward.versions:
        if version.previous < 0 and (output := blocks[version.storage]) is not None:
            outputs[version.op].append(output)

    steps, pass_ends = _backward_steps(step, other)
    ends = [following.begin for following in steps[1:]] + [at[step.backward_end]]
    end_marks = [following.begin_mark for following in steps[1:]] + [step.backward_end]
    moments = _Moments([at[op.begin_mark] for op in forward.ops], at[step.backward_begin], ends)

    dropped = [n + len(steps)] * len(saved.versions)
    for event in saved.events:
        if event.kind == "drop" and event.mark < step.backward_begin:
            dropped[event.saved] = moments.in_forward(at[event.mark])
    for j, backward_step in enumerate(steps):
        for h in backward_step.drops:
            dropped[h] = n + j + 1
    late = _returned_as_gradients(step, steps, ends)
    for block, until in temporary:
        freed_at = max(block.allocated_at, until - 1)
        late.append((replace(block, freed_at=freed_at), block.allocated_at))
    other = other.with_late(late)
    step_marks = [backward_step.begin_mark for backward_step in steps]
    released = tuple(
        min(
            moments.after(block.freed_at) if block and block.freed_at is not None else n + len(steps),
            _let_go(step, storage, step_marks) if block else n + len(steps),
        )
        for block, storage in zip(blocks, forward.storages, strict=True)
    )
    begins = [at[op.begin_mark] for op in forward.ops] + [s.begin for s in steps]
    needed_until = _needed_in_forward(step)
    released = _with_needs(step, released, needed_until)
    added_up = {record.block_at(address, mark): at[mark] for address, mark in step.gradients}
    temporaries = _block_changes(record, other.positions, late, added_up, begins, at[step.backward_end])
    must_save = [op.must_save for op in forward.ops]
    rows = [(position, storage) for position, storage in forward.outputs if blocks[storage] is not None]
    modules = _Names(["."])
    overloads, nodes, reasons = _Names(), _Names(), _Names()
    op_times = [step.op_times[op.signature] for op in forward.ops]
    flags = [
        OpFlag.RANDOM * op.random
        | OpFlag.MUTATES * op.facts.mutates
        | OpFlag.COLLECTIVE * op.facts.collective
        | OpFlag.MUST_RECOMPUTE * (op.must_recompute and not reason)
        | OpFlag.COMPILED * op.compiled
        | OpFlag.GRAPH_BEGINS * op.begins_graph
        for op, reason in zip(forward.ops, must_save, strict=True)
    ]
    return Profile(
        **head,
        gradient_nbytes=other.as_begins(at[step.backward_end]),
        kept_nbytes=-sum(
            change.nbytes for change in record.changes[at[step.graph_end] : at[step.backward_end]]
        ),
        ops=Ops(
            module=tuple(modules.index(op.module) for op in forward.ops),
            overload=tuple(overloads.index(op.facts.name) for op in forward.ops),
            reads=Ragged.of([op.reads for op in forward.ops]),
            runtime_us=tuple(
                round(runtime * op.time_share, 3)
                for op, (runtime, _, _) in zip(forward.ops, op_times, strict=True)
            ),
            spread_us=tuple(spread for _, spread, _ in op_times),
            flops=tuple(op.flops for op in forward.ops),
            workspace_nbytes=tuple(
                op.workspace + other.workspace(at[op.begin_mark], at[op.end_mark], op_outputs)
                for op, op_outputs in zip(forward.ops, outputs, strict=True)
            ),
            other_nbytes=tuple(other.at[at[op.begin_mark]] for op in forward.ops),
            flags=tuple(int(flag) for flag in flags),
            must_save=tuple(reasons.index(reason) if reason else -1 for reason in must_save),
        ),
        storages=Storages(
            nbytes=requested,
            slack_nbytes=tuple(
                block.nbytes - nbytes if block else 0 for block, nbytes in zip(blocks, requested, strict=True)
            ),
            released=released,
        ),
        values=Values(
            storage=tuple(version.storage for version in forward.versions),
            op=tuple(version.op for version in forward.versions),
            previous=tuple(version.previous for version in forward.versions),
        ),
        saved=SavedTensors(
            value=tuple(saved.newest_unchanged(h, until) for h, until in enumerate(dropped)),
            packed=tuple(saved.packed),
            dropped=tuple(dropped),
            needed_until=needed_until,
        ),
        backward=BackwardSteps(
            name=tuple(nodes.index(s.name or "backward") for s in steps),
            unpacks=Ragged.of([s.unpacks for s in steps]),
            runtime_us=tuple(_runtimes_us(step, [s.begin_mark for s in steps], end_marks)),
            other_nbytes=tuple(other.as_begins(s.begin) for s in steps),
            peak_nbytes=tuple(
                other.peak(s.begin, end, s.work if s.work >= 0 else s.begin)
                for s, end in zip(steps, ends, strict=True)
            ),
        ),
        outputs=Outputs(
            position=tuple(position for position, _ in rows),
            storage=tuple(storage for _, storage in rows),
            released=tuple(released[storage] for _, storage in rows),
        ),
        temporaries=temporaries,
        modules=tuple(modules),
        overloads=tuple(overloads),
        nodes=tuple(nodes),
        reasons=tuple(reasons),
        forward_ends=tuple(forward.forward_ends) if len(forward.forward_ends) > 1 else (),
        link=None,
        pass_ends=pass_ends,
        waiting_microbatches=0,
        loss_begins=end if (end := max(forward.forward_ends, default=0)) < len(forward.ops) else None,
    )


def _block_of(record: Allocations, storage: RecordedStorage) -> AllocatedBlock | None:
    """Return the block of a storage; None if the device's allocator did not allocate it."""
    return record.block_at(storage.address, storage.mark) if storage.address else None


def _runtimes_us(step: StepRecord, begins: Sequence[int], ends: Sequence[int]) -> Iterator[float]:
    """Yield the time between marks, without that of recomputes."""
    ns = step.times_ns
    spans = sorted(step.hidden)
    for begin, end in zip(begins, ends, strict=True):
        first = bisect.bisect_left(spans, (begin, -1))
        last = bisect.bisect_left(spans, (end, -1))
        own = sum(ns[until] - ns[since] for since, until in spans[first:last])
        yield max(0, ns[end] - ns[begin] - own) / 1e3


def _let_go(step: StepRecord, storage: RecordedStorage, step_marks: Sequence[int]) -> int:
    """Return the first moment at which only the region of an observed step held a storage."""
    n = len(step.forward.ops)
    if storage.let_go < 0:
        return n + len(step_marks)
    if storage.let_go < step.backward_begin:
        return storage.let_go_before
    return n + bisect.bisect_right(step_marks, storage.let_go)


def _unpacked(step: StepRecord, event: SavedEvent) -> AllocatedBlock | None:
    """Return the memory that backward got for a saved tensor, with where backward has freed it."""
    record = step.allocations
    at = record.positions
    begin = at[event.end_mark]
    storage = step.forward.versions[step.saved.versions[event.saved]].storage
    block = _block_of(record, step.forward.storages[storage])
    if block is None:
        return None
    freed: int | None
    if event.kept:
        functions = record.functions
        i = bisect.bisect_right(functions, begin, key=lambda function: function[0]) - 1
        freed = functions[i][1] if i >= 0 else begin
    else:
        freed = at[event.freed_mark] if event.freed_mark >= 0 else None
    return AllocatedBlock(block.address, block.nbytes, begin, freed)


def _needed_in_forward(step: StepRecord) -> tuple[int, ...]:
    """Return for each saved tensor the moment until which a backward inside of forward needs it, or 0."""
    until = [0] * len(step.saved.versions)
    for event in step.saved.events:
        until[event.saved] = max(until[event.saved], event.needed_until)
    return tuple(until)


def _with_needs(step: StepRecord, released: Sequence[int], needed_until: Sequence[int]) -> tuple[int, ...]:
    """Return when each storage is free, if forward holds what a backward inside of it needs."""
    until = list(released)
    for version, moment in zip(step.saved.versions, needed_until, strict=True):
        storage = step.forward.versions[version].storage
        until[storage] = max(until[storage], moment)
    return tuple(until)


def _returned_as_gradients(
    step: StepRecord, steps: Sequence[_BackwardStep], ends: Sequence[int]
) -> list[tuple[AllocatedBlock, int]]:
    """Return the saved tensors that backward returned as gradients, each with where it becomes one.

    A Function may return a saved tensor as a gradient, as Liger's fused cross-entropy does. In training the
    storage then lives on as the gradient after autograd has dropped the saved tensor, whether it was saved or
    recomputed.
    """
    versions = step.forward.versions
    dropped = {h: end for backward_step, end in zip(steps, ends, strict=True) for h in backward_step.drops}
    found: dict[int, tuple[AllocatedBlock, int]] = {}  # by version, whose saved tensors share a storage
    for event in step.saved.events:
        if event.kind != "unpack" or event.saved not in dropped or event.mark < step.backward_begin:
            continue
        version = step.saved.versions[event.saved]
        block = _unpacked(step, event)
        if block is None or step.forward.ops[versions[version].op].compiled:
            continue  # compiled code frees what it unpacks where it likes, and returns none of it
        begin = max(dropped[event.saved], found[version][1] if version in found else 0)
        if block.freed_at is None or block.freed_at > begin:
            found[version] = block, begin
    return list(found.values())


def _block_changes(
    record: Allocations,
    positions: Sequence[int],
    late: Sequence[tuple[AllocatedBlock, int]],
    added_up: Mapping[AllocatedBlock | None, int],
    begins: Sequence[int],
    end: int,
) -> Temporaries:
    """Return the blocks that these changes allocate and free, by moment.

    A gradient that outlives backward is a block of its own from the moment at which it is added up. Before,
    it is a temporary: if a gradient exists already, it is added to that one then, and freed.

    Args:
        record: all changes.
        positions: of the changes.
        late: more blocks, each with the position from which it counts, until it is freed.
        added_up: by block of a gradient, the position at which it is added up.
        begins: the position at which each moment begins; the first one also has what comes before it.
        end: the position at which the last moment ends.
    """
    changes: list[tuple[float, int, AllocatedBlock]] = [
        (position, 1, record.changes[position].block) for position in positions
    ]
    made = {block for _, _, block in changes}

    def moment(position: float) -> int:
        return max(0, bisect.bisect_right(begins, position) - 1)

    for gradient, position in added_up.items():
        if gradient is None or gradient not in made:
            continue
        between = position - 0.5  # two changes
        outlives = gradient.freed_at is None or gradient.freed_at >= end
        if outlives and moment(between) > moment(gradient.allocated_at):
            changes += (between, 0, gradient), (between, 1, replace(gradient))
    for block, begin in late:
        changes.append((begin, 0, block))
        if block.freed_at is not None:
            changes.append((block.freed_at, 1, block))
    nbytes, indices = list[int](), dict[int, int]()  # by the block's identity
    rows: list[list[int]] = [[] for _ in begins]
    for change_at, _, block in sorted(changes, key=lambda change: change[:2]):
        if change_at >= end:
            break
        if id(block) not in indices:
            indices[id(block)] = len(nbytes)
            nbytes.append(block.nbytes)
        rows[moment(change_at)].append(indices[id(block)])
    return Temporaries(nbytes=tuple(nbytes), changes=Ragged.of(rows))


def _temporaries(record: Allocations, begin: int, end: int) -> list[AllocatedBlock]:
    """Return the blocks that are allocated and freed between two marks."""
    allocated, last = allocated_between(record, begin, end), record.positions[end]
    return [block for block in allocated if block.freed_at is not None and block.freed_at < last]


def _requested_nbytes(
    blocks: Sequence[AllocatedBlock | None], storages: Sequence[RecordedStorage], rounding: int
) -> tuple[int, ...]:
    """Return the bytes that each storage requested of its block, rounded; 0 without a block."""
    return tuple(
        min(rounded_bytes(storage.nbytes, rounding), block.nbytes) if block else 0
        for block, storage in zip(blocks, storages, strict=True)
    )


class _Names(list[str]):
    """A list of distinct names, which a column of the Profile refers to by index."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__(names)
        self._indices = {name: i for i, name in enumerate(names)}

    def index(self, name: str) -> int:  # type: ignore[override]
        """Return the index of `name`, which is appended if it is new."""
        if name not in self._indices:
            self._indices[name] = len(self)
            self.append(name)
        return self._indices[name]


@dataclass(frozen=True, slots=True)
class _LiveBytes:
    """Bytes live in some of the blocks, at each position of the record."""

    at: list[int]  # by position
    positions: list[int]  # of the changes that count, ascending
    added: Mapping[int, int] = field(default_factory=dict)  # as a step begins, to what the one before had

    @classmethod
    def of(cls, record: Allocations, hidden: Sequence[AllocatedBlock]) -> _LiveBytes:
        """Count the blocks that are not `hidden`."""
        skipped = {id(block) for block in hidden}
        live, at, positions = 0, [0], list[int]()
        for position, change in enumerate(record.changes):
            if id(change.block) not in skipped:
                live += change.nbytes
                positions.append(position)
            at.append(live)
        return cls(at, positions)

    def with_late(self, blocks: Sequence[tuple[AllocatedBlock, int]]) -> _LiveBytes:
        """Count these blocks too, each from the step that begins at a position until it is freed."""
        at, added = list(self.at), dict[int, int]()
        for block, begin in blocks:
            added[begin] = added.get(begin, 0) + block.nbytes
            for position in range(begin + 1, len(at) if block.freed_at is None else block.freed_at + 1):
                at[position] += block.nbytes
        return replace(self, at=at, added=added)

    def as_begins(self, position: int) -> int:
        """Return the bytes live as the step that begins at `position` does."""
        return self.at[position] + self.added.get(position, 0)

    def peak(self, begin: int, end: int, work: int) -> int:
        """Return the most bytes live in the step between two positions, from where its work begins."""
        work = min(work, end)  # CPU and GPU have a thread each
        at = self.at[work : end + 1]  # what counts from `end` on is the next step's
        return max(self.as_begins(begin), *at) if work <= begin else max(at)

    def workspace(self, begin: int, end: int, outputs: Sequence[AllocatedBlock]) -> int:
        """Return the most bytes that an op between two positions holds in addition to all of its outputs.

        Workspace that the op frees before it allocates an output is replaced by that output.
        """
        most = max(
            self.at[position] + sum(block.nbytes for block in outputs if block.allocated_at < position)
            for position in range(begin, end + 1)
        )
        return max(0, most - self.at[begin] - sum(block.nbytes for block in outputs))

    def changes_between(self, begin: int, end: int) -> bool:
        """Return True if a counted block is allocated or freed between two positions."""
        i = bisect.bisect_left(self.positions, begin)
        return i < len(self.positions) and self.positions[i] < end


@dataclass(slots=True)
class _BackwardStep:
    """A backward step of the Profile, while it is put together."""

    begin: int  # position
    begin_mark: int  # mark at or before it, for the time
    name: str = ""
    unpacks: list[int] = field(default_factory=list)
    work: int = -1  # position at which its work begins; -1: not yet
    drops: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Event:
    """An event that may begin a new backward step."""

    position: int
    mark: int  # at or before `position`
    kind: str  # "unpack", "unpin", "drop", "pass"
    end: int = -1  # position at which an unpack ends
    saved: int = -1
    node: str = ""


def _backward_events(step: StepRecord) -> list[_Event]:
    at = step.allocations.positions
    events = [_Event(at[mark], mark, "pass") for mark in step.pass_ends]
    for event in step.saved.events:
        if not step.backward_begin <= event.mark <= step.backward_end:
            continue
        end = at[event.end_mark] if event.end_mark >= 0 else -1
        events.append(_Event(at[event.mark], event.mark, event.kind, end, event.saved, event.node))
        block = _unpacked(step, event)
        if block is not None and block.freed_at is not None:
            # The node has returned: what it unpacked is freed, what autograd holds is not yet.
            events.append(_Event(block.freed_at, event.end_mark, "unpin"))
    return sorted(events, key=lambda event: (event.position, event.mark))


def _backward_steps(step: StepRecord, other: _LiveBytes) -> tuple[list[_BackwardStep], tuple[int, ...]]:
    """Cut backward into steps: in each, unpacks, then work, then frees of unpacked tensors, then drops.

    Autograd drops what it saved only after it has checked the node's gradients, which can allocate. Unpacked
    tensors are freed by then, so that work becomes a step of its own.

    Returns:
        The steps, and how many there are up to the end of each pass but the last.
    """
    at = step.allocations.positions
    begin, end = at[step.backward_begin], at[step.backward_end]
    current = _BackwardStep(begin, step.backward_begin)
    steps = [current]
    pass_ends: list[int] = []
    closing = False  # the current step has freed or dropped something
    previous = begin
    mark = step.backward_begin  # the latest so far: a tensor of an early unpack may be freed late
    for event in _backward_events(step):
        mark = max(mark, event.mark)
        if other.changes_between(previous, event.position):
            if closing:
                current, closing = _BackwardStep(previous, mark), False
                steps.append(current)
            if current.work < 0:
                current.work = previous
        if event.kind == "unpack":
            if closing or current.work >= 0:
                current, closing = _BackwardStep(event.position, mark), False
                steps.append(current)
            current.unpacks.append(event.saved)
            current.name = current.name or event.node
            previous = event.end
            continue
        if current.work < 0:
            current.work = previous
        closing = True
        if event.kind == "drop":
            current.drops.append(event.saved)
        elif event.kind == "pass":
            pass_ends.append(len(steps))
        previous = event.position
    if other.changes_between(previous, end) and closing:
        steps.append(_BackwardStep(previous, step.backward_end, work=previous))
    elif current.work < 0:
        current.work = previous
    return steps, tuple(dict.fromkeys(end for end in pass_ends if end < len(steps)))


@dataclass(frozen=True, slots=True)
class _Moments:
    """Convert positions in the allocator's record to moments of a Profile."""

    op_begins: list[int]  # positions
    backward_begin: int
    step_ends: list[int]

    def in_forward(self, position: int) -> int:
        """Return the first forward op that begins after `position`."""
        return bisect.bisect_right(self.op_begins, position)

    def after(self, position: int) -> int:
        """Return the first moment that begins after the change at `position`."""
        if position < self.backward_begin:
            return self.in_forward(position)
        n = len(self.op_begins)
        return n + min(bisect.bisect_right(self.step_ends, position) + 1, len(self.step_ends))
