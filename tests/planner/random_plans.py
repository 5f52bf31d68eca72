"""Look for plans that merging and the canonical form lose, by brute force: `make bench-random-plans`.

Each graph is small and random, with storages of no bytes and run times far apart, and some op follows
another. Within every peak of a save set, some save set in canonical form must be as fast as any. Where none
is, and within one peak drawn at random, `plan` is asked for a gap of 0: nothing may be faster than what it
finds or proves.
"""

from __future__ import annotations

import random
import sys

import graphs
import oracles

from autoac.planner import Graph, PlannerError, build, plan
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.solver.recompute_windows import Role, canonical, find_windows
from autoac.planner.solver.variables import Options

ONCE = Options(use_groups=False)
ROUNDING_US = 1e-6


def random_graph(rng: random.Random) -> Graph:
    """Return a step of at most eight ops in which an op follows another."""
    while True:
        graph = graphs.resized(build(graphs.random_profile(rng, rng.choice((6, 7, 8)))), rng)
        if Role.FOLLOWS in find_windows(graph).role:
            return graph


def lost_and_wrong(graph: Graph, rng: random.Random) -> tuple[list[str], list[str]]:
    """Return the budgets at which no canonical save set is the fastest, and those with a wrong plan."""
    table, windows = oracles.peaks_and_times(graph), find_windows(graph)
    of_canonical = {}
    for save_set in {canonical(windows, save_set) for save_set in table}:
        tidy = without_cost_free_recomputes(graph, save_set)
        peak = min(peak_bytes(graph, save_set), peak_bytes(graph, tidy))
        of_canonical[save_set] = peak, recompute_us(graph, save_set)
    lost, wrong = [], []
    peaks = sorted({peak for peak, _ in table.values() if peak > 0})
    drawn = rng.choice(peaks)
    for budget in peaks:
        least, left = oracles.least_time(table, budget), oracles.least_time(of_canonical, budget)
        is_lost = left is None or left > least + ROUNDING_US
        if is_lost:
            lost.append(f"within {budget} bytes: {left} us in canonical form; {least:g} us fit in")
        if is_lost or budget == drawn:
            wrong += wrong_plan(graph, budget, least)
    return lost, wrong


def wrong_plan(graph: Graph, budget: int, least_us: float) -> list[str]:
    """Return what `plan` says if a save set of `least_us` within `budget` beats it."""
    try:
        made = plan(graph, budget_bytes=budget, gap=0.0, options=ONCE)
    except PlannerError as error:
        return [f"within {budget} bytes: {error}; {least_us:g} us fit in"]
    if max(made.recompute_us, made.bound_us) <= least_us + ROUNDING_US:
        return []
    says = f"{made.recompute_us:g} us, at least {made.bound_us:g} us"
    return [f"within {budget} bytes: {says}; {least_us:g} us fit in"]


def main() -> int:
    """Try the number of graphs on the command line (4,000); return 1 if a plan or a bound is wrong."""
    tried = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    all_lost, all_wrong = 0, 0
    for seed in range(tried):
        rng = random.Random(seed)
        lost, wrong = lost_and_wrong(random_graph(rng), rng)
        all_lost, all_wrong = all_lost + len(lost), all_wrong + len(wrong)
        print("".join(f"seed {seed}: {line}\n" for line in [*lost, *wrong]), end="", flush=True)
    print(f"{tried} graphs: {all_lost} plans lost, {all_wrong} plans or bounds wrong")
    return int(all_wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
