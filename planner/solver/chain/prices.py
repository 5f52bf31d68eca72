"""Price the bytes that blocks save, to know early which labels cannot become cheap plans.

NOTE [ Prices ]

The *room* of a block is the limit less the bytes live under every save set. In backward of the block, what
earlier blocks save and the block's own need are within the room. If the entry is recomputed, what earlier
blocks save, what the recompute of the entry makes, and the need meanwhile are within it, too. Charge a price
for each byte used of each room, and subtract the price of the whole room: a plan that fits only gets cheaper.
Without limits on bytes, the cheapest plan is found block by block, from the last to the first. So any prices
bound all plans (Lagrangian relaxation; A. Geoffrion, "Lagrangean relaxation for integer programming", 1974).

A linear program finds the best prices. Its columns are the price of each room and the least cost from each
block on. Each save set of each block gives a row: the least cost is at most that of the save set and of what
follows. The program is solved with a few rows. At its prices some save sets are the cheapest; these are its
next rows (J. Kelley, "The cutting-plane method for solving convex programs", 1960).

What is saved up to a block must leave room for the needs of later blocks, and so leaves a part of this
block's room for its own need. A need smaller than this part counts as the whole part, which makes the bound
larger. While the entry is demanded, the part is smaller by the most that the block before recomputes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoac.planner.solver.arrays import Floats, Ints
from autoac.planner.solver.chain.blocks import Block, PlacedBlock
from autoac.planner.solver.chain.labels import Cap, Exit
from autoac.planner.solver.chain.menus import Menu
from autoac.planner.solver.highs import Program, Rows, Spend, solve

Menus = Mapping[Block, Sequence[Menu]]
"""By block, two menus: if no later block recomputes the exit, and if one does."""

ROUNDS = 20  # in which the linear program gets rows
CLOSE = 2e-4  # of its bound: prices so near the best ones are good
TOWARD = 0.3  # every second round goes so far from the best prices toward new ones
UNITS = 1000.0  # of the limit, and of the recompute time: the program's numbers are then of similar sizes
DEAREST = 1000.0  # in these units, the highest price of a byte of one room
WORK_OF_OPTION = 2e-8  # units of work to price one save set of a block


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Prices of bytes, and the least costs that follow from them."""

    room_us: Floats  # of a byte, by kind of room (for own needs; while the entry is demanded) and block
    held_us: Floats  # of a byte that earlier blocks save, by block (or end)
    later_us: Floats  # least cost from a block on, less its rooms, by block (or end) and Exit before

    @property
    def bound_us(self) -> float:
        """Return a recompute time that no plan is below."""
        return float(self.later_us[0, Exit.SAVED])

    def cap_after(self, block: int, exit_: Exit, most_us: float) -> Cap:
        """Return what labels after `block` may cost if a plan is to cost at most `most_us`."""
        demanded_us = float(self.room_us[1, block + 1]) if block + 1 < len(self.held_us) - 1 else 0.0
        return Cap(
            most_us - float(self.later_us[block + 1, exit_]), float(self.held_us[block + 1]), demanded_us
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """The save sets of a block with a given Exit, after a block with a given Exit."""

    choices: Ints
    cost_us: Floats
    held: Floats
    need: Floats
    need_while_demanded: Floats  # as need, if the entry is not recomputed
    recomputed: Floats


Arc = tuple[int, Exit, Exit, int]  # block, Exit before and after it, option


class _PricedChain:
    """The blocks of a chain under one limit. Computes their least costs at given prices of rooms."""

    def __init__(self, blocks: Sequence[PlacedBlock], menus: Menus, limit: int) -> None:
        self.blocks = blocks
        self.options = {block: _options(pair) for block, pair in menus.items()}
        self.room = np.array([limit - placed.nbytes for placed in blocks], float)
        self.least = self.room - np.minimum.accumulate(self._most_held()[::-1])[::-1]
        recomputed = [self._most_recomputed(placed.block) for placed in blocks]
        self._least_while_demanded = self.least - np.r_[0.0, recomputed[:-1]]
        self.is_priced = np.isfinite(self.least)

    def _most_held(self) -> Floats:
        least_need = {
            block: min((float(option.need.min()) for option in options.values()), default=-np.inf)
            for block, options in self.options.items()
        }
        return self.room - [least_need[placed.block] for placed in self.blocks]

    def _most_recomputed(self, block: Block) -> float:
        options = self.options[block].values()
        return max((float(option.recomputed.max()) for option in options), default=0.0)

    def _needs(self, k: int, entry: Exit, option: _Options) -> tuple[Floats, Floats]:
        """Return the needs in the two rooms of block `k`, each at least the part that is always left."""
        while_demanded = self._least_while_demanded if entry is Exit.RECOMPUTED else self.least
        return (
            np.maximum(option.need, self.least[k]),
            np.maximum(option.need_while_demanded, while_demanded[k]),
        )

    def priced(self, room_us: Floats, spend: Spend) -> tuple[Prices, list[Arc]]:
        """Return the least costs at these prices of rooms, and the cheapest options."""
        n = len(self.blocks)
        held_us = np.r_[np.cumsum(room_us.sum(axis=0)[::-1])[::-1], 0.0]
        demanded_us = np.r_[room_us[1], 0.0]
        of_room = np.where(self.is_priced, room_us.sum(axis=0) * self.room, 0.0)
        later, arcs = np.zeros((n + 1, len(Exit))), []
        cheapest: dict[tuple[object, ...], dict[tuple[Exit, Exit], tuple[int, float]]] = {}
        work = 0.0
        for k in reversed(range(n)):
            block = self.blocks[k].block
            own, demanded = room_us[:, k]
            least = (self.least[k], self._least_while_demanded[k]) if own + demanded else ()
            key = block, own, demanded, held_us[k + 1], demanded_us[k + 1], least
            if key not in cheapest:
                cheapest[key] = {}
                for exits, option in self.options[block].items():
                    us = (
                        option.cost_us + held_us[k + 1] * option.held + demanded_us[k + 1] * option.recomputed
                    )
                    if own + demanded:
                        need, need_while_demanded = self._needs(k, exits[0], option)
                        us = us + own * need + demanded * need_while_demanded
                    at = int(us.argmin())
                    cheapest[key][exits] = at, float(us[at])
                    work += WORK_OF_OPTION * len(us)
            later[k] = np.inf
            for (entry, exit_), (at, us_) in cheapest[key].items():
                arcs.append((k, entry, exit_, at))
                later[k, entry] = min(later[k, entry], us_ + later[k + 1, exit_] - of_room[k])
        spend(work)
        return Prices(room_us, held_us, later), arcs

    def program(self, arcs: Sequence[Arc], unit_us: float, unit: float) -> Program:
        """Return the program for the best prices: its columns are the fields of Prices, its rows `arcs`."""
        n = len(self.blocks)
        held, later = 2 * n, 3 * n + 1
        n_columns = later + (n + 1) * len(Exit)
        costs, lower, upper = np.zeros(n_columns), np.zeros(n_columns), np.full(n_columns, np.inf)
        priced = np.where(self.is_priced, self.room / unit, 0.0)
        costs[: 2 * n] = np.r_[priced, priced]
        costs[later + Exit.SAVED] = -1.0
        upper[: 2 * n] = np.where(np.r_[self.is_priced, self.is_priced], DEAREST, 0.0)
        upper[held + n] = 0.0
        lower[later:] = -np.inf
        upper[later + n * len(Exit) :] = lower[later + n * len(Exit) :] = 0.0
        columns, coefficients, sizes = [], [], []
        for k in range(n):  # what is held is in the rooms of all later blocks
            columns += [held + k, held + k + 1, k, n + k]
            coefficients += [1.0, -1.0, -1.0, -1.0]
            sizes.append(4)
        most = np.zeros(n + len(arcs))
        for at, (k, entry, exit_, option_at) in enumerate(arcs):
            option = self.options[self.blocks[k].block][entry, exit_]
            columns += [later + k * len(Exit) + entry, later + (k + 1) * len(Exit) + exit_, held + k + 1]
            coefficients += [1.0, -1.0, -float(option.held[option_at]) / unit]
            sizes.append(3)
            if self.is_priced[k]:
                columns += [k, n + k]
                coefficients += [-float(need[option_at]) / unit for need in self._needs(k, entry, option)]
                sizes[-1] += 2
            if k + 1 < n and self.is_priced[k + 1]:
                columns.append(n + k + 1)
                coefficients.append(-float(option.recomputed[option_at]) / unit)
                sizes[-1] += 1
            most[n + at] = float(option.cost_us[option_at]) / unit_us
        least = np.r_[np.zeros(n), np.full(len(arcs), -np.inf)]
        starts = np.r_[0, np.cumsum(sizes)].astype(np.int32)
        rows = Rows(starts, np.array(columns, np.int32), np.array(coefficients), least, most)
        return Program(costs, lower, upper, np.zeros(n_columns, bool), rows)


def _options(menus: Sequence[Menu]) -> dict[tuple[Exit, Exit], _Options]:
    plain, demanded = menus
    found = {}
    for entry in Exit:
        for exit_, menu, is_possible in (
            (Exit.UNUSED, plain, ~plain.saves_exit),
            (Exit.RECOMPUTED, demanded, np.ones(len(demanded), bool)),
            (Exit.SAVED, plain, plain.saves_exit),
        ):
            if entry is Exit.UNUSED:
                is_possible = is_possible & ~menu.demands_entry
            choices = np.flatnonzero(is_possible)
            if not len(choices):
                continue
            is_saved = entry is Exit.SAVED
            need = (menu.need_with_entry if is_saved else menu.need)[choices]
            need_while_demanded = menu.need_while_demanded[choices] if entry is Exit.RECOMPUTED else need
            found[entry, exit_] = _Options(
                choices,
                menu.cost_us[choices],
                menu.held[choices] + (menu.entry_held[choices] if is_saved else 0.0),
                need,
                need_while_demanded,
                menu.recomputed[choices],
            )
    return found


def best_prices(blocks: Sequence[PlacedBlock], menus: Menus, limit: int, spend: Spend) -> Prices:
    """Return prices with a bound that is nearly the largest.

    Args:
        blocks: a chain.
        menus: the save sets of its blocks.
        limit: bytes.
        spend: called with the work of each round.
    """
    chain, n = _PricedChain(blocks, menus, limit), len(blocks)
    best, arcs = chain.priced(np.zeros((2, n)), spend)
    dearest_us = sum(float(menus[placed.block][0].cost_us.max(initial=0.0)) for placed in blocks)
    unit_us, unit = max(dearest_us, 1.0) / UNITS, max(limit, 1) / UNITS
    rows = dict.fromkeys(arcs)
    for round_ in range(ROUNDS):
        outcome = solve(chain.program(list(rows), unit_us, unit), relaxed=True)
        spend(outcome.work)
        if outcome.values is None or outcome.objective is None:
            break
        if -outcome.objective * unit_us <= best.bound_us + CLOSE * abs(best.bound_us):
            break
        room_us = np.maximum(outcome.values[: 2 * n].reshape(2, n), 0.0) * (unit_us / unit)
        if round_ % 2:
            room_us = best.room_us + TOWARD * (room_us - best.room_us)
        tried, arcs = chain.priced(room_us, spend)
        rows |= dict.fromkeys(arcs)
        best = max(best, tried, key=lambda prices: prices.bound_us)
    return best


def least_rooms(blocks: Sequence[PlacedBlock], menus: Menus, limit: int) -> Floats:
    """Return by block the bytes that every plan within `limit` leaves for its needs, or -inf.

    What earlier blocks save is held in backward of this block and of all later ones, and their needs limit
    it. The rest of this block's room is left for the block.
    """
    return _PricedChain(blocks, menus, limit).least
