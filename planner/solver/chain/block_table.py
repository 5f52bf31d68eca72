"""Compute what save sets of one block cost and hold, all of them at once."""

from __future__ import annotations

import numpy as np

from autoac.planner.solver.arrays import Bools, Floats, Ints
from autoac.planner.solver.chain.blocks import ALWAYS, Block, BlockVersion
from autoac.planner.solver.recompute_windows import NEVER


class BlockTable:
    """Save sets of a block: one for each column of the arrays.

    NOTE [ A chain of blocks ] in blocks.py has entry and exit. Ops before `begin` are not counted yet, with
    neither time nor bytes. The numbers of later ops do not depend on them.
    """

    def __init__(
        self, block: Block, saved: Bools, is_decided: Bools, *, is_demanded: bool, begin: int = 0
    ) -> None:
        """Compute when ops run again and until when they are held.

        Args:
            block: the block.
            saved: by op and save set. An op that is not decided counts as saved, unless it is pinned.
            is_decided: by op. A saved op that is not decided takes no bytes.
            is_demanded: a later block recomputes the exit, the last op of this one.
            begin: the first op that counts.
        """
        self.block, self.is_demanded, self.saved = block, is_demanded, saved
        self._ops = range(begin, len(block.ops))
        self.is_decided = is_decided & (np.arange(len(block.ops)) >= begin)
        self._zero: Floats = np.zeros(saved.shape[1])
        self._nothing: Ints = np.zeros(saved.shape[1], np.int64)
        self.start, self.entry_start = self._starts()
        self.early = self._earliest_starts()
        self._is_certain = self.start == self.early
        self._until, self.by_unsaved, self.entry_until = self._held_until()
        self._versions = [(i, v) for i in self._ops for v in block.ops[i].versions if v.nbytes]
        self._nbytes = np.array([version.nbytes for _, version in self._versions], float)
        self._last_use = np.array([version.last_use for _, version in self._versions], np.int64)
        self._begin = self.start[[i for i, _ in self._versions]]
        self._last_read = np.reshape([self._last_reads(v) for _, v in self._versions], self._begin.shape)

    def _starts(self) -> tuple[Ints, Ints]:
        """Return by op the state in which it runs again, and that of the entry, both by save set.

        ALWAYS: before backward of this block. NEVER: the op does not run again for this block.
        """
        start = np.full(self.saved.shape, NEVER)
        entry = self._nothing + NEVER
        for i in reversed(self._ops):
            op = self.block.ops[i]
            first = ALWAYS if self.is_demanded and i == len(start) - 1 else op.first_needed
            start[i] = np.min([self._nothing + first, *(start[r] for r in op.readers)], axis=0)
            start[i][self.saved[i]] = NEVER
            if op.reads_entry:
                entry = np.minimum(entry, start[i])
        return start, np.where(entry <= self.block.demanded_by, entry, NEVER)

    def _earliest_starts(self) -> Ints:
        """Return by op and save set the first state in which the op may run again.

        `_starts` counts an op that is not decided as saved. In truth it may run again, and then the ops that
        it reads may run earlier than in `_starts`, and their bytes may be free earlier. So bytes within a
        burst count only for ops with the same state here and in `_starts`.
        """
        early = np.full(self.saved.shape, NEVER)
        for i in reversed(self._ops):
            op = self.block.ops[i]
            is_asked = op.is_read_later or (self.is_demanded and i == len(early) - 1)
            first = ALWAYS if is_asked else op.first_needed
            early[i] = np.min([self._nothing + first, *(early[r] for r in op.readers)], axis=0)
            if self.is_decided[i]:
                early[i][self.saved[i]] = NEVER
        return early

    def _held_until(self) -> tuple[list[list[Ints]], Ints, Ints]:
        """(9) Return by op the step until which each of its versions is held if the op is saved.

        Also return by op the step until which it needs what it reads if it is not saved, and the step until
        which a saved entry is held.
        """
        until: list[list[Ints]] = [[] for _ in self.block.ops]
        by_unsaved = np.full(self.saved.shape, ALWAYS)
        for i in reversed(self._ops):
            op = self.block.ops[i]
            until[i] = [self._last_need(version, by_unsaved, version.dropped) for version in op.versions]
            is_unpacked = op.first_needed < NEVER
            needs = (
                self._last_need(v, by_unsaved, v.dropped if is_unpacked else ALWAYS) for v in op.versions
            )
            by_unsaved[i] = np.max([self._nothing + ALWAYS, *needs], axis=0)
            by_unsaved[i][self.saved[i]] = ALWAYS
        entry = self.block.entry
        if entry is None:
            return until, by_unsaved, self._nothing + ALWAYS
        return until, by_unsaved, self._last_need(entry, by_unsaved, ALWAYS)

    def _last_need(self, version: BlockVersion, by_unsaved: Ints, dropped: int) -> Ints:
        result: Ints = np.max([self._nothing + dropped, *(by_unsaved[r] for r in version.readers)], axis=0)
        return result

    def _last_reads(self, version: BlockVersion) -> Ints:
        """Return by save set the last state in which a reader of the version certainly runs again."""
        reads = self.start[[r for r, _ in version.reads]]
        runs = self._is_certain[[r for r, _ in version.reads]] & (reads < NEVER)
        last: Ints = np.where(runs, reads, ALWAYS).max(axis=0, initial=ALWAYS)
        return last

    # Numbers by save set

    @property
    def runs_again(self) -> Bools:
        """Return by op and save set True if the op runs again."""
        again: Bools = np.less(self.start, NEVER)
        return again

    @property
    def cost_us(self) -> Floats:
        """Return by save set the time of the ops that run again."""
        result: Floats = np.array([op.cost_us for op in self.block.ops]) @ self.runs_again
        return result

    @property
    def held(self) -> Floats:
        """Return the saved bytes that are live in backward of later blocks."""
        return self._saved_bytes(ALWAYS, self.block.later)

    @property
    def entry_held(self) -> Floats:
        """Return the bytes of a saved entry that are live in backward of later blocks."""
        return self._entry_bytes(ALWAYS, self.block.later)

    @property
    def recomputed(self) -> Floats:
        """(11) Return the recomputed bytes that are live in backward of later blocks."""
        return self._recomputed_bytes(ALWAYS, self.block.later) if self.is_demanded else self._zero

    @property
    def saves_exit(self) -> Bools:
        """Return by save set True if it saves the exit."""
        saves: Bools = self.saved[-1] & self.is_decided[-1]
        return saves

    def live(self) -> Floats:
        """Return by moment and save set the live bytes. The moments are the steps, then the bursts.

        The bytes of a burst are -inf if nothing certainly runs in it.
        """
        block = self.block
        live = np.full((len(block.steps) + len(block.bursts), len(self._zero)), -np.inf)
        for row, moment in zip(live, block.steps, strict=False):
            row[:] = moment.nbytes + self._saved_bytes(moment.at, moment.at)
            row += self._recomputed_bytes(moment.state, moment.at)
        for burst, row in enumerate(live[len(block.steps) :]):
            which = np.flatnonzero(self.runs_in_burst(burst))
            if len(which):
                row[which] = self.live_in_burst(burst, which).max(axis=0)
        return live

    def entry_live(self) -> Floats:
        """Return by moment of `live` and save set the bytes that a saved entry adds."""
        moments = (*self.block.steps, *self.block.bursts)
        rows = [self._entry_bytes(moment.at, moment.at) for moment in moments]
        return np.reshape(rows, (len(moments), len(self._zero)))

    def is_entry_recomputed(self) -> Bools:
        """Return by moment of `live` and save set True if the entry has been recomputed by then."""
        states = [moment.state for moment in (*self.block.steps, *self.block.bursts)]
        result: Bools = self.entry_start <= np.array(states, np.int64)[:, None]
        return result

    def live_in_forward(self) -> Floats:
        """Return by moment of forward and save set the live bytes, without the entry."""
        rows = [op.nbytes + self._saved_bytes(op.at, ALWAYS, in_forward=True) for op in self.block.forward]
        return np.reshape(rows, (len(rows), len(self._zero)))

    def runs_in_burst(self, burst: int) -> Bools:
        """Return by save set True if some op certainly runs in the burst."""
        state = self.block.bursts[burst].state
        runs: Bools = np.any((self.start == state) & self._is_certain, axis=0)
        return runs

    def live_in_burst(self, burst: int, which: Ints) -> Floats:
        """Return by run of the burst and save set of `which` the live bytes."""
        moment = self.block.bursts[burst]
        live = self._burst_bytes(moment.state, moment.at, which)
        live += moment.nbytes + self._saved_bytes(moment.at, moment.at)[which]
        return live

    def _recomputed_bytes(self, state: int, moment: int) -> Floats:
        """(11) Return the recomputed bytes that are live in a step, after its unpacks have led to `state`."""
        is_kept = (self._last_use >= moment)[:, None] | (self._last_read > state)
        nbytes: Floats = self._nbytes @ ((self._begin <= state) & is_kept)
        return nbytes

    def _burst_bytes(self, state: int, moment: int, which: Ints) -> Floats:
        """(11) Return the recomputed bytes that are live at each run of the burst that leads to `state`.

        A version is live from the run that writes it, or from the beginning if an earlier burst made it. It
        is live up to the last run that reads it, or to the end if a later burst or an unpack needs it.
        """
        runs = self.block.runs
        change = np.zeros((len(runs) + 1, len(which)))
        column = np.arange(len(which))
        for at, run in enumerate(runs):
            if run.workspace:
                now = run.workspace * self._starts_at(state, run.op, which)
                change[at] += now
                change[at + 1] -= now
        for at, (i, version) in enumerate(self._versions):
            start = self._begin[at, which]
            end = np.where(self._starts_at(state, i, which), version.run, -1)
            for r, until in version.reads:
                end = np.maximum(end, np.where(self._starts_at(state, r, which), until, -1))
            lasts = (self._last_read[at, which] > state) | (version.last_use >= moment)
            end = np.where(lasts, len(runs) - 1, end)
            begin = np.where(start == state, version.run, 0)
            nbytes = np.where((start <= state) & (begin <= end), version.nbytes, 0)
            change[begin, column] += nbytes
            change[end + 1, column] -= nbytes
        most: Floats = np.cumsum(change, axis=0)
        return most

    def _starts_at(self, state: int, op: int, which: Ints) -> Bools:
        starts: Bools = (self.start[op, which] == state) & self._is_certain[op, which]
        return starts

    def _saved_bytes(self, begun: int, moment: int, *, in_forward: bool = False) -> Floats:
        """(10) Return the saved bytes that are live at `moment` and that saving adds from step `begun` on.

        With `in_forward`, `begun` is an op of forward.
        """
        nbytes = self._zero.copy()
        for i in np.flatnonzero(self.is_decided).tolist():
            for version, until in zip(self.block.ops[i].versions, self._until[i], strict=True):
                added = version.held_from if in_forward else version.extra_from
                if version.is_decided and added <= begun:
                    nbytes += version.nbytes * (self.saved[i] & (until > moment))
        return nbytes

    def _entry_bytes(self, begun: int, moment: int) -> Floats:
        entry = self.block.entry
        if entry is None or entry.extra_from > begun:
            return self._zero
        return np.where(self.entry_until > moment, float(entry.nbytes), self._zero)
