"""Extend partial plans of a chain by one block (see blockwise.py for what a label is)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np

from autoac.planner.solver.arrays import Floats, Ints
from autoac.planner.solver.chain.blocks import PlacedBlock
from autoac.planner.solver.chain.menus import Menu

FEW_LABELS = 400  # every pair of so few is compared at once


class Exit(IntEnum):
    """Says how later blocks get the exit of a block, its last op."""

    UNUSED = 0  # not at all: it does not run again before the block's own backward
    RECOMPUTED = 1
    SAVED = 2


@dataclass(frozen=True, slots=True)
class Way:
    """Say how later blocks get the exit of a block, and which earlier exits are saved."""

    exit_: Exit
    saved: frozenset[PlacedBlock] = frozenset()  # blocks with exits that forward holds in the next one, too


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Labels after a block, with the label and the save set that each of them comes from."""

    held: Floats
    recomputed: Floats
    cost_us: Floats
    before: Ints  # position of the label before the block, among those of `way_before`
    way_before: Ints  # position of the Way before the block
    choice: Ints  # position of the block's save set in its menu

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: Ints) -> Labels:
        return Labels(
            self.held[index], self.recomputed[index], self.cost_us[index],
            self.before[index], self.way_before[index], self.choice[index],
        )  # fmt: skip

    def best(self) -> Labels:
        """Return the labels for which no other is at most as large in every number; of equal labels, one."""
        order = np.lexsort((self.cost_us, self.held, self.recomputed))
        held, cost = self.held[order], self.cost_us[order]
        if len(order) <= FEW_LABELS:  # what is larger in no number comes earlier in this order
            no_larger = (held[:, None] <= held) & (cost[:, None] <= cost)
            return self[order[~np.triu(no_larger, 1).any(axis=0)]]
        kept: list[Ints] = []
        least = np.zeros(0), np.zeros(0)  # of labels that recompute less: held, and the least cost up to it
        begins = np.flatnonzero(np.diff(self.recomputed[order], prepend=-np.inf))
        for begin, end in pairwise([*begins.tolist(), len(order)]):
            of_all = np.r_[least[0], held[begin:end]], np.r_[least[1], cost[begin:end]]
            by_held = np.lexsort((np.arange(len(of_all[0])), of_all[1], of_all[0]))
            held_now, cost_now = of_all[0][by_held], of_all[1][by_held]
            is_best = cost_now < np.minimum.accumulate(np.r_[np.inf, cost_now[:-1]])
            least = held_now[is_best], cost_now[is_best]
            new = by_held[is_best] - (len(of_all[0]) - (end - begin))
            kept.append(begin + new[new >= 0])
        return self[order[np.concatenate(kept)]]

    def thinned(self, step: float, price_us: float) -> Labels:
        """Return the cheapest label of each cell of a grid over the bytes held and the bytes recomputed.

        A cell is `step` bytes of `held` by four times as many of `recomputed`. The cost includes `price_us`
        for each byte held.
        """
        held, recomputed = self.held // step, self.recomputed // (4 * step)
        order = np.lexsort((self.cost_us + price_us * self.held, recomputed, held))
        is_first = np.r_[True, (np.diff(held[order]) != 0) | (np.diff(recomputed[order]) != 0)]
        return self[np.sort(order[is_first])]


START = Labels(np.zeros(1), np.zeros(1), np.zeros(1), *(np.zeros(1, np.int64) for _ in range(3)))
"""The label before the first block."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Labels before a block with the same Way to get its entry, and the rooms of the block.

    A *room* is the limit less the bytes that are live under every save set. What a label holds and what the
    block needs must fit into it.
    """

    exit_: Exit  # of the block before
    way: int  # position
    labels: Labels
    room: int  # in backward
    room_in_forward: int


@dataclass(frozen=True, slots=True)
class Cap:
    """The most that labels after a block may cost, with prices for what they hold and have recomputed."""

    most_us: float = math.inf
    held_us: float = 0.0  # for each byte
    recomputed_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Extension:
    """Labels of an entry, and save sets of the block after it.

    With the cheapest of the save sets, each label is within a cap, and so is each save set with the cheapest
    of the labels.
    """

    entry: Entry
    labels: Ints
    labels_us: Floats  # with prices
    choices: Ints
    choices_us: Floats


def extension(entry: Entry, menu: Menu, choices: Ints, cap: Cap) -> Extension:
    """Return the labels and save sets that `cap` does not rule out, without a look at each pair of them."""
    held = menu.held[choices] + (menu.entry_held[choices] if entry.exit_ is Exit.SAVED else 0.0)
    choices_us = menu.cost_us[choices] + cap.held_us * held + cap.recomputed_us * menu.recomputed[choices]
    labels_us = entry.labels.cost_us + cap.held_us * entry.labels.held
    few = choices_us + labels_us.min(initial=np.inf) <= cap.most_us
    labels = np.flatnonzero(labels_us + choices_us.min(initial=np.inf) <= cap.most_us)
    return Extension(entry, labels, labels_us[labels], choices[few], choices_us[few])


def after_block(extensions: Sequence[Extension], menu: Menu, cap: Cap) -> Labels | None:
    """Return the labels after a block; None if no label and save set together fit into its rooms."""
    parts = []
    for each in extensions:
        entry, choices, is_saved = each.entry, each.choices, each.entry.exit_ is Exit.SAVED
        labels = entry.labels[each.labels]
        held = labels.held[:, None]
        in_forward = menu.need_in_forward_with_entry if is_saved else menu.need_in_forward
        fits = held + in_forward[choices] <= entry.room_in_forward
        fits &= each.labels_us[:, None] + each.choices_us <= cap.most_us
        if is_saved:
            fits &= held + menu.need_with_entry[choices] <= entry.room
        else:
            fits &= held + menu.need[choices] <= entry.room
            if entry.exit_ is Exit.RECOMPUTED:
                ahead = held + labels.recomputed[:, None]
                fits &= ahead + menu.need_while_demanded[choices] <= entry.room
            else:
                fits &= ~menu.demands_entry[choices]
        label, at = np.nonzero(fits)
        choice = choices[at]
        parts.append(
            Labels(
                labels.held[label] + menu.held[choice] + (menu.entry_held[choice] if is_saved else 0.0),
                menu.recomputed[choice] + labels.recomputed[label] * menu.passes_on[choice],
                labels.cost_us[label] + menu.cost_us[choice],
                each.labels[label],
                np.full(len(label), entry.way),
                choice,
            )
        )
    return _together(parts).best() if any(map(len, parts)) else None


def _together(parts: Sequence[Labels]) -> Labels:
    return Labels(
        np.concatenate([part.held for part in parts]),
        np.concatenate([part.recomputed for part in parts]),
        np.concatenate([part.cost_us for part in parts]),
        np.concatenate([part.before for part in parts]),
        np.concatenate([part.way_before for part in parts]),
        np.concatenate([part.choice for part in parts]),
    )
