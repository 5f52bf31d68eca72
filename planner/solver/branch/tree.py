"""Branch on one decision after another: the tree of what is open, and the bound that it proves.

NOTE [ Why not HiGHS's own ]

The programs of this planner have tens of thousands of columns and few open decisions, and their bounds rise
quickly with the first branches. HiGHS spends most of its time at the root of such a program, nearly all of it
on the analytic center of the feasible points, which no option of version 1.15 turns off. And rows cannot be
added to a solve that runs. Here a node takes a few simplex iterations. When rows are added, the tree stays:
what a node has proven holds with more rows as well.

Source: L. Wolsey, "Integer Programming", sections 7.2 and 7.4; T. Achterberg, T. Koch, A. Martin, "Branching
rules revisited" (2005): reliability branching, where one trial is enough.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

import numpy as np

from autoac.planner.solver.branch.gains import Gains
from autoac.planner.solver.highs import Basis, Floats, Outcome, Relaxation, Stopped
from autoac.planner.solver.program import UNDECIDED, BuiltProgram
from autoac.planner.solver.time_limit import Allowance

TRIALS = 6  # at each node: decisions of which both ways are tried, if their gains are not known yet
CLOSED = 1e-9  # a bound within this share of a cost counts as equal to it


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """The save sets that agree on some decisions, and the best of them if decisions need not be whole."""

    fixed: Mapping[int, float]  # the decisions that they agree on, by column
    bound: float  # of their costs, in units of the objective
    decisions: Floats  # of the relaxation
    basis: Basis

    @property
    def open(self) -> list[int]:
        """Return the positions of the decisions that are not whole."""
        is_open = (self.decisions > UNDECIDED) & (self.decisions < 1 - UNDECIDED)
        return [int(position) for position in np.flatnonzero(is_open)]


@dataclass(frozen=True, slots=True, eq=False)
class Stale:
    """A node whose relaxation lacks rows."""

    fixed: Mapping[int, float]
    bound: float


class Tree:
    """The nodes that may hold a better save set, the one with the least bound first."""

    def __init__(self, built: BuiltProgram, allowance: Allowance) -> None:
        self._allowance, self._gains, self._order = allowance, Gains(), count()
        self._nodes: list[tuple[float, int, Node | Stale]] = []
        self.stopped: Stopped | None = None  # why a solve failed
        self.built, self._relaxation = built, Relaxation(built.program)
        self.relaxed, basis = allowance.solve_again(self._relaxation, {}, None, math.inf)
        if basis is not None:
            self._nodes.append(self._item(self._node({}, self.relaxed, basis)))
        elif self.relaxed.stopped is not Stopped.INFEASIBLE:
            self.stopped = self.relaxed.stopped
            self._nodes.append(self._item(Stale({}, -math.inf)))

    def use(self, built: BuiltProgram) -> None:
        """Go on with `built`, which has more rows: each node is solved again before it is branched on."""
        self.built, self._relaxation = built, Relaxation(built.program)
        self._nodes = [(bound, i, Stale(node.fixed, bound)) for bound, i, node in self._nodes]

    @property
    def bound(self) -> float:
        """Return the least cost that a save set of a node can have; infinite without a node."""
        return self._nodes[0][0] if self._nodes else math.inf

    def is_closed(self, enough: float) -> bool:
        """Return True if no save set costs less than `enough`."""
        return self.bound >= enough * (1 - CLOSED)

    def select(self, enough: float, best: float) -> Node | None:
        """Return the node to branch on: the one with the least bound.

        Args:
            enough: a node with this bound or a larger one is not returned.
            best: cost of the best save set, at least `enough`. Ones that cost as much are left out.

        Returns:
            None if no node has a bound below `enough`, at a limit, or after a solve that failed.
        """
        while not (self.is_closed(enough) or self._allowance.over or self.stopped):
            node = self._nodes[0][2]
            if isinstance(node, Node):
                return node
            solved = self._solved(node.fixed, None, node.bound, best)
            if self.stopped is None:
                self._replace(node, [solved])
        return None

    def branch(self, node: Node, best: float) -> None:
        """Replace `node` by two nodes: one saves the op of an open decision, the other does not.

        The decision is the one that is expected to raise both bounds most. Save sets that cost `best` or
        more are left out.
        """
        children: dict[tuple[int, int], Node | None] = {}

        def are_both_open(position: int) -> bool:
            for value in (0, 1):
                fixed = {**node.fixed, int(self.built.s_columns[position]): float(value)}
                child = self._solved(fixed, node.basis, node.bound, best)
                children[position, value] = child
                bound = best if child is None else child.bound
                if math.isfinite(bound):
                    gain = (bound - node.bound) / abs(value - node.decisions[position])
                    self._gains.learn(position, value, gain)
            return None not in (children[position, 0], children[position, 1])

        positions = node.open
        untried = [position for position in positions if not self._gains.are_known(position)]
        for position in sorted(untried, key=lambda at: abs(node.decisions[at] - 0.5))[:TRIALS]:
            if not are_both_open(position) or self._allowance.over:
                break
        else:
            position = max(positions, key=lambda at: self._gains.expected(at, float(node.decisions[at])))
            if (position, 0) not in children:
                are_both_open(position)
        if self.stopped is None:  # else a child that is None proves nothing
            self._replace(node, [children[position, 0], children[position, 1]])

    def _replace(self, node: Node | Stale, children: Iterable[Node | None]) -> None:
        made = [child for child in children if child is not None]
        kept = [item for item in self._nodes if item[2] is not node]
        self._nodes = [*kept, *map(self._item, made)]
        heapq.heapify(self._nodes)

    def _item(self, node: Node | Stale) -> tuple[float, int, Node | Stale]:
        return node.bound, next(self._order), node

    def _solved(
        self, fixed: Mapping[int, float], basis: Basis | None, bound: float, best: float
    ) -> Node | None:
        """Return the node of `fixed`; None if nothing in it costs less than the best, or with `stopped`."""
        outcome, found = self._allowance.solve_again(self._relaxation, fixed, basis, best)
        if found is not None:
            return self._node(fixed, outcome, found, bound)
        if outcome.stopped is not Stopped.INFEASIBLE:
            self.stopped = outcome.stopped
        return None

    def _node(
        self, fixed: Mapping[int, float], outcome: Outcome, basis: Basis, bound: float = -math.inf
    ) -> Node:
        assert outcome.values is not None
        return Node(fixed, max(outcome.bound, bound), self.built.decisions(outcome.values), basis)
