"""Choose a save set for each block of a chain by dynamic programming.

The blocks are decided in forward order. A *label* sums up one save set for each of the blocks so far:

    held         bytes that these blocks save, live in backward of all later blocks
    recomputed   bytes live in addition once the exit of the last of these blocks is recomputed
    cost         run time of what is recomputed

Later blocks depend on nothing else, except on how they get the exits (`Way` in labels.py). So of two labels
with the same `Way`, one is dropped if the other is at most as large in every number. The cheapest label after
the last block is the optimum of what is counted (NOTE [ A chain of blocks ] in blocks.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.arrays import GraphArrays
from autoac.planner.solver.chain.blocks import Block, PlacedBlock, chain_of_blocks
from autoac.planner.solver.chain.labels import START, Cap, Entry, Exit, Labels, Way, after_block, extension
from autoac.planner.solver.chain.menus import Menu, unpriced_menu
from autoac.planner.solver.chain.one_op_at_a_time import menu_in_turn, needs_turns
from autoac.planner.solver.chain.prices import Menus, Prices, best_prices, least_rooms
from autoac.planner.solver.highs import Spend

HALVINGS = 10  # of the range of the smallest peak
LOWERED = 5  # times that a limit is lowered by what the simulator finds too much
ROUNDED = (0.1, 0.01, 0.0025)  # shares of the cost that bounds may lose by rounding
FAR = 0.1  # share of the budget: with a peak so far above it, too few bytes are counted to find a plan
MOST_BELOW = 4.0  # a known plan that costs this many times as much says little about how far to round
WORK_OF_PAIR = 3e-7  # of a label and a save set that may follow; see NOTE [ Work ] in highs.py
WORK_OF_BLOCK = 1e-3

# With menus in turn (see `Blockwise.plans`):
MANY = 0.25  # of all blocks: if more of them need menus in turn, such menus are made
ROUNDED_IN_TURN = 0.0005  # as ROUNDED
THIN = 0.001  # of the budget: labels that differ by less are nearly equal
FIRST_ABOVE = 0.001  # of the known cost: labels are kept up to this far above the bound, then twice as far
WIDER = 1.4  # in place of twice, once nearly equal labels are merged
LOWERED_MORE = 1.15  # a limit is lowered by this many times the excess, since each pass takes long
MOST_LABELS = 3000  # of each way, for a proof
MANY_LABELS = 100  # of each way: with more, nearly equal labels are merged, if nothing is to be proven

MayGoOn = Callable[[float], bool]
"""A function that takes the units of work since its last call, and returns False to end the program."""


class OutOfWork(Exception):
    """Raised to end the dynamic program, because `may_go_on` allows no more work."""


@dataclass(frozen=True, slots=True)
class BlockwisePlan:
    """A save set, and the recompute time that is counted for it."""

    cost_us: float
    save_set: SaveSet


@dataclass(frozen=True, slots=True)
class Cut:
    """A rule for labels to leave out: those that cannot become a plan of at most `most_us`.

    If too many labels are left, those that differ by less than `thin_bytes` are merged. If `thin_bytes` is 0,
    the dynamic program ends without a plan.
    """

    prices: Prices
    most_us: float
    thin_bytes: float


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
        times = Counter(placed.block for placed in self._blocks)
        self._in_turn = set(filter(needs_turns, times))
        n_in_turn = sum(times[block] for block in self._in_turn)
        self._decides_in_turn = n_in_turn > MANY * len(self._blocks)

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
    ) -> Iterator[tuple[float, SaveSet | None]]:
        """Yield proven bounds of the recompute time, with cheap save sets of about `budget` bytes, or None.

        Not all bytes are counted, so the peak of the first save set is mostly a little above the budget. Then
        the limit is lowered by the excess that the simulator finds, until a save set fits.

        If many blocks have too many ops to list all their save sets, the ops are decided one at a time (NOTE
        [ One op at a time ]). The labels are then too many without prices (NOTE [ Prices ]).

        Args:
            budget: bytes.
            known_us: the recompute time of a plan, or of everything.
            may_go_on: called after each block.
            proven_us: a bound of the recompute time. End once no bound from here can be larger.
        """
        try:
            if self._decides_in_turn and known_us > 0:
                yield from self._plans_in_turn(budget, known_us, may_go_on)
            else:
                yield from self._plans_of_listed(budget, known_us, may_go_on, proven_us)
        except OutOfWork:
            return

    def _plans_of_listed(
        self, budget: int, known_us: float, may_go_on: MayGoOn, proven_us: float
    ) -> Iterator[tuple[float, SaveSet]]:
        bound_us, limit = 0.0, budget
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

    def _plans_in_turn(
        self, budget: int, known_us: float, may_go_on: MayGoOn
    ) -> Iterator[tuple[float, SaveSet | None]]:
        def spend(work: float) -> None:
            if not may_go_on(work):
                raise OutOfWork

        thin_bytes, menus = 0.0, self._menus_in_turn(budget, known_us, spend)
        bound_us, above, limit, too_much = 0.0, FIRST_ABOVE, budget, budget
        for _ in range(LOWERED + 1):
            prices, found = best_prices(self._blocks, menus, limit, spend), None
            while found is None and math.isfinite(prices.bound_us):
                most_us = min(prices.bound_us + above * known_us, known_us)
                found, is_proven = self._within(limit, menus, may_go_on, Cut(prices, most_us, thin_bytes))
                if limit == budget:
                    proven_us = most_us if found is None else min(found.cost_us, most_us)
                    bound_us = max(bound_us, proven_us if is_proven else prices.bound_us)
                    yield bound_us, None
                if not (is_proven or thin_bytes):
                    thin_bytes = THIN * budget
                    continue
                if found is None:
                    if most_us >= known_us:
                        break
                    above *= WIDER if thin_bytes else 2.0
            if found is None:
                if limit == budget:
                    return
                limit = (limit + too_much) // 2
                continue
            yield bound_us, found.save_set
            excess, too_much = peak_bytes(self._graph, found.save_set) - budget, limit
            if excess <= 0 or excess > FAR * budget:
                return
            limit -= int(excess * LOWERED_MORE) + 1

    def _menus_in_turn(self, budget: int, known_us: float, spend: Spend) -> Menus:
        """Return menus for plans within `budget`, with ops decided one at a time and costs rounded down."""
        least = least_rooms(self._blocks, self._menus, budget)
        recomputed = max(float(pair[1].recomputed.max(initial=0.0)) for pair in self._menus.values())
        rooms: dict[Block, tuple[float, float]] = {}
        for placed, room in zip(self._blocks, least.tolist(), strict=True):
            before = rooms.get(placed.block, (math.inf, math.inf))
            in_forward = room + placed.nbytes - placed.nbytes_in_forward
            rooms[placed.block] = min(before[0], room - recomputed), min(before[1], in_forward)
        step_us = ROUNDED_IN_TURN * known_us / len(self._blocks)
        menus: dict[Block, Sequence[Menu]] = {}
        for block, listed in self._menus.items():
            pair = listed
            if block in self._in_turn:
                pair = [
                    menu_in_turn(block, is_demanded=d, rooms=rooms[block], spend=spend) for d in (False, True)
                ]
            menus[block] = [menu.rounded(step_us) for menu in pair]
        return menus

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
        menus: Menus = self._menus
        if cost_step_us:
            menus = {block: [m.rounded(cost_step_us) for m in pair] for block, pair in menus.items()}
        return self._within(limit, menus, may_go_on)[0]

    def _within(
        self, limit: int, menus: Menus, may_go_on: MayGoOn, cut: Cut | None = None
    ) -> tuple[BlockwisePlan | None, bool]:
        """Return the cheapest plan as `within` does, or None if it costs more than `cut` allows.

        Also return True if no plan is cheaper, or False if there were too many labels to prove that.
        """
        labels, is_proven = {Way(Exit.SAVED): START}, True
        history: list[dict[Way, Labels]] = []
        last: PlacedBlock | None = None
        for k, placed in enumerate(self._blocks):
            plain, demanded = menus[placed.block]
            entries: dict[frozenset[PlacedBlock], list[Entry]] = {}  # by saved exits that matter later
            for position, (way, found) in enumerate(labels.items()):
                earlier = way.saved | ({last} if last and way.exit_ is Exit.SAVED else set())
                later = frozenset(b for b in earlier if b.exit_until > placed.end_op)
                twice = sum(b.exit_nbytes for b in way.saved)
                rooms = limit - placed.nbytes, limit - placed.nbytes_in_forward + twice
                entries.setdefault(later, []).append(Entry(way.exit_, position, found, *rooms))
            ends = []
            for saved, of_ways in entries.items():
                for exit_, choice, choices in (
                    (Exit.UNUSED, plain, ~plain.saves_exit),
                    (Exit.RECOMPUTED, demanded, np.ones(len(demanded), bool)),
                    (Exit.SAVED, plain, plain.saves_exit),
                ):
                    cap = Cap() if cut is None else cut.prices.cap_after(k, exit_, cut.most_us)
                    extensions = [extension(e, choice, np.flatnonzero(choices), cap) for e in of_ways]
                    ends.append((Way(exit_, saved), choice, cap, extensions))
            pairs = sum(len(e.labels) * len(e.choices) for *_, extensions in ends for e in extensions)
            if not may_go_on(WORK_OF_BLOCK + WORK_OF_PAIR * pairs):
                raise OutOfWork
            labels = {}
            for way, choice, cap, extensions in ends:
                if (after := after_block(extensions, choice, cap)) is None:
                    continue
                if cut is not None and not cut.thin_bytes and len(after) > MOST_LABELS:
                    return None, False
                if cut is not None and cut.thin_bytes and len(after) > MANY_LABELS:
                    after, is_proven = after.thinned(cut.thin_bytes, cap.held_us), False
                labels[way] = after
            history.append(labels)
            last = placed
        if not labels:
            return None, is_proven
        way = min(labels, key=lambda way: float(labels[way].cost_us.min()))
        label = int(labels[way].cost_us.argmin())
        plan = BlockwisePlan(float(labels[way].cost_us[label]), self._save_set(menus, history, way, label))
        return plan, is_proven

    def _save_set(self, menus: Menus, history: list[dict[Way, Labels]], way: Way, label: int) -> SaveSet:
        saved: list[OpId] = []
        before = [[Way(Exit.SAVED)], *map(list, history)]
        for k in reversed(range(len(self._blocks))):
            placed, chosen = self._blocks[k], history[k][way]
            row = menus[placed.block][way.exit_ is Exit.RECOMPUTED].saved[chosen.choice[label]]
            saved += [OpId(op) for op in self._free[placed.rows][row].tolist()]
            way, label = before[k][chosen.way_before[label]], int(chosen.before[label])
        return without_cost_free_recomputes(self._graph, saved)
