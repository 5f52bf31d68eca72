"""Search for a save set that is proven good enough: relax, look near the relaxation, simulate, refine.

One search serves both objectives: the least recompute time within a budget, and the smallest peak.

NOTE [ What is proven ]

The program that HiGHS solves is a relaxation (docs/formulation.md): every save set that fits satisfies its
rows. So its bound holds for every plan, in every round, and the largest one counts. A plan is accepted
only on the simulator's word. Where the simulator finds a peak above the budget, the row of that moment is
added, and where the row is there already, that save set alone is ruled out; neither cuts off a plan that
fits. Merged ops are an exception: docs/formulation.md, section 3, says when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import islice

from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import fits, peak_bytes
from autoac.planner.problem.graph import SaveSet
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.branch.tree import CLOSED, Node, Tree
from autoac.planner.solver.constrained_moments import first_moments
from autoac.planner.solver.highs import Outcome, Stopped
from autoac.planner.solver.incumbent import Incumbent, Judge
from autoac.planner.solver.moments import ConstrainedMoment
from autoac.planner.solver.program import UNDECIDED, BuiltProgram, assignment, build_program
from autoac.planner.solver.start.heuristics import filled, simple_save_sets
from autoac.planner.solver.start.search_problem import Problem
from autoac.planner.solver.time_limit import Allowance

# (share, reach) of the neighborhoods: see Search._neighborhood.
TIME_NEIGHBORHOODS = ((0.05, 1.0), (0.2, 2.0))
PEAK_NEIGHBORHOODS = ((0.1, 1.0), (0.5, 1.0))
FAR = 0.1  # gap from which smaller limits are tried,
LIMITS = 5  # so many
FEW_NODES = 20  # in a neighborhood: what is not found soon is not there
MANY_UNDECIDED = 100  # so many open decisions say little, see _neighborhood
TIGHT = 0.5  # of the time of everything: if so much must run again, blocks are asked after one round
LOOSE = 0.2  # of it: if less must run again and few decisions are open, blocks are not asked
BLOCKS_SHARE = 0.4  # of the work that is left then: this much is kept for further rounds
DEAR = 5.0  # units of work for a relaxation: with dearer ones, neighborhoods do not pay
FEW_UNDECIDED = 10  # so few open decisions are better branched on than left to blocks
STALL_NODES = 50  # of the tree: if the bound rises too little meanwhile, the full program is solved instead
STALL_SHARE = 0.05  # of the way to the cutoff: so much is not too little
SHARE = 0.98  # of the gap asked for that the search may use up; the rest is for rounding

Effort = Callable[[BuiltProgram, Outcome], Outcome]


class Search:
    """Look for candidates in ever wider neighborhoods of the relaxation, until one is proven good enough.

    Each round begins with the relaxation without integers. It takes a fraction of a second, and its bound is
    within a percent or two of the best plan. Nearly all of its decisions are whole already, and its prices
    (reduced costs) say how much each column would cost if it were changed. So the search first rounds it.
    Then it fixes all columns that are expensive to change. To find the fastest plan, it then branches on the
    decisions that are open (branch/tree.py). Where branching stalls, and for the smallest peak, the search
    fixes only the columns that no plan as good as requested can change. If HiGHS then finds no candidate,
    there is none.

    Source: docs/formulation.md, section 7.
    """

    def __init__(
        self,
        problem: Problem,
        budget: int | None,
        *,
        gap: float,
        allowance: Allowance,
        start: Iterable[SaveSet] = (),
        moments: Iterable[ConstrainedMoment] = (),
        bound: float = 0.0,
        tolerance: float = 0.0,
    ) -> None:
        """Prepare a search.

        Args:
            problem: the graph.
            budget: bytes; None to minimise the peak.
            gap: stop once the best cost is proven to be within this fraction of the least.
            allowance: work and time.
            start: save sets to compare with; at least one to minimise the peak.
            moments: the first rows of the budget, such as those of a neighboring budget.
            bound: a cost that is already proven to be the least.
            tolerance: stop as well once the best cost is proven to be within this of the least.
        """
        self.problem, self.graph, self.windows = problem, problem.graph, problem.windows
        self.budget, self.gap, self.options = budget, gap, problem.options
        self.tolerance = tolerance
        self.allowance, self.rounds = allowance, 0
        self.best = Incumbent(self.graph, budget, bound, allowance)
        self.enough: float | None = None  # a cost of no more than this, or a bound above it, is an answer
        self.excluded: list[SaveSet] = []
        self._dearest_us = float(problem.arrays.cost_us.sum())  # recompute time of everything
        self._slack = 0.0  # cost above the bound that the next cutoff allows
        self._tried_blocks = False
        self._filled: SaveSet | None = None  # the best save set when it was last filled
        self._up_to_best = False  # the last cutoff was the best cost
        self._tree: Tree | None = None  # of the last relaxation, and of programs with more rows
        for save_set in start:
            self.best.offer(save_set)
        if budget is not None and self.best.save_set is None:
            within = problem.segments.within(budget)
            if within is not None:
                self.best.offer(within)
        self.moments = set(moments) or first_moments(self.windows, (self.graph.everything, self._likely()))
        self.judge = Judge(problem, budget, self.best, self.moments)

    def run(self) -> Stopped:
        """Search, and return the reason to stop. OPTIMAL: the best cost is proven to be within the gap."""
        stopped = self._refine()
        if self.budget is not None and stopped is not Stopped.OPTIMAL:
            if self.best.save_set is None or stopped is not Stopped.INFEASIBLE:
                self._fall_back()
            if self.is_good_enough:
                stopped = Stopped.OPTIMAL
        if stopped is Stopped.INFEASIBLE and self.best.save_set is not None:
            self.best.bound = self.best.cost  # nothing is better
            return Stopped.OPTIMAL
        return stopped

    @property
    def is_good_enough(self) -> bool:
        """Return True if the best cost is proven to be within the gap, or `enough` is decided."""
        if self.enough is not None and (self.best.cost <= self.enough or self.best.bound > self.enough):
            return True
        return self.best.gap <= max(self._enough_gap, CLOSED)

    @property
    def _enough_gap(self) -> float:
        """Return the gap that is small enough: `gap`, or what `tolerance` is of the best cost."""
        return max(self.gap, min(self.tolerance / self.best.cost, 1.0) if self.best.cost > 0 else 0.0)

    def _refine(self) -> Stopped:
        """Solve round after round, each with the rows that the last one lacked.

        INFEASIBLE: no save set is better than the best one, except perhaps ones that were ruled out.
        """
        efforts = self._efforts()
        last, level = len(efforts) - 1, 0
        while not self.is_good_enough:
            if self.rounds and self.best.bound > TIGHT * self._dearest_us:
                self._try_blocks()
                if self.is_good_enough:
                    break
            if self.allowance.over:
                return self.allowance.stopped
            built, relaxed = self._relaxation()
            if relaxed.stopped is Stopped.INFEASIBLE:
                if self.best.save_set is not None and not self.excluded:  # it fits, so the program is wrong
                    self.best.bound = 0.0
                    return Stopped.FAILED
                return Stopped.INFEASIBLE
            if relaxed.stopped is not Stopped.OPTIMAL:
                if self.allowance.over:
                    continue
                return Stopped.FAILED
            refined = False
            while not (refined or self.is_good_enough or self.allowance.over):
                effort = min(level, last)
                outcome = efforts[effort](built, relaxed)
                if self.is_good_enough or self.allowance.over:
                    break
                if outcome.values is None:
                    if effort == last and outcome.stopped is Stopped.FAILED:
                        return Stopped.FAILED
                    if outcome.stopped is Stopped.INFEASIBLE and self._up_to_best:
                        return Stopped.INFEASIBLE
                    level += 1
                    refined = self._tree is not None and self._tree.built is not built  # it has more rows
                    continue
                if self._add_missing_moments():
                    level = 1 if self.budget is not None else min(level, 1)
                elif effort < last and (effort == 0 or self.judge.missing is None):
                    level += 1
                    continue
                else:
                    self._rule_out(built.save_set(outcome.values))
                refined = True
        return Stopped.OPTIMAL

    def _fall_back(self) -> None:
        """Try the simple save sets, so that no plan is slower than what people do by hand; fill the best."""
        assert self.budget is not None
        if self.best.save_set is not None and self.allowance.out_of_time:
            return
        for spent, save_set in self.problem.simple:
            if spent >= self.best.cost:
                break
            if fits(self.graph, save_set, self.budget):
                self.best.take(spent, save_set)
                break
        if not (self.is_good_enough or self.allowance.out_of_time):
            self._fill()

    def _fill(self) -> None:
        """Fill the best save set greedily with what else fits in the budget, unless that was done already."""
        known = self.best.save_set
        if self.budget is None or known is None or known == self._filled:
            return
        self.best.offer(filled(self.graph, known, self.budget))
        self._filled = self.best.save_set

    def _likely(self) -> SaveSet:
        """Return a save set with peaks where a plan is likely to have them: the second simple one."""
        if self.best.save_set is not None:
            return self.best.save_set
        return next(islice(simple_save_sets(self.graph), 1, None), self.graph.everything)

    # Efforts of a round

    def _relaxation(self) -> tuple[BuiltProgram, Outcome]:
        """Build the program with the moments so far, and solve it without integers."""
        self.rounds += 1
        built = self._build()
        self._tree = Tree(built, self.allowance)
        outcome = self._tree.relaxed
        self.best.raise_bound(outcome.bound * built.cost_scale)
        self._slack = max(self._target - self.best.bound, 1e-4 * self._dearest_us)
        return built, outcome

    def _build(self) -> BuiltProgram:
        return build_program(
            self.problem.arrays, self.budget, self.moments, excluded=self.excluded, options=self.options
        )

    def _efforts(self) -> list[Effort]:
        """Return the ways to look for a candidate, the cheapest first."""
        if self.budget is None:
            of_peak = (partial(self._neighborhood, *one) for one in PEAK_NEIGHBORHOODS)
            return [self._rounded, *of_peak, self._full_program]
        tried = (partial(self._neighborhood, *one) for one in TIME_NEIGHBORHOODS)
        first: list[Effort] = [self._rounded, self._lowered_limit, *tried]
        return [*first, self._blockwise, self._branch, self._full_program]

    def _rounded(self, built: BuiltProgram, relaxed: Outcome) -> Outcome:
        """Round the relaxation's decisions: seldom a plan, but they show where rows are missing."""
        self._consider(built, relaxed, in_part=True)
        if self.budget is not None and built.undecided(relaxed) >= MANY_UNDECIDED:
            self.judge.missing = None  # moments of such a candidate are not useful
        return relaxed

    def _lowered_limit(self, built: BuiltProgram, relaxed: Outcome) -> Outcome:
        """Round relaxations for lower limits up until one fits, if the best plan is far from the bound.

        Where thousands of ops form a chain, as in a recurrent network, the relaxation saves some of them by a
        tenth. Without these ops, the whole chain runs again at once; with them, a little too much is saved.
        """
        nothing = replace(relaxed, values=None)
        if self.best.gap < FAR or relaxed.work > DEAR:
            return nothing
        assert self.budget is not None
        limit = too_much = self.budget
        for left in reversed(range(LIMITS + 1)):
            if relaxed.values is None:
                limit = (limit + too_much) // 2
            else:
                decisions = built.decisions(relaxed.values)
                save_set = without_cost_free_recomputes(self.graph, built.rounded(decisions, UNDECIDED))
                over = peak_bytes(self.graph, save_set) - self.budget
                if over <= 0:
                    self.best.take(recompute_us(self.graph, save_set), save_set)
                    break
                halfway = (limit + self.problem.bounds.floor) // 2
                limit, too_much = max(limit - 2 * over, halfway), limit
            if left == 0 or self.allowance.over:
                break
            built = build_program(self.problem.arrays, limit, self.moments, options=self.options)
            relaxed = self.allowance.solve(built.program, built.cost_scale, relaxed=True)
        return nothing

    def _blockwise(self, built: BuiltProgram, relaxed: Outcome) -> Outcome:
        is_loose = self.best.bound < LOOSE * self._dearest_us
        if not (is_loose and built.undecided(relaxed) <= FEW_UNDECIDED):  # else branching is faster
            if is_loose:
                self._fill()  # in a large model blocks may take all time left, and this is often enough
            if not self.is_good_enough:
                self._try_blocks()
        return replace(relaxed, values=None)

    def _try_blocks(self) -> None:
        """Take plans and bounds of the dynamic program over blocks, once: no relaxation changes them."""
        if self._tried_blocks or self.budget is None or self.problem.blockwise is None:
            return
        self._tried_blocks = True
        known, least = min(self.best.cost, self._dearest_us), BLOCKS_SHARE * self.allowance.work_left

        def may_go_on(work: float) -> bool:
            return self.allowance.spend(work) and self.allowance.work_left > least

        proven = 0.0 if self.best.save_set is None else self.best.bound
        plans = self.problem.blockwise.plans(self.budget, known, may_go_on, proven_us=proven)
        for bound, save_set in plans:
            if save_set is not None:
                self.best.offer(save_set)
            self.best.raise_bound(bound)
            if self.is_good_enough:
                return

    def _neighborhood(self, share: float, reach: float, built: BuiltProgram, relaxed: Outcome) -> Outcome:
        """Look for a candidate without changes that are expensive by themselves.

        The slack is the distance from the relaxation to the target (for the peak: to the best). One change
        may cost `share` of the slack, and the candidate may be `reach` times the slack away.
        It is left out with many open decisions, since it is about as hard as the whole program then, and
        where HiGHS's root alone would take too long, whatever the limit on time.
        """
        is_hard = built.undecided(relaxed) >= MANY_UNDECIDED or relaxed.work > DEAR
        if self.budget is not None and is_hard:
            return replace(relaxed, values=None)
        if self.budget is None:
            cutoff = self.best.cost / built.cost_scale
            slack = max(cutoff - relaxed.bound, 0.0)
            target = relaxed.bound + slack / 4
        else:
            target = self._target / built.cost_scale
            slack = max(target - relaxed.bound, 0.0)
            cutoff = relaxed.bound + reach * slack
        self._up_to_best = False
        outcome = self.allowance.solve(
            built.program.costing_at_most(cutoff).priced_out(relaxed, share * slack),
            built.cost_scale,
            target=target,
            options={"mip_max_nodes": FEW_NODES},
        )
        self._consider(built, outcome)
        return outcome

    def _branch(self, _built: BuiltProgram, relaxed: Outcome) -> Outcome:
        """Branch until the best plan is good enough, none is left, a limit is reached or it stalls."""
        assert self._tree is not None
        self._fill()
        self._up_to_best = self._branch_up_to(self._enough_gap * SHARE)
        return replace(relaxed, values=None, stopped=Stopped.INFEASIBLE)

    def _branch_up_to(self, gap: float) -> bool:
        """Branch until the best plan is proven to be within `gap`; return True if it is, or if none is left.

        Stop if it stalls.
        """
        tree = self._tree
        assert tree is not None
        nodes, far = 0, math.inf
        while self.best.gap > max(gap, CLOSED):
            scale = tree.built.cost_scale
            best, enough = self.best.cost / scale, self.best.cost * (1 - gap) / scale
            node = tree.select(enough, best)
            self.best.raise_bound(min(tree.bound, best) * scale)
            if node is None or self.allowance.over:
                return tree.is_closed(enough)
            if nodes % STALL_NODES == 0:
                before, far = far, min(enough, self._dearest_us / scale) - tree.bound
                if far >= (1 - STALL_SHARE) * before:
                    return False
            nodes += 1
            is_too_large = self._consider_node(node)
            best = self.best.cost / scale
            if is_too_large or (not node.open and node.bound < best * (1 - gap) * (1 - CLOSED)):
                self._rule_out(tree.built.rounded(node.decisions))
                tree.use(self._build())
            elif node.open and node.bound < best:
                tree.branch(node, best)
        return self.best.gap <= max(gap, CLOSED)

    def _full_program(self, built: BuiltProgram, relaxed: Outcome) -> Outcome:
        """Solve the program with all its columns: find a candidate up to a cutoff, or prove that none exists.

        The cutoff starts at the target and moves away twice as far each time, up to the best cost. For the
        peak, it is the best from the start. The best plan is filled first: a solve may take all time left.
        """
        self._fill()
        if self.is_good_enough:
            return relaxed
        known, cutoff_cost = self.best.save_set, self.best.cost
        if self.budget is not None:
            # If nothing is better than this, the best is good enough.
            cutoff_cost *= 1 - self._enough_gap * SHARE
            if self.best.bound + self._slack < self._dearest_us:
                cutoff_cost = min(self.best.bound + self._slack, cutoff_cost)
        self._slack *= 2
        self._up_to_best = cutoff_cost >= self.best.cost
        cutoff = cutoff_cost / built.cost_scale
        program = built.program
        if math.isfinite(cutoff):
            program = program.costing_at_most(cutoff)
            if self.options.fix_by_price:
                program = program.priced_out(relaxed, cutoff - relaxed.bound)
        outcome = self.allowance.solve(
            program,
            built.cost_scale,
            gap=self._enough_gap * SHARE,
            target=None if self.budget is None else self._target / built.cost_scale,
            start=assignment(self.windows, built, known) if known is not None and self._up_to_best else None,
        )
        self.best.raise_bound(min(outcome.bound * built.cost_scale, cutoff_cost))
        self._consider(built, outcome)
        return outcome

    @property
    def _target(self) -> float:
        """Return the cost up to which a plan is proven to be good enough."""
        by_gap = self.best.bound / max(1 - self.gap * SHARE, 0.01)
        return max(by_gap, self.best.bound + self.tolerance * SHARE)

    # Candidates

    def _consider(self, built: BuiltProgram, outcome: Outcome, *, in_part: bool = False) -> None:
        """Consider the save set of an outcome; `in_part`: its decisions may be open.

        A search for the smallest peak ignores a candidate once the work is used up, so that more work never
        finds a larger peak.
        """
        self.judge.missing = None
        if outcome.values is None or (self.budget is None and self.allowance.out_of_work):
            return
        decisions, objective = built.decisions(outcome.values), (outcome.objective or 0.0) * built.cost_scale
        if in_part:
            self.judge.consider_rounded(built, decisions, objective)
        else:
            self.judge.consider(built.rounded(decisions), objective)

    def _consider_node(self, node: Node) -> bool:
        """Consider the relaxation of a node. Return True if it is too large at its worst moment."""
        assert self._tree is not None
        built, before = self._tree.built, self.best.save_set
        self.judge.consider_rounded(built, node.decisions, node.bound * built.cost_scale)
        if self.best.save_set != before:
            self._fill()
        missing = self.judge.missing or []
        return bool(missing) and missing[0] not in self.moments

    def _rule_out(self, candidate: SaveSet) -> None:
        """Add rows that rule out `candidate`: of the moments where it is too large, or else of itself.

        One that fits has been considered already, and nothing that costs less is ruled out with it.
        """
        if self._add_missing_moments():
            return
        if self.judge.missing is not None and not self.options.lazy_rows:
            # The candidate runs an op earlier than the runtime would, where no row forbids it yet.
            self.options = replace(self.options, sparse_stride=1, lazy_rows=True)
        else:
            self.excluded.append(candidate)

    def _add_missing_moments(self) -> bool:
        """Add the moments at which the last candidate is too large; return True if any of them is new."""
        new = [moment for moment in self.judge.missing or () if moment not in self.moments]
        self.moments.update(new)
        return bool(new)
