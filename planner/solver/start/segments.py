"""Cut forward into segments that backward recomputes one after another, so that the peak is small.

NOTE [ Segments ]

A *cut* saves what ops after it read of ops before it; within a segment nothing is saved. While backward is
in a segment, the cuts before it are live, its recomputed values, and gradients. Backward begins with the last
segment, when all cuts are live, and ends with the first, when none is. So segments of equal length are not
the best: the closer a segment is to the input, the longer it may be. A dynamic program over the cuts finds
the segments that hold the fewest bytes, among those with a peak of at most `limit`:

    held[j] = min of held[i] + new[i, j] over i < j with held[i] + inside[i, j] <= limit

Here held[j] is the bytes of the cuts up to j, new[i, j] what cut j adds after cut i, and inside[i, j] the
most that is live in the segment from i to j without the cuts. Example, `chain(4, 4, 4, 4, 4, 4)` with a limit
of 12: one cut, after op 3. Backward holds it (4 bytes) while it recomputes ops 4 and 5 (8 bytes). Then it
reads the cut, drops it, and recomputes ops 0, 1 and 2 (12 bytes).

Bytes that live only within a burst are left out, so sizes are estimates; the simulator judges the save sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.arrays import Bools, Floats, GraphArrays, Ints, bytes_in_any_case

MOST_CUTS = 400
HALVINGS = 30  # of the range of limits
NEAR_SMALLEST = (1.0, 1.01, 1.02, 1.05)  # limits to try, over the smallest that the estimates allow
SMALLER = 10  # times that a smaller peak is looked for
LOWERED = 4  # times that a limit is lowered by what the simulator finds too much


class Segments:
    """The cuts of a graph, and the bytes of the segments between them."""

    def __init__(self, arrays: GraphArrays) -> None:
        self._arrays, self._graph = arrays, arrays.windows.graph
        n = len(self._graph.ops)
        reader = np.full(len(arrays.op), -1, np.int64)
        np.maximum.at(reader, arrays.pair_version, arrays.pair_reader)
        # By op: the last that may read it again, unless it is saved in any case.
        self._last_reader = np.full(n, -1, np.int64)
        np.maximum.at(self._last_reader, arrays.op, np.where(arrays.saved[arrays.op], -1, reader))
        self._nbytes = np.bincount(arrays.op, arrays.nbytes, n)  # by op, as an op is saved as a whole
        self._after = self._cuts(n)  # by cut: the op that it is after; the first is before all ops
        self._inside = self._bytes_inside(n)
        self._new = self._bytes_of_cuts(n)

    def within(self, budget: int) -> SaveSet | None:
        """Return the save set of segments with a simulated peak within `budget`, if there are any."""
        limit = float(budget)
        for _ in range(LOWERED):
            save_set = self._below(limit)
            if save_set is None:
                return None
            excess = peak_bytes(self._graph, save_set) - budget
            if excess <= 0:
                return save_set
            limit -= excess
        return None

    def smallest(self) -> Iterator[SaveSet]:
        """Yield save sets of segments whose peaks are about the smallest."""
        too_small, enough = 0.0, float(self._inside[0, -1])
        for _ in range(HALVINGS):
            middle = (too_small + enough) / 2
            if self._below(middle) is None:
                too_small = middle
            else:
                enough = middle
        peak = math.inf
        for factor in NEAR_SMALLEST:
            if (save_set := self._below(enough * factor)) is not None:
                peak = min(peak, peak_bytes(self._graph, save_set))
                yield save_set
        for _ in range(SMALLER):
            if math.isinf(peak) or (save_set := self.within(int(peak) - 1)) is None:
                return
            peak = peak_bytes(self._graph, save_set)
            yield save_set

    def _below(self, limit: float) -> SaveSet | None:
        """Return the save set of the segments with an estimated peak of at most `limit`, if there are any."""
        cuts = len(self._after)
        held, previous = np.full(cuts, np.inf), np.zeros(cuts, np.int64)
        held[0] = 0.0
        for cut in range(1, cuts):
            enough = held[:cut] + self._inside[:cut, cut] <= limit
            options = np.where(enough, held[:cut] + self._new[:cut, cut], np.inf)
            previous[cut] = np.argmin(options)
            held[cut] = options[previous[cut]]
        if not np.isfinite(held[-1]):
            return None
        saved, cut = np.zeros(len(self._graph.ops), bool), int(previous[-1])
        while cut > 0:
            saved |= self._crosses(int(self._after[cut]))
            cut = int(previous[cut])
        return without_cost_free_recomputes(self._graph, (OpId(op) for op in np.flatnonzero(saved).tolist()))

    def _crosses(self, after: int) -> Bools:
        """Return by op True if it has run once the op `after` has, and an op after that reads it."""
        return (np.arange(len(self._last_reader)) <= after) & (self._last_reader > after)

    def _cuts(self, n: int) -> Ints:
        """Return the ops after which to cut: of each stretch of a few ops, that with the fewest bytes cut."""
        change = np.zeros(n + 1)
        op = np.flatnonzero(self._last_reader > np.arange(n))
        np.add.at(change, op, self._nbytes[op])
        np.add.at(change, self._last_reader[op], -self._nbytes[op])
        crossing = np.cumsum(change)[:n]
        width = math.ceil(n / MOST_CUTS)
        low = [begin + int(np.argmin(crossing[begin : begin + width])) for begin in range(0, n - 1, width)]
        return np.unique([-1, *low, n - 1])

    def _bytes_inside(self, n: int) -> Floats:
        """Return by (cut, later cut) the most bytes live in the segment between them, without cuts."""
        arrays, graph = self._arrays, self._graph
        n_steps = len(graph.steps)
        base = bytes_in_any_case(arrays)[n:]

        position = np.full(n_steps, -1)  # by step: the last op whose output it or a later step unpacks
        for step, version in arrays.windows.unpacks:
            position[step] = max(position[step], graph.versions[version].op)
        position = np.maximum.accumulate(position[::-1])[::-1]
        segment = np.minimum(np.searchsorted(self._after, position, side="right"), len(self._after) - 1)
        again = ~arrays.saved[arrays.op] & (arrays.last_use >= 0)
        inside = np.full((len(self._after), len(self._after)), -np.inf)
        for cut, op in enumerate(self._after):
            mine = again & (arrays.op > op)
            by_last_use = np.bincount(arrays.last_use[mine], arrays.nbytes[mine], n_steps)
            np.maximum.at(inside[cut], segment, base + np.cumsum(by_last_use[::-1])[::-1])
            inside[cut, : cut + 1] = -np.inf
        result: Floats = np.maximum.accumulate(inside, axis=1)
        result[~np.isfinite(result)] = 0.0
        return result

    def _bytes_of_cuts(self, n: int) -> Floats:
        """Return by (cut, later cut) the bytes that the later cut adds: those of ops after the first cut."""
        cuts = len(self._after)
        new = np.zeros((cuts, cuts))
        for cut, after in enumerate(self._after[:-1]):
            mine = np.flatnonzero(self._crosses(after))
            before = np.searchsorted(self._after, mine)  # cuts before the op
            by_cut = np.bincount(before, self._nbytes[mine], cuts + 1)
            new[:, cut] = np.cumsum(by_cut[::-1])[::-1][1:]
        return new
