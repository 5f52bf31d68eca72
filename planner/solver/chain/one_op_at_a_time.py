"""Decide many ops of a block, from its last op to its first.

NOTE [ One op at a time ]

A block of 21 ops that have bytes has two million save sets, most of them worse than others in every way. So
ops are decided in turn, and after each decision the worse save sets are left out. Two save sets of the ops so
far can be compared if the ops before them cannot tell them apart: each op that reads an earlier op runs again
in the same state under both, and needs it for as long. These states are their *interface*. If it is the same,
any decision about the earlier ops adds the same to both save sets. So if one of the two has at least as much
of each number, it is left out. An example, a block of four ops a - b - c - d:

    decided       d saved, c not        c and d not saved
    interface     c runs in state 2     c runs in state 2
    numbers       cost 3, held 4        cost 5, held 0      neither is worse: both stay

The numbers are the cost and the bytes at each moment. One maximum over all moments would not do, since the
fullest moment may be another once earlier ops are counted. With all moments, hardly any save set is worse
than another. So only a few moments are counted: those at which save sets of the largest ops have the most
bytes, if that may exceed the room that every plan leaves for the block. States are then compared with those
of few moments, too, and states that compare alike are made equal. Counting fewer moments leaves every bound
valid.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np

from autoac.planner.solver.arrays import Bools, Floats, Ints
from autoac.planner.solver.chain.block_table import BlockTable
from autoac.planner.solver.chain.blocks import ALWAYS, Block, BlockOp
from autoac.planner.solver.chain.dominance import not_dominated
from autoac.planner.solver.chain.menus import Menu, decidable, is_listed, listed, menu_of
from autoac.planner.solver.highs import Spend
from autoac.planner.solver.recompute_windows import NEVER

MOST_IN_TURN = 24  # decisions of a block that can be made in turn
MOST_SAVE_SETS = 8192  # with more, no further op is decided
WORK_OF_NUMBER = 2e-9  # units of work to compare one number of two save sets
WORK_OF_GROUP = 2e-4  # and for each group of save sets that are compared


def needs_turns(block: Block) -> bool:
    """Return True if a block has too many ops to list all save sets, but not too many to decide in turn."""
    return not is_listed(block) and len(decidable(block)) <= MOST_IN_TURN


def menu_in_turn(block: Block, *, is_demanded: bool, rooms: tuple[float, float], spend: Spend) -> Menu:
    """Return the menu of `block`, with its ops decided one at a time.

    `unpriced_menu` lists the save sets of the largest ops only; here more ops are decided.

    Args:
        block: the block.
        is_demanded: a later block recomputes the exit, the last op of this one.
        rooms: the bytes that every plan within the budget leaves for the block, in backward and in forward.
            Moments at which no save set of the largest ops needs more are not counted.
        spend: called with the work of each decision.
    """
    table = listed(block, is_demanded=is_demanded)
    coarse = at_moments(block, *_moments_above(table, *rooms))
    is_decided = np.isin(np.arange(len(block.ops)), decidable(block))
    saved, is_decided = _decided_in_turn(coarse, is_decided, is_demanded=table.is_demanded, spend=spend)
    menu = menu_of(BlockTable(coarse, saved, is_decided, is_demanded=table.is_demanded))
    spend(WORK_OF_NUMBER * len(menu) ** 2)
    return menu.undominated()


def _moments_above(table: BlockTable, room: float, room_in_forward: float) -> tuple[Ints, Ints]:
    """Return the moments at which some save set has its most bytes, if they are above the room.

    The first array has positions in the steps and, after those, the bursts; the second in forward's moments.
    """
    live, in_forward = table.live(), table.live_in_forward()
    with_entry = live + table.entry_live()
    needs = with_entry, live, np.where(table.is_entry_recomputed(), live, -np.inf)
    found = [_largest(need, room) for need in needs]
    return np.unique(np.concatenate(found)), _largest(in_forward + table.entry_held, room_in_forward)


def _largest(live: Floats, room: float) -> Ints:
    if not len(live):
        return np.zeros(0, np.int64)
    most = live.argmax(axis=0)
    result: Ints = np.unique(most[live.max(axis=0) > room])
    return result


def at_moments(block: Block, moments: Ints, in_forward: Ints) -> Block:
    """Return the block with only some of its moments. States that none of these tells apart become equal.

    Args:
        block: a block.
        moments: positions in its steps and, after those, its bursts.
        in_forward: positions in its moments of forward.
    """
    n_steps = len(block.steps)
    steps = tuple(block.steps[m] for m in moments.tolist() if m < n_steps)
    bursts = tuple(block.bursts[m - n_steps] for m in moments.tolist() if m >= n_steps)
    states = {moment.state for moment in (*steps, *bursts)} | {moment.state - 1 for moment in bursts}
    tops = sorted((states | {block.demanded_by}) - {NEVER})
    after = sorted({moment.at for moment in (*steps, *bursts)} | {block.later})

    def state(first: int) -> int:
        if first in (ALWAYS, NEVER):
            return first
        at = bisect_left(tops, first)
        return tops[at] if at < len(tops) else tops[-1] + 1 if tops else 0

    def step(dropped: int) -> int:
        if dropped == ALWAYS:
            return ALWAYS
        at = bisect_left(after, dropped)
        return after[at - 1] + 1 if at else after[0]

    def op(of: BlockOp) -> BlockOp:
        versions = tuple(replace(version, dropped=step(version.dropped)) for version in of.versions)
        return replace(of, first_needed=state(of.first_needed), versions=versions)

    return replace(
        block,
        ops=tuple(map(op, block.ops)),
        steps=steps,
        bursts=bursts,
        forward=tuple(block.forward[m] for m in in_forward.tolist()),
    )


def _decided_in_turn(
    block: Block, is_decided: Bools, *, is_demanded: bool, spend: Spend
) -> tuple[Bools, Bools]:
    """Return the save sets of a block that remain, by op and save set, and by op True if it is decided.

    Any other save set is matched or beaten in every number by one that remains.
    """
    is_decided = is_decided.copy()
    saved = np.array([[not op.is_pinned] for op in block.ops])
    for i in np.flatnonzero(is_decided)[::-1].tolist():
        if saved.shape[1] > MOST_SAVE_SETS:
            is_decided[i] = False
            continue
        without = saved.copy()
        without[i] = False
        is_exit = i == len(block.ops) - 1
        saved = without if is_demanded and is_exit else np.concatenate([saved, without], axis=1)
        table = BlockTable(block, saved, is_decided, is_demanded=is_demanded, begin=i)
        saved = saved[:, _undominated(table, i, spend)]
    return saved, is_decided


def _undominated(table: BlockTable, begin: int, spend: Spend) -> Ints:
    """Return the save sets of the ops from `begin` on that are not worse than one with the same interface."""
    numbers, kept = _numbers(table), []
    _, group = np.unique(_interface(table, begin), axis=0, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    for same in np.split(order, np.flatnonzero(np.diff(group.ravel()[order])) + 1):
        kept.append(same[not_dominated(numbers[same])])
        compared = numbers.shape[1] * len(same) * (len(kept[-1]) + len(table.block.ops))
        spend(WORK_OF_GROUP + WORK_OF_NUMBER * compared)
    return np.sort(np.concatenate(kept))


def _interface(table: BlockTable, begin: int) -> Ints:
    """Return by save set all that the numbers of ops before `begin` depend on."""
    ops = table.block.ops
    readers = {r for op in ops[:begin] for r in op.readers}
    readers |= {r for op in ops[:begin] for v in op.versions for r in (*v.readers, *(r for r, _ in v.reads))}
    read = sorted(r for r in readers if r >= begin)
    of_entry = [table.entry_start, table.entry_until, table.saves_exit]
    result: Ints = np.concatenate(
        [table.start[read], table.early[read], table.by_unsaved[read], np.array(of_entry, np.int64)]
    ).T
    return result


def _numbers(table: BlockTable) -> Floats:
    """Return by save set the numbers to which the ops before those of `table` will add."""
    everything = np.arange(table.saved.shape[1])
    n_steps = len(table.block.steps)
    rows: list[Floats] = [
        table.cost_us[None],
        table.held[None],
        table.recomputed[None],
        table.live()[:n_steps],
        table.live_in_forward(),
    ]
    for burst in range(len(table.block.bursts)):
        rows += [table.live_in_burst(burst, everything), table.runs_in_burst(burst)[None].astype(float)]
    return np.concatenate(rows).T
