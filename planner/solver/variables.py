"""Make the columns of the program: `s`, which ops are saved, and `x`, which have run again by a state.

Equation numbers refer to docs/formulation.md. In the example of recompute_windows.py, with all states in the
grid, the columns are

    s_a  s_c  s_d      1 if the op is saved
    x_a1 x_a2          1 if a has run again by state 1, by state 2; by state 3 it is 1 - s_a
    x_c1               1 if c (and b) has run again by state 1; by state 2 it is 1 - s_c

and d needs none: by state 1, its only state, it has run again exactly if it is not saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from autoac.planner.formats.profile import Profile
from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.solver.arrays import Bools, GraphArrays, Ints
from autoac.planner.solver.moments import ConstrainedMoment, row_order, states_of
from autoac.planner.solver.recompute_windows import END, NEVER
from autoac.planner.solver.rows.sparse_rows import ONE, ZERO, Codes


@dataclass(frozen=True, slots=True)
class Options:
    """Switches for parts of a search. Except for `use_groups`, they only change how fast it finds a plan."""

    merge_followers: bool = True  # (3)
    lazy_rows: bool = False  # (6) nothing runs again before something asks for it
    canonical_rows: bool = True  # (7) an op is saved only if backward may need it
    dense_share: float = 1 / 6  # (2) this share of backward, before an op is first needed, has all states
    sparse_stride: int = 4  # (2) of the earlier states, one in this many; 1: all
    fix_by_price: bool = True  # (15) columns that the relaxation's prices rule out are fixed in advance
    use_groups: bool = True  # (16) an op whose uses lie far apart may run again for each group of them
    blockwise: bool = True  # chain/: blocks are planned one after another; slow where no two are alike


def options_for(subject: Profile | Graph, options: Options | None) -> Options:
    """Return `options`, without use groups if several forwards come before a backward: each has its own."""
    options = options or Options()
    several = isinstance(subject, Profile) and len(subject.forward_ends) > 1
    return replace(options, use_groups=False) if several else options


class Variables:
    """The columns so far, and the codes (sparse_rows.py) of what they stand for."""

    def __init__(self, arrays: GraphArrays, moments: Iterable[ConstrainedMoment], options: Options) -> None:
        self.arrays, self.windows, self.graph = arrays, arrays.windows, arrays.windows.graph
        self.n_ops = len(self.graph.ops)
        self.moments = sorted(set(moments), key=row_order)
        states = {t for moment in self.moments for t in states_of(self.windows, moment)}
        self.states = np.array(sorted({0, self.windows.n_states} | states), np.int64)
        self.end = len(self.states)  # position of END in the tables of x
        self.n_columns = 1  # column 0 is 1
        self._add_save_columns()
        self._add_recompute_columns(options)

    def new_columns(self, count: int) -> Codes:
        """Return the codes of `count` new columns."""
        self.n_columns += count
        return np.arange(self.n_columns - count + 1, self.n_columns + 1)

    def _add_save_columns(self) -> None:
        """(1) `s`: a free op is saved."""
        arrays = self.arrays
        self.s = np.zeros(len(arrays.free), np.int64)  # by row
        self.s[~arrays.pinned] = self.new_columns(int((~arrays.pinned).sum()))
        self.not_s = np.where(arrays.pinned, ONE, -self.s)
        self.s_of_op = np.where(arrays.saved, ONE, np.where(arrays.row >= 0, 0, ZERO))
        self.s_of_op[arrays.free] = self.s

    def _add_recompute_columns(self, options: Options) -> None:
        """(2) `x`: a free op has run again by a state; by row and position in `states`, then END."""
        arrays, states = self.arrays, self.states
        first = arrays.first_needed[:, None]
        latest, earliest = arrays.latest[:, None], arrays.earliest[:, None]
        need = np.where(first < NEVER, first, latest)
        position = np.arange(self.end)
        dense = states >= need - options.dense_share * self.windows.n_states
        grid = dense | (position % options.sparse_stride == 0)
        too_early = states < earliest
        due = states >= first  # then x = 1 - s
        own = grid & ~too_early & ~due & (states < latest)
        at_grid = np.zeros(own.shape, np.int64)
        at_grid[own] = self.new_columns(int(own.sum()))
        row, where = np.nonzero(own)

        never = (arrays.first_needed == NEVER) & (arrays.earliest < NEVER)
        end = np.where(arrays.first_needed < NEVER, self.not_s, ZERO)
        end[never] = self.new_columns(int(never.sum()))
        at_grid = np.where(due, self.not_s[:, None], at_grid)
        at_grid = np.where(~too_early & ~due & (states >= latest), end[:, None], at_grid)
        self.x_columns = np.concatenate([at_grid[own], end[never]]) - 1
        self.x_rows = np.concatenate([row, np.flatnonzero(never)])
        self.x_states = np.concatenate([states[where], np.full(int(never.sum()), END)])

        # By state: the code at the grid state before it, and at the one after it. The last line of each
        # is for ops that never run again.
        before = np.maximum.accumulate(np.where(grid, position, 0), axis=1)
        after = np.minimum.accumulate(np.where(grid, position, self.end)[:, ::-1], axis=1)[:, ::-1]
        full = np.concatenate([at_grid, end[:, None]], axis=1)
        rows = np.arange(len(arrays.free))[:, None]
        nothing = np.zeros((1, self.end + 1), np.int64)
        self.in_grid = np.concatenate([grid, np.zeros((1, self.end), bool)])
        self.x = np.concatenate([np.concatenate([full[rows, before], end[:, None]], axis=1), nothing])
        self.x_after = np.concatenate([np.concatenate([full[rows, after], end[:, None]], axis=1), nothing])

    def x_end(self, op: OpId) -> int:
        """Return the code that is 1 if `op` runs again at all."""
        return int(self.x[self.arrays.row[op], self.end])

    def position(self, state: int) -> int:
        """Return the position of `state` in `states`."""
        return int(np.searchsorted(self.states, state))

    def states_differ(self, row: Ints, before: int, after: int) -> Bools:
        """Return by row whether both states are in its grid, so that `x` can differ between them."""
        both: Bools = self.in_grid[row, before] & self.in_grid[row, after]
        return both
