"""Derive from a graph what its searches need, whatever their budgets."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.distant_uses import distant_uses
from autoac.planner.problem.graph import Graph, OpId, SaveSet
from autoac.planner.problem.passes import with_passes
from autoac.planner.problem.save_sets import chosen_use_groups
from autoac.planner.problem.use_groups import later_runs, with_use_groups
from autoac.planner.solver.arrays import GraphArrays, as_arrays
from autoac.planner.solver.bounds import Bounds, bounds_of
from autoac.planner.solver.chain.blockwise import Blockwise
from autoac.planner.solver.recompute_windows import Windows, find_windows
from autoac.planner.solver.start.segments import Segments
from autoac.planner.solver.variables import Options


class SearchProblem:
    """A graph, with everything that a search derives from it and that does not depend on a budget.

    Each property is computed when it is first read, and kept.
    """

    def __init__(self, graph: Graph, options: Options | None = None) -> None:
        self.options = options or Options()
        self.step = graph  # as it was given
        several = bool(graph.runs or graph.pass_ends)
        use_groups = distant_uses(graph) if self.options.use_groups and not several else {}
        self.graph = with_passes(with_use_groups(graph, use_groups))

    @cached_property
    def without_groups(self) -> SearchProblem:
        """Return the problem of `step`, without the use groups that this class adds."""
        has_ours = self.graph is not self.step and not self.graph.by_pass
        return SearchProblem(self.step, replace(self.options, use_groups=False)) if has_ours else self

    def to_step(self, save_set: SaveSet) -> SaveSet:
        """Return the save set of `step` that saves what `save_set` of `graph` does."""
        others = later_runs(self.graph)
        ids = [op.id for op in self.graph.ops if op.id not in others]
        return frozenset(OpId(i) for i, op in enumerate(ids) if op in save_set)

    def from_step(self, save_set: SaveSet) -> SaveSet:
        """Return the save set of `graph` that recomputes what `save_set` of `step` does, each op once."""
        others = later_runs(self.graph)
        ids = [op.id for op in self.graph.ops if op.id not in others]
        return frozenset(ids[op] for op in save_set) | later_runs(self.graph)

    def chosen(self, save_set: SaveSet) -> tuple[Graph, SaveSet]:
        """Return the graph with only the use groups that `save_set` needs, and its save set."""
        if self.graph is self.step or self.graph.by_pass:
            return self.graph, save_set
        groups, saved = chosen_use_groups(self.graph, save_set)
        graph = with_use_groups(self.step, groups)
        others = later_runs(graph)
        ids = [op.id for op in graph.ops if op.id not in others]
        return graph, frozenset(ids[op] for op in saved)

    @cached_property
    def ceiling(self) -> int:
        """Return the peak with nothing recomputed: within this budget everything fits."""
        return peak_bytes(self.graph, self.graph.everything)

    @cached_property
    def windows(self) -> Windows:
        """Return for each op the window of backward in which a recompute of it can lie."""
        return find_windows(self.graph, merge_followers=self.options.merge_followers)

    @cached_property
    def arrays(self) -> GraphArrays:
        """Return the graph and `windows` as NumPy arrays."""
        return as_arrays(self.windows)

    @cached_property
    def bounds(self) -> Bounds:
        """Return the range in which a budget is worth planning for."""
        return bounds_of(self.windows)

    @cached_property
    def segments(self) -> Segments:
        """Return the segments that forward can be cut into."""
        return Segments(self.arrays)

    @cached_property
    def blockwise(self) -> Blockwise | None:
        """Return the dynamic program over blocks; None if switched off, or if the graph has use groups."""
        return self._blockwise(timed=True)

    @cached_property
    def blockwise_peak(self) -> Blockwise | None:
        """Return `blockwise` without run times, which is faster."""
        return self._blockwise(timed=False)

    def _blockwise(self, *, timed: bool) -> Blockwise | None:
        has_none = self.graph.runs or not self.options.blockwise
        return None if has_none else Blockwise(self.arrays, self.ceiling, timed=timed)
