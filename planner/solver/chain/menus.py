"""List the save sets of one block, with what they cost and hold, and leave out those worse in every way."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from autoac.planner.solver.arrays import Bools, Floats
from autoac.planner.solver.chain.block_table import BlockTable
from autoac.planner.solver.chain.blocks import ALWAYS, Block
from autoac.planner.solver.chain.dominance import not_dominated
from autoac.planner.solver.recompute_windows import NEVER

MOST_DECISIONS = 12  # of a block: its other ops, the smallest, take no bytes and no time
MOST_NUMBERS = 2**26  # save sets x versions x moments: in a block with many of these, fewer ops are decided


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """The save sets that a block may choose from, and what each costs and holds.

    Each field is an array with an entry, or a row, for each save set. Bytes are counted as in `Block`. The
    *need* of a save set is the most bytes live in the steps of the block, without what earlier blocks hold
    and what is live under every save set. NOTE [ A chain of blocks ] in blocks.py has entry and exit.
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
        """Return this menu with the costs of `block`, which is built alike, without worse save sets."""
        cost_us = self.runs_again @ np.array([op.cost_us for op in block.ops])
        return replace(self, cost_us=cost_us).undominated()

    def rounded(self, cost_step_us: float) -> Menu:
        """Return the menu with costs rounded down to multiples, so that more save sets can be left out."""
        cost_us = np.floor(self.cost_us / cost_step_us) * cost_step_us
        return replace(self, cost_us=cost_us).undominated()

    def undominated(self) -> Menu:
        """Return the menu without save sets that another one matches or beats in every number."""
        numbers = [
            self.cost_us, self.held, self.recomputed, self.need, self.need_while_demanded,
            self.need_with_entry, self.need_in_forward, self.need_in_forward_with_entry, self.entry_held,
            self.demands_entry, self.passes_on, ~self.saves_exit,
        ]  # fmt: skip
        best = not_dominated(np.stack(numbers, axis=1).astype(float))
        return Menu(*(getattr(self, f.name)[best] for f in fields(self)))


def unpriced_menu(block: Block, *, is_demanded: bool) -> Menu:
    """Return the menu of `block` without costs: all save sets of the ops that `listed` decides.

    Args:
        block: the block.
        is_demanded: a later block recomputes the exit, the last op of this one.
    """
    return menu_of(listed(block, is_demanded=is_demanded))


def is_listed(block: Block) -> bool:
    """Return True if `unpriced_menu` decides all ops of the block that have bytes."""
    return len(decidable(block)) <= MOST_DECISIONS


def decidable(block: Block) -> list[int]:
    """Return the ops of a block that have bytes to decide about: the exit first, then those with the most."""
    n = len(block.ops)
    free = [i for i in range(n) if block.ops[i].nbytes and not block.ops[i].is_pinned]
    return sorted(free, key=lambda i: (i < n - 1, -block.ops[i].nbytes))


def listed(block: Block, *, is_demanded: bool) -> BlockTable:
    """Return all save sets of the ops with the most bytes: as many ops as the limits of this file allow.

    The other ops of the block are not decided: unless pinned, they count as saved, and take no bytes.
    """
    is_demanded &= not block.is_last
    numbers = max(1, sum(len(op.versions) for op in block.ops) * (len(block.steps) + len(block.bursts)))
    most = min(MOST_DECISIONS, max(1, (MOST_NUMBERS // numbers).bit_length() - 1))
    decided = decidable(block)[:most]
    masks = np.arange(1 << len(decided))
    saved = np.array([[not op.is_pinned] for op in block.ops]) & np.ones(len(masks), bool)
    for bit, op in enumerate(decided):
        saved[op] = masks >> bit & 1 > 0
    if is_demanded:  # a saved exit is not recomputed: the menu without `is_demanded` has these save sets
        saved = saved[:, ~saved[-1]]
    return BlockTable(block, saved, np.isin(np.arange(len(block.ops)), decided), is_demanded=is_demanded)


def menu_of(table: BlockTable) -> Menu:
    """Return the menu of the save sets of `table`, in its order, worse ones included."""
    live, entry_held, in_forward = table.live(), table.entry_held, table.live_in_forward()
    entry_nbytes = np.array([op.entry_nbytes for op in table.block.forward]).reshape(-1, 1)
    return Menu(
        saved=table.saved.T,
        runs_again=table.runs_again.T,
        cost_us=table.cost_us,
        held=table.held,
        entry_held=entry_held,
        recomputed=table.recomputed,
        need=_most(live),
        need_while_demanded=_most(np.where(table.is_entry_recomputed(), live, -np.inf)),
        need_with_entry=_most(live + table.entry_live()),
        need_in_forward=_most(in_forward),
        need_in_forward_with_entry=_most(in_forward + entry_held - entry_nbytes),
        demands_entry=table.entry_start < NEVER,
        passes_on=table.entry_start == ALWAYS,
        saves_exit=table.saves_exit,
    )


def _most(live: Floats) -> Floats:
    result: Floats = live.max(axis=0, initial=-np.inf)
    return result
