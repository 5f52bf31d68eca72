"""List what the save sets of one block cost and hold, without those that are worse in every way."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from autoac.planner.solver.arrays import Bools, Floats, Ints
from autoac.planner.solver.chain.blocks import ALWAYS, Block, BlockVersion
from autoac.planner.solver.recompute_windows import NEVER

MOST_DECISIONS = 12  # of a block: its other ops, the smallest, take no bytes and no time
MOST_NUMBERS = 2**26  # of save sets, versions and steps: in a block with many, fewer ops are decided


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """The save sets of a block, by position. Bytes are those of `Block`.

    The need of a block is the most bytes that are live in its steps, without the blocks before it.
    """

    saved: Bools  # by save set and op
    runs_again: Bools  # by save set and op
    cost_us: Floats
    held: Floats  # by what it saves, in backward of later blocks
    entry_held: Floats  # by a saved entry, in backward of later blocks, since this block still needs it
    recomputed: Floats  # in backward of later blocks
    need: Floats  # if the entry is not saved
    need_while_demanded: Floats  # of the moments at which the entry has been recomputed; -inf if it never is
    need_with_entry: Floats  # if the entry is saved
    need_in_forward: Floats
    need_in_forward_with_entry: Floats
    demands_entry: Bools  # before backward of the blocks before: the entry must be saved or recomputed
    passes_on: Bools  # the entry is recomputed as soon as the exit is
    saves_exit: Bools

    def __len__(self) -> int:
        return len(self.cost_us)

    def priced(self, block: Block) -> Menu:
        """Return the menu of `block`, which is this one's but for its costs, without worse save sets."""
        cost_us = self.runs_again @ np.array([op.cost_us for op in block.ops])
        return replace(self, cost_us=cost_us).undominated()

    def rounded(self, cost_step_us: float) -> Menu:
        """Return the menu with costs rounded down to multiples, so that more save sets are not worth it."""
        cost_us = np.floor(self.cost_us / cost_step_us) * cost_step_us
        return replace(self, cost_us=cost_us).undominated()

    def undominated(self) -> Menu:
        """Return the menu without save sets that another one is at most as large as in each number."""
        numbers = [
            self.cost_us, self.held, self.recomputed, self.need, self.need_while_demanded,
            self.need_with_entry, self.need_in_forward, self.need_in_forward_with_entry, self.entry_held,
            self.demands_entry, self.passes_on, ~self.saves_exit,
        ]  # fmt: skip
        best = _not_dominated(np.stack(numbers, axis=1).astype(float))
        return Menu(*(getattr(self, f.name)[best] for f in fields(self)))


def unpriced_menu(block: Block, *, is_demanded: bool) -> Menu:
    """Return all save sets of `block`, without costs.

    With `is_demanded`, a later block has the exit recomputed.
    """
    return _Table(block, is_demanded).menu()


class _Table:
    """All save sets of a block, as columns of arrays."""

    def __init__(self, block: Block, is_demanded: bool) -> None:
        self.block, self.is_demanded = block, is_demanded and not block.is_last
        n = len(block.ops)
        free = [i for i in range(n) if block.ops[i].nbytes and not block.ops[i].is_pinned]
        free.sort(key=lambda i: (i < n - 1, -block.ops[i].nbytes))  # the exit first
        numbers = max(1, sum(len(op.versions) for op in block.ops) * (len(block.steps) + len(block.bursts)))
        decided = free[: min(MOST_DECISIONS, max(1, (MOST_NUMBERS // numbers).bit_length() - 1))]
        self.is_decided = np.isin(np.arange(n), decided)
        masks = np.arange(1 << len(decided))
        self.saved = np.array([[not op.is_pinned] for op in block.ops]) & np.ones(len(masks), bool)
        for bit, op in enumerate(decided):
            self.saved[op] = masks >> bit & 1 > 0
        if self.is_demanded:  # an exit that is saved is not recomputed: the other menu has it
            self.saved = self.saved[:, ~self.saved[-1]]
        self.zero: Floats = np.zeros(self.saved.shape[1])
        self.nothing: Ints = np.zeros(self.saved.shape[1], np.int64)
        self.start, self.entry_start = self._starts()
        self.is_certain = self.start == self._earliest_starts()
        self.until, self.entry_until = self._held_until()
        self.versions = [(i, v) for i, op in enumerate(block.ops) for v in op.versions if v.nbytes]
        self.nbytes = np.array([version.nbytes for _, version in self.versions], float)
        self.last_use = np.array([version.last_use for _, version in self.versions], np.int64)
        self.begin = self.start[[i for i, _ in self.versions]]
        self.last_read = np.reshape([self._last_read(v) for _, v in self.versions], self.begin.shape)

    def _starts(self) -> tuple[Ints, Ints]:
        """Return the states in which the block has its ops, and the entry, run again. ALWAYS: before it."""
        start = np.full(self.saved.shape, NEVER)
        entry = self.nothing + NEVER
        for i in reversed(range(len(start))):
            op = self.block.ops[i]
            first = ALWAYS if self.is_demanded and i == len(start) - 1 else op.first_needed
            start[i] = np.min([self.nothing + first, *(start[r] for r in op.readers)], axis=0)
            start[i][self.saved[i]] = NEVER
            if op.reads_entry:
                entry = np.minimum(entry, start[i])
        return start, np.where(entry <= self.block.demanded_by, entry, NEVER)

    def _earliest_starts(self) -> Ints:
        """Return the states in which ops run again if all that is not decided has them run early.

        An op that is not decided counts as saved, so what it reads may in truth run earlier. What runs
        earlier may be over earlier: bytes within a burst count only if this state is the one of `_starts`.
        """
        early = np.full(self.saved.shape, NEVER)
        for i in reversed(range(len(early))):
            op = self.block.ops[i]
            is_asked = op.is_read_later or (self.is_demanded and i == len(early) - 1)
            first = ALWAYS if is_asked else op.first_needed
            early[i] = np.min([self.nothing + first, *(early[r] for r in op.readers)], axis=0)
            if self.is_decided[i]:
                early[i][self.saved[i]] = NEVER
        return early

    def _held_until(self) -> tuple[list[list[Ints]], Ints]:
        """(9) Return until when the versions of each op are held if saved, and the entry if it is saved."""
        until: list[list[Ints]] = [[] for _ in self.block.ops]
        by_unsaved = np.full(self.saved.shape, ALWAYS)
        for i in reversed(range(len(until))):
            op = self.block.ops[i]
            until[i] = [self._last_need(version, by_unsaved, version.dropped) for version in op.versions]
            is_unpacked = op.first_needed < NEVER
            needs = (
                self._last_need(v, by_unsaved, v.dropped if is_unpacked else ALWAYS) for v in op.versions
            )
            by_unsaved[i] = np.max([self.nothing + ALWAYS, *needs], axis=0)
            by_unsaved[i][self.saved[i]] = ALWAYS
        entry = self.block.entry
        if entry is None:
            return until, self.nothing + ALWAYS
        return until, self._last_need(entry, by_unsaved, ALWAYS)

    def _last_need(self, version: BlockVersion, by_unsaved: Ints, dropped: int) -> Ints:
        result: Ints = np.max([self.nothing + dropped, *(by_unsaved[r] for r in version.readers)], axis=0)
        return result

    def menu(self) -> Menu:
        block, start = self.block, self.start
        held = self._saved_bytes(ALWAYS, block.later)
        entry_held = self._entry_bytes(ALWAYS, block.later)
        recomputed = self._recomputed_bytes(ALWAYS, block.later) if self.is_demanded else self.zero
        need, demanded, with_entry = (np.full_like(self.zero, -np.inf) for _ in range(3))
        for moment in block.steps:
            live = moment.nbytes + self._saved_bytes(moment.at, moment.at)
            live += self._recomputed_bytes(moment.state, moment.at)
            need = np.maximum(need, live)
            demanded = np.where(self.entry_start <= moment.state, np.maximum(demanded, live), demanded)
            with_entry = np.maximum(with_entry, live + self._entry_bytes(moment.at, moment.at))
        for moment in block.bursts:
            mine = np.flatnonzero(((start == moment.state) & self.is_certain).any(axis=0))
            if len(mine):
                live = moment.nbytes + self._saved_bytes(moment.at, moment.at)[mine]
                live += self._burst_bytes(moment.state, moment.at, mine)
                need[mine] = np.maximum(need[mine], live)
                is_demanded = self.entry_start[mine] <= moment.state
                demanded[mine] = np.where(is_demanded, np.maximum(demanded[mine], live), demanded[mine])
                live += self._entry_bytes(moment.at, moment.at)[mine]
                with_entry[mine] = np.maximum(with_entry[mine], live)
        in_forward, with_entry_in_forward = (np.full_like(self.zero, -np.inf) for _ in range(2))
        for op in block.forward:
            live = op.nbytes + self._saved_bytes_in_forward(op.at)
            in_forward = np.maximum(in_forward, live)
            with_entry_in_forward = np.maximum(with_entry_in_forward, live + entry_held - op.entry_nbytes)
        demands = self.entry_start < NEVER
        passes_on = self.entry_start == ALWAYS
        saves_exit = self.saved[-1] & self.is_decided[-1]
        return Menu(
            self.saved.T, (start < NEVER).T, self.zero, held, entry_held, recomputed, need, demanded,
            with_entry, in_forward, with_entry_in_forward, demands, passes_on, saves_exit,
        )  # fmt: skip

    def _recomputed_bytes(self, state: int, moment: int) -> Floats:
        """(11) Return the recomputed bytes that are live in a step, after its unpacks have led to `state`."""
        is_kept = (self.last_use >= moment)[:, None] | (self.last_read > state)
        nbytes: Floats = self.nbytes @ ((self.begin <= state) & is_kept)
        return nbytes

    def _last_read(self, version: BlockVersion) -> Ints:
        """Return by save set the last state in which an op certainly runs that reads the version."""
        reads = self.start[[r for r, _ in version.reads]]
        runs = self.is_certain[[r for r, _ in version.reads]] & (reads < NEVER)
        last: Ints = np.where(runs, reads, ALWAYS).max(axis=0, initial=ALWAYS)
        return last

    def _burst_bytes(self, state: int, moment: int, which: Ints) -> Floats:
        """(11) Return the most recomputed bytes that are live in the burst that leads to `state`.

        For each version, that is from the run that writes it to the last that reads it; to the end if it is
        unpacked or read later; and from the beginning if it was made before.
        """
        runs = self.block.runs
        change = np.zeros((len(runs) + 1, len(which)))
        column = np.arange(len(which))
        for at, run in enumerate(runs):
            if run.workspace:
                now = run.workspace * self._starts_at(state, run.op, which)
                change[at] += now
                change[at + 1] -= now
        for at, (i, version) in enumerate(self.versions):
            start = self.begin[at, which]
            end = np.where(self._starts_at(state, i, which), version.run, -1)
            for r, until in version.reads:
                end = np.maximum(end, np.where(self._starts_at(state, r, which), until, -1))
            lasts = (self.last_read[at, which] > state) | (version.last_use >= moment)
            end = np.where(lasts, len(runs) - 1, end)
            begin = np.where(start == state, version.run, 0)
            nbytes = np.where((start <= state) & (begin <= end), version.nbytes, 0)
            change[begin, column] += nbytes
            change[end + 1, column] -= nbytes
        most: Floats = np.cumsum(change, axis=0).max(axis=0)
        return most

    def _starts_at(self, state: int, op: int, which: Ints) -> Bools:
        starts: Bools = (self.start[op, which] == state) & self.is_certain[op, which]
        return starts

    def _saved_bytes_in_forward(self, moment: int) -> Floats:
        nbytes = self.zero.copy()
        for i in np.flatnonzero(self.is_decided).tolist():
            for version, until in zip(self.block.ops[i].versions, self.until[i], strict=True):
                if version.is_decided and version.held_from <= moment:
                    nbytes += version.nbytes * (self.saved[i] & (until > ALWAYS))
        return nbytes

    def _saved_bytes(self, begun: int, moment: int) -> Floats:
        """(10) Return the saved bytes that are live at `moment`, of versions that count from `begun` on."""
        nbytes = self.zero.copy()
        for i in np.flatnonzero(self.is_decided).tolist():
            for version, until in zip(self.block.ops[i].versions, self.until[i], strict=True):
                if version.is_decided and version.extra_from <= begun:
                    nbytes += version.nbytes * (self.saved[i] & (until > moment))
        return nbytes

    def _entry_bytes(self, begun: int, moment: int) -> Floats:
        entry = self.block.entry
        if entry is None or entry.extra_from > begun:
            return self.zero
        return np.where(self.entry_until > moment, float(entry.nbytes), self.zero)


def _not_dominated(numbers: Floats) -> list[int]:
    """Return the rows that no other row is at most as large as in each column, each once."""
    best: list[int] = []
    kept = np.empty_like(numbers)
    for row in np.lexsort(numbers.T[::-1]).tolist():
        if not (kept[: len(best)] <= numbers[row]).all(axis=1).any():
            kept[len(best)] = numbers[row]
            best.append(row)
    return best
