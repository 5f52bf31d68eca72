"""Choose a save set for each block of a chain by dynamic programming.

The blocks are decided in forward order. A *label* is what some decisions about the blocks so far come to:

    held         bytes that they save, live in backward of all later blocks
    recomputed   bytes live in addition once the exit of the last of them is recomputed
    cost         run time of what is recomputed

Nothing else matters to the blocks after them, except the `Way` in which they get the exits. So a label is
dropped if another one is at most as large in every number, and the cheapest label after the last block is the
optimum of what is counted (NOTE [ A chain of blocks ]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np

from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.arrays import Floats, GraphArrays, Ints
from autoac.planner.solver.chain.blocks import Block, PlacedBlock, chain_of_blocks
from autoac.planner.solver.chain.menus import Menu, unpriced_menu

HALVINGS = 10  # of the range of the smallest peak
LOWERED = 5  # times that a limit is lowered by what the simulator finds too much
ROUNDED = (0.1, 0.01, 0.0025)  # shares of the cost that bounds may lose by rounding
FAR = 0.1  # share of the budget: with a peak so far above it, too few bytes are counted to find a plan
MOST_BELOW = 4.0  # a plan that costs so many times the bound says little about the cost to round
WORK_OF_PAIR = 1.5e-7  # of a label and a save set that may follow; see NOTE [ Work ] in highs.py

MayGoOn = Callable[[float], bool]
"""A function that takes the units of work since its last call, and returns False to end the program."""


class OutOfWork(Exception):
    """The dynamic program may not go on."""


class Exit(IntEnum):
    """Says how later blocks get the exit of a block."""

    UNUSED = 0  # not before the block's own backward
    RECOMPUTED = 1
    SAVED = 2


@dataclass(frozen=True, slots=True)
class Way:
    """Say how later blocks get the exit of a block, and which earlier exits are saved."""

    exit_: Exit
    saved: frozenset[PlacedBlock] = frozenset()  # their exits are held by forward in the next block, too


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Labels after a block, with the label and the save set that each of them comes from."""

    held: Floats
    recomputed: Floats
    cost_us: Floats
    before: Ints  # label, in the list for `way_before`
    way_before: Ints  # position of the way
    choice: Ints  # in the menu

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: Ints) -> Labels:
        return Labels(
            self.held[index], self.recomputed[index], self.cost_us[index],
            self.before[index], self.way_before[index], self.choice[index],
        )  # fmt: skip

    def best(self) -> Labels:
        """Return the labels that no other one is at most as large as in each number, each once."""
        order = np.lexsort((self.cost_us, self.held, self.recomputed))
        held, cost = self.held[order], self.cost_us[order]
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


def _together(parts: Sequence[Labels]) -> Labels:
    return Labels(
        np.concatenate([part.held for part in parts]),
        np.concatenate([part.recomputed for part in parts]),
        np.concatenate([part.cost_us for part in parts]),
        np.concatenate([part.before for part in parts]),
        np.concatenate([part.way_before for part in parts]),
        np.concatenate([part.choice for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class BlockwisePlan:
    """A save set, and the recompute time that is counted for it."""

    cost_us: float
    save_set: SaveSet


class Blockwise:
    """Save sets of a chain of blocks, and bounds for all save sets."""

    def __init__(self, arrays: GraphArrays, ceiling: int, *, timed: bool) -> None:
        self._graph, self._free = arrays.windows.graph, arrays.free
        self._blocks = chain_of_blocks(arrays, ceiling, timed=timed)
        unpriced: dict[Block, list[Menu]] = {}
        self._menus: dict[Block, list[Menu]] = {}
        for block in dict.fromkeys(placed.block for placed in self._blocks):
            alike = block.without_costs()
            if alike not in unpriced:
                unpriced[alike] = [unpriced_menu(alike, is_demanded=d) for d in (False, True)]
            self._menus[block] = [menu.priced(block) for menu in unpriced[alike]]

    def smallest_peak(
        self, floor: int, known: int, may_go_on: MayGoOn
    ) -> Iterator[tuple[int, SaveSet | None]]:
        """Yield ever larger proven bounds of the peak, each with a save set whose peak may be small, or None.

        Args:
            floor: bytes that no save set is below.
            known: the peak of some save set.
            may_go_on: called after each block.
        """
        for _ in range(HALVINGS):
            middle = (floor + known) // 2
            if middle <= floor:
                return
            try:
                found = self.within(middle, may_go_on=may_go_on)
            except OutOfWork:
                return
            if found is None:
                floor = middle + 1
            else:
                known = middle
            yield floor, None if found is None else found.save_set

    def plans(
        self, budget: int, known_us: float, may_go_on: MayGoOn, *, proven_us: float = 0.0
    ) -> Iterator[tuple[float, SaveSet]]:
        """Yield cheap save sets with peaks of about `budget`, each with a proven bound of the recompute time.

        The first peak is mostly a little too large, since not all bytes are counted. Then the limit is
        lowered by what the simulator finds too much, until a plan fits.

        Args:
            budget: bytes.
            known_us: the recompute time of a plan, or of everything.
            may_go_on: called after each block.
            proven_us: a bound of the recompute time. End once no bound from here can be larger.
        """
        bound_us, limit = 0.0, budget
        try:
            for share in ROUNDED:
                found = self._rounded_within(budget, share, known_us, may_go_on)
                if found is None:
                    return
                if found.cost_us * MOST_BELOW < known_us:  # too coarse
                    known_us = max(found.cost_us, known_us / MOST_BELOW**2)
                    found = self._rounded_within(budget, share, known_us, may_go_on) or found
                most_us = found.cost_us + share * known_us  # at most this without rounding
                bound_us, known_us = max(bound_us, found.cost_us), found.cost_us
                yield bound_us, found.save_set
                excess, too_much = peak_bytes(self._graph, found.save_set) - budget, budget
                if excess > FAR * budget or most_us <= proven_us:
                    return
                for _ in range(LOWERED):
                    if excess <= 0:
                        break
                    limit = min(limit, too_much - excess)
                    found = self._rounded_within(limit, share, known_us, may_go_on)
                    if found is None:
                        limit, excess = (limit + too_much) // 2, 1
                        continue
                    yield bound_us, found.save_set
                    excess, too_much = peak_bytes(self._graph, found.save_set) - budget, limit
        except OutOfWork:
            return

    def _rounded_within(
        self, limit: int, share: float, known_us: float, may_go_on: MayGoOn
    ) -> BlockwisePlan | None:
        step = share * known_us / max(len(self._blocks), 1)
        return self.within(limit, cost_step_us=step, may_go_on=may_go_on)

    def within(
        self, limit: int, *, cost_step_us: float = 0.0, may_go_on: MayGoOn = lambda work: True
    ) -> BlockwisePlan | None:
        """Return the cheapest plan whose counted bytes are within `limit`.

        No save set with a peak within `limit` costs less. None: no save set has such a peak. With
        `cost_step_us`, the cost of each block is rounded down to a multiple of it, so that fewer labels
        differ.

        Raises:
            OutOfWork: `may_go_on` returned False.
        """
        menus = self._menus
        if cost_step_us:
            menus = {block: [m.rounded(cost_step_us) for m in pair] for block, pair in menus.items()}
        empty: Ints = np.zeros(1, np.int64)
        start = Labels(np.zeros(1), np.zeros(1), np.zeros(1), empty, empty, empty)
        labels = {Way(Exit.SAVED): start}
        history: list[dict[Way, Labels]] = []
        last: PlacedBlock | None = None
        for placed in self._blocks:
            plain, demanded = menus[placed.block]
            pairs = sum(map(len, labels.values())) * (len(plain) + len(demanded))
            if not may_go_on(WORK_OF_PAIR * pairs):
                raise OutOfWork
            entries: dict[frozenset[PlacedBlock], list[Entry]] = {}  # by saved exits that matter later
            for position, (way, found) in enumerate(labels.items()):
                earlier = way.saved | ({last} if last and way.exit_ is Exit.SAVED else set())
                later = frozenset(b for b in earlier if b.exit_until > placed.end_op)
                twice = sum(b.exit_nbytes for b in way.saved)
                rooms = limit - placed.nbytes, limit - placed.nbytes_in_forward + twice
                entries.setdefault(later, []).append(Entry(way.exit_, position, found, *rooms))
            labels = {}
            for saved, of_ways in entries.items():
                for exit_, choice, choices in (
                    (Exit.UNUSED, plain, ~plain.saves_exit),
                    (Exit.RECOMPUTED, demanded, np.ones(len(demanded), bool)),
                    (Exit.SAVED, plain, plain.saves_exit),
                ):
                    if (after := _next(of_ways, choice, np.flatnonzero(choices))) is not None:
                        labels[Way(exit_, saved)] = after
            history.append(labels)
            last = placed
        if not labels:
            return None
        way = min(labels, key=lambda way: float(labels[way].cost_us.min()))
        label = int(labels[way].cost_us.argmin())
        return BlockwisePlan(float(labels[way].cost_us[label]), self._save_set(menus, history, way, label))

    def _save_set(
        self, menus: dict[Block, list[Menu]], history: list[dict[Way, Labels]], way: Way, label: int
    ) -> SaveSet:
        saved: list[OpId] = []
        before = [[Way(Exit.SAVED)], *map(list, history)]
        for k in reversed(range(len(self._blocks))):
            placed, chosen = self._blocks[k], history[k][way]
            row = menus[placed.block][way.exit_ is Exit.RECOMPUTED].saved[chosen.choice[label]]
            saved += [OpId(op) for op in self._free[placed.rows][row].tolist()]
            way, label = before[k][chosen.way_before[label]], int(chosen.before[label])
        return without_cost_free_recomputes(self._graph, saved)


@dataclass(frozen=True, slots=True)
class Entry:
    """Labels before a block that get its entry in the same way, and the bytes that they leave room for."""

    exit_: Exit
    way: int  # position
    labels: Labels
    room: int
    room_in_forward: int


def _next(before: Iterable[Entry], menu_: Menu, choices: Ints) -> Labels | None:
    """Return the labels after a block; None if no choice leaves its needs within the rooms."""
    parts = []
    for entry in before:
        labels, is_saved = entry.labels, entry.exit_ is Exit.SAVED
        held = labels.held[:, None]
        in_forward = menu_.need_in_forward_with_entry if is_saved else menu_.need_in_forward
        fits = held + in_forward[choices] <= entry.room_in_forward
        if is_saved:
            fits &= held + menu_.need_with_entry[choices] <= entry.room
        else:
            fits &= held + menu_.need[choices] <= entry.room
            if entry.exit_ is Exit.RECOMPUTED:
                ahead = held + labels.recomputed[:, None]
                fits &= ahead + menu_.need_while_demanded[choices] <= entry.room
            else:
                fits &= ~menu_.demands_entry[choices]
        label, at = np.nonzero(fits)
        choice = choices[at]
        parts.append(
            Labels(
                labels.held[label] + menu_.held[choice] + (menu_.entry_held[choice] if is_saved else 0.0),
                menu_.recomputed[choice] + labels.recomputed[label] * menu_.passes_on[choice],
                labels.cost_us[label] + menu_.cost_us[choice],
                label,
                np.full(len(label), entry.way),
                choice,
            )
        )
    return _together(parts).best() if any(map(len, parts)) else None
