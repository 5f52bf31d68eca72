"""Nine other ways to decide which ops are recomputed: each is a function from a Graph to save sets.

A baseline returns a *family*: a save set for each of its settings (a depth of blocks, a fraction of
memory). The planner's simulator judges all save sets, under the rules of our own plans. For all baselines
but one this is in their favor: our runtime is lazy and recomputes an op outside the save set only if
something needs it. A selective policy of `torch.utils.checkpoint` is judged as torch runs it (`as_run`).

Every save set is completed by `without_cost_free_recomputes`: it holds the ops that must be saved, and
saving an op that nothing reads costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from autoac.planner.problem.graph import Graph
from benchmarks.plans.block_rules import SELECTIVE, Family, attention_and_blocks, per_block, selective
from benchmarks.plans.knapsacks import dp_knapsack, greedy_knapsack, ilp_knapsack, uniform_blocks
from benchmarks.plans.minimum_cut import minimum_cut
from benchmarks.plans.sac_milp import sac_milp

Baseline = Callable[[Graph], Family]

BASELINES: dict[str, Baseline] = {
    "per-block checkpoint": per_block,
    "attention and block outputs": attention_and_blocks,
    SELECTIVE: selective,
    "dp_knapsack": dp_knapsack,
    "greedy_knapsack": greedy_knapsack,
    "ilp_knapsack": ilp_knapsack,
    "sac_milp": sac_milp,
    "uniform per-block program": uniform_blocks,
    "minimum cut": minimum_cut,
}
"""Baselines by their names in the report."""
