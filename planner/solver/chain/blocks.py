"""Cut a graph into a chain of blocks, and lay out each block by itself.

NOTE [ A chain of blocks ]

Few networks are a chain of ops, but many are a chain of blocks: after an addition to the residual stream,
later ops read only its result. Such an op is an *exit*. A block ends with an exit and begins after the exit
of the block before, which is its *entry*:

    entry | conv - norm - relu - conv - norm - (+ entry) - relu | conv - ...
                                                           exit

The relaxation without integers is weak here. It saves a tenth of every exit, so that a tenth of every block
is recomputed ahead of time; a plan has to save an exit or not. This package keeps decisions whole and counts
fewer bytes instead. They are a subset of the bytes of the program's rows (docs/formulation.md, section 5), so
a bound that it proves holds for every plan. It counts:

- in backward of a block, bursts of its own unpacks included: what the block itself saves and recomputes, what
  the blocks before it save, and, if the entry is recomputed, what the recompute of the entry has made;
- in forward of a block: what it and the blocks before it save so far;
- nothing of the blocks after it, of tensors of other blocks that skip the entry, and of blocks that run
  again in the bursts of later ones;
- no step between the last unpack from a block and the first unpack from the block before it. In such a step,
  autograd may drop what the block before saves for recomputes only. The steps that count for later blocks
  all come earlier, so those bytes are live in each of them.

Only the largest ops of a block are decided (menus.py; one_op_at_a_time.py decides more). All other ops take
no bytes and no time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from autoac.planner.solver.arrays import GraphArrays, Ints, bytes_in_any_case
from autoac.planner.solver.recompute_windows import NEVER

SMALL = 1e-4  # an op with outputs of less than this share of the largest peak does not keep a block together
LONG = 0.25  # of all decisions: an op farther from its last reader spans many blocks
SMALL_IF_LONG = 1e-2  # SMALL for such an op, which may be an attention mask that all layers read
TINY = 1e-5  # a version of less than this share of that peak takes no bytes, so that fewer save sets differ
ALWAYS = -NEVER
STEPS_AHEAD = 10  # a step belongs to the last block that it, or a later one of this many steps, unpacks from


@dataclass(frozen=True, slots=True)
class BlockVersion:
    """A version that an op of the block writes."""

    nbytes: int
    extra_from: int  # ALWAYS: saving it takes bytes from the first step of backward on, or before
    held_from: int  # the op of forward from which saving it takes bytes; NEVER: from a step on
    dropped: int  # ALWAYS: before backward
    last_use: int  # the last step that unpacks it, but at least the step before `Block.later`
    is_decided: bool  # the op itself writes it, and no follower: it is held if the op is saved
    readers: tuple[int, ...]  # other ops of the block
    run: int  # position in `Block.runs` of the run that writes it
    reads: tuple[tuple[int, int], ...]  # (op, run up to which it reads the version); followers included


@dataclass(frozen=True, slots=True)
class BlockOp:
    """A free op, with the versions that it and its followers write."""

    cost_us: float
    first_needed: int
    is_pinned: bool
    readers: tuple[int, ...]  # other ops of the block
    reads_entry: bool
    is_read_later: bool  # other blocks read it, though it is not the exit, and may run it earlier
    versions: tuple[BlockVersion, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that saving the op takes."""
        return sum(version.nbytes for version in self.versions if version.is_decided)


@dataclass(frozen=True, slots=True)
class BlockMoment:
    """A moment of backward, with the bytes that are live under every save set."""

    at: int  # step
    state: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ForwardMoment:
    """An op of forward, with the bytes that are live under every save set."""

    at: int
    nbytes: int
    entry_nbytes: int  # of these, the entry's, which saving it takes as well


@dataclass(frozen=True, slots=True)
class BlockRun:
    """The run of a free op, or of an op that follows it, in backward, with the bytes of its kernel."""

    op: int  # the free op
    workspace: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block, by all that the costs and bytes of its save sets depend on. Blocks built alike are equal.

    Ops are numbered from 0. Steps and states are counted from the first step of the block, and moments of
    forward from its first op. Bytes are those above what every save set has live at that step or op.
    """

    ops: tuple[BlockOp, ...]
    runs: tuple[BlockRun, ...]  # in forward order
    steps: tuple[BlockMoment, ...]
    bursts: tuple[BlockMoment, ...]  # of the unpacks in these steps
    forward: tuple[ForwardMoment, ...]
    later: int  # the last step of the blocks after this one
    demanded_by: int  # state of the first step of earlier blocks: what reads the entry by then demands it
    entry: BlockVersion | None  # None: there is none, or if saved it is held in all of the block's backward
    is_last: bool

    def without_costs(self) -> Block:
        """Return the block with ops that take no time: equal for blocks that differ in measured times."""
        return replace(self, ops=tuple(replace(op, cost_us=0.0) for op in self.ops))


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a block in its graph."""

    rows: range  # of the free ops
    runs: list[int]  # these ops and those that follow them
    op: int  # the first op of forward
    step: int  # the first step of backward
    later: int  # the last step of the blocks after this one


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBlock:
    """A block, with its position in the graph."""

    block: Block
    nbytes: int  # live under every save set in its first step
    nbytes_in_forward: int  # live under every save set in forward, at its first op
    rows: range  # of the free ops
    end_op: int  # the op of forward after it
    exit_nbytes: int
    exit_until: int  # the op of forward until which forward itself holds the exit


def chain_of_blocks(arrays: GraphArrays, ceiling: int, *, timed: bool) -> list[PlacedBlock]:
    """Return the blocks of a graph without use groups, in forward order.

    Args:
        arrays: the graph.
        ceiling: bytes of the save-all peak.
        timed: False to look for the smallest peak. Then no op costs time, so that more blocks are alike.
    """
    return _Chain(arrays, ceiling, timed).blocks()


class _Chain:
    """The free ops and the steps of a graph by block."""

    def __init__(self, arrays: GraphArrays, ceiling: int, timed: bool) -> None:
        self.arrays, self.windows, self.timed = arrays, arrays.windows, timed
        graph = self.windows.graph
        self.n_ops, n_rows = len(graph.ops), len(arrays.free)
        self.certain = bytes_in_any_case(arrays)
        self.versions: list[list[int]] = [[] for _ in range(n_rows)]
        for v, row in enumerate(arrays.row[arrays.op].tolist()):
            if row >= 0:
                self.versions[row].append(v)
        is_free = arrays.row >= 0
        self.readers = [{int(arrays.row[r]) for r in v.readers if is_free[r]} for v in graph.versions]
        self.exits, self.tiny = self._exits(ceiling), TINY * ceiling
        self.ends = sorted({*self.exits, n_rows - 1} - {-1})
        self.block_of_step = self._blocks_of_steps()
        self.may_count = np.isin(arrays.op, arrays.free)
        self.overwrites = set(
            zip(
                *(x[arrays.pair_overwrites].tolist() for x in (arrays.pair_version, arrays.pair_reader)),
                strict=True,
            )
        )

    def _exits(self, ceiling: int) -> dict[int, int]:
        """Return the rows of exits, each with the version that later ops read. Small ones do not count."""
        exits: dict[int, int] = {}
        crossing: dict[int, int] = {}  # version -> last reader
        n_rows = len(self.arrays.free)
        for row in range(n_rows):
            crossing = {v: last for v, last in crossing.items() if last > row}
            for v in self.versions[row]:
                last = max(self.readers[v], default=-1)
                least = (SMALL_IF_LONG if last - row > LONG * n_rows else SMALL) * ceiling
                if last > row and self._is_decided(v) and self.arrays.nbytes[v] > least:
                    crossing[v] = last
            if len(crossing) == 1 and (version := next(iter(crossing))) in self.versions[row]:
                exits[row] = version
        return exits

    def _blocks_of_steps(self) -> Ints:
        """Return by step the block that it belongs to, or -1 if it comes after all unpacks from that block.

        Blocks only ever go down from one step to the next.
        """
        graph, ends = self.windows.graph, self.arrays.free[self.ends]
        block = np.full(len(graph.steps), -1)
        for step, version in self.windows.unpacks:
            op = graph.versions[version].op
            if self.arrays.row[op] >= 0:
                block[step] = max(block[step], min(int(np.searchsorted(ends, op)), len(ends) - 1))
        unpacking = np.flatnonzero(block >= 0)
        ahead = np.r_[block[unpacking], np.full(STEPS_AHEAD - 1, -1)]
        current = np.full(len(block), len(ends) - 1)
        if len(unpacking):
            current[unpacking] = sliding_window_view(ahead, STEPS_AHEAD).max(axis=1)
        current = np.minimum.accumulate(current)
        last = np.full(len(ends) + 1, -1)
        last[current[unpacking]] = unpacking
        return np.where(np.arange(len(current)) <= last[current], current, -1)

    def blocks(self) -> list[PlacedBlock]:
        """Return the blocks in forward order."""
        return [self._block(k, range(a + 1, b + 1)) for k, (a, b) in enumerate(pairwise([-1, *self.ends]))]

    def _block(self, k: int, rows: range) -> PlacedBlock:
        arrays, state_after = self.arrays, self.windows.state_after
        steps = np.flatnonzero(self.block_of_step == k).tolist()
        before = np.flatnonzero((self.block_of_step < k) & (self.block_of_step >= 0))
        later = int(np.flatnonzero(self.block_of_step > k).max(initial=-1))
        first = steps[0] if steps else later + 1
        state = state_after[first] if first < len(state_after) else self.windows.n_states
        base = int(self.certain[min(self.n_ops + first, len(self.certain) - 1)])
        base_in_forward = int(self.certain[self._first_op(rows)])
        entry = self.exits.get(rows.start - 1)
        place = _Place(rows, self._runs(rows), self._first_op(rows), first, later)
        is_last = rows.stop - 1 == self.ends[-1]
        is_certain = entry is not None and arrays.dropped[entry] > self.n_ops + max(steps, default=later)
        block = Block(
            ops=tuple(self._op(row, place, state, entry) for row in rows),
            runs=tuple(
                BlockRun(int(arrays.row[op]) - rows.start, self.windows.graph.ops[op].workspace_bytes)
                for op in place.runs
            ),
            steps=tuple(
                BlockMoment(j - first, state_after[j] - state, int(self.certain[self.n_ops + j]) - base)
                for j in steps
            ),
            bursts=tuple(
                BlockMoment(j - first, t - state, nbytes - base)
                for j in steps
                for t, nbytes in self._bursts(j)
            ),
            forward=self._forward(place, base_in_forward, entry, is_last),
            later=later - first,
            demanded_by=state_after[int(before[0])] - state if len(before) else NEVER,
            entry=None if entry is None or is_certain else self._version(entry, place),
            is_last=is_last,
        )
        exit_ = self.exits.get(rows.stop - 1)
        nbytes, until = (0, 0) if exit_ is None else (arrays.nbytes[exit_], arrays.extra_from[exit_])
        return PlacedBlock(
            block,
            base,
            base_in_forward,
            rows,
            self._first_op(range(rows.stop, rows.stop)),
            int(nbytes),
            int(until),
        )

    def _runs(self, rows: range) -> list[int]:
        return np.flatnonzero((self.arrays.row >= rows.start) & (self.arrays.row < rows.stop)).tolist()

    def _first_op(self, rows: range) -> int:
        return int(self.arrays.free[rows.start - 1]) + 1 if rows.start else 0

    def _bursts(self, j: int) -> Iterator[tuple[int, int]]:
        """Yield the state that each unpack of step `j` leads to, and the bytes live under every save set."""
        step, state_after = self.windows.graph.steps[j], self.windows.state_after
        unpacking = min(step.extra_bytes_while_unpacking, step.extra_bytes_peak)
        for t in range(state_after[j - 1] if j else 0, state_after[j]):
            yield t + 1, int(self.certain[self.n_ops + j]) - step.extra_bytes_peak + unpacking

    def _op(self, row: int, place: _Place, state: int, entry: int | None) -> BlockOp:
        arrays = self.arrays
        needed = int(arrays.first_needed[row])
        readers = [int(arrays.row[r]) for r in self.windows.readers[arrays.free[row]]]
        return BlockOp(
            cost_us=float(arrays.cost_us[row]) if self.timed else 0.0,
            first_needed=needed - state if needed < NEVER else NEVER,
            is_pinned=bool(arrays.pinned[row]),
            readers=_inside(readers, place.rows),
            reads_entry=entry is not None and row in self.readers[entry],
            is_read_later=row not in self.exits and any(r not in place.rows for r in readers),
            versions=tuple(self._version(v, place) for v in self.versions[row]),
        )

    def _version(self, v: int, place: _Place) -> BlockVersion:
        arrays, begin, op = self.arrays, self.n_ops + place.step, int(self.arrays.op[v])
        nbytes, extra_from, dropped = int(arrays.nbytes[v]), int(arrays.extra_from[v]), int(arrays.dropped[v])
        if nbytes < self.tiny:
            nbytes = 0
        return BlockVersion(
            nbytes=nbytes,
            extra_from=extra_from - begin if nbytes and extra_from > self.n_ops else ALWAYS,
            held_from=max(op, extra_from) - place.op if extra_from < self.n_ops else NEVER,
            dropped=dropped - begin if dropped > self.n_ops else ALWAYS,
            last_use=max(int(arrays.last_use[v]), place.later - 1) - place.step,
            is_decided=self._is_decided(v),
            readers=_inside(self.readers[v] - {int(arrays.row[op])}, place.rows),
            run=bisect_left(place.runs, op),
            reads=tuple(
                (int(arrays.row[r]) - place.rows.start, place.runs.index(r) - ((v, r) in self.overwrites))
                for r in self.windows.graph.versions[v].readers
                if int(arrays.row[r]) in place.rows
            ),
        )

    def _is_decided(self, v: int) -> bool:
        """Return True if a free op itself writes `v`, and not an op that follows it."""
        op = self.arrays.op[v]
        return bool(self.arrays.free[self.arrays.row[op]] == op)

    def _forward(
        self, place: _Place, base: int, entry: int | None, is_last: bool
    ) -> tuple[ForwardMoment, ...]:
        """Return the moments of forward from the first op of the block to the last.

        A version of an earlier block that forward itself still holds is left out: if it is saved, it counts
        in the labels (blockwise.py). Exits are not left out.
        """
        arrays = self.arrays
        earlier = self.may_count & (arrays.op < place.op) & (arrays.extra_from <= self.n_ops)
        earlier[list(self.exits.values())] = False
        moments = []
        for op in range(place.op, self.n_ops if is_last else int(arrays.free[place.rows.stop - 1]) + 1):
            twice = int(arrays.nbytes[earlier & (op < arrays.extra_from)].sum())
            is_twice = entry is not None and op < arrays.extra_from[entry]
            nbytes = int(arrays.nbytes[entry]) if is_twice else 0
            moments.append(ForwardMoment(op - place.op, int(self.certain[op]) - twice - base, nbytes))
        return tuple(moments)


def _inside(readers: Iterable[int], rows: range) -> tuple[int, ...]:
    return tuple(sorted(row - rows.start for row in set(readers) if row in rows))
