"""Compare the bounds of the program over blocks with brute force: `make bench-block-bounds`.

Each graph is small and random. The sizes at which the program cuts blocks and at which it decides ops are
random, too: they may weaken a bound but never break it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import graphs
import oracles

from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph
from autoac.planner.solver.chain import blocks, blockwise, menus, one_op_at_a_time
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.variables import Options

ONCE = Options(use_groups=False)
SIZES = {
    (blocks, "SMALL"): (1e-4, 0.1, 0.2, 0.35, 0.5, 10.0),
    (blocks, "LONG"): (0.0, 0.25),
    (blocks, "SMALL_IF_LONG"): (1e-2, 0.3),
    (menus, "MOST_DECISIONS"): (1, 2, 4, 12),
    (one_op_at_a_time, "MOST_SAVE_SETS"): (2, 8, 8192),
    (blockwise, "MANY"): (0.0, 0.25),
    (blockwise, "MOST_LABELS"): (1, 3, 3000),
    (blockwise, "MANY_LABELS"): (1, 100),
    (menus, "MOST_NUMBERS"): (2**4, 2**26),
}


def without_limit(_: float) -> bool:
    return True


def random_graph(rng: random.Random) -> Graph:
    """Return a step of five to eight ops."""
    return build(graphs.random_profile(rng, rng.choice((5, 6, 7, 8))))


@contextmanager
def random_sizes(rng: random.Random) -> Iterator[None]:
    """Draw the sizes at which blocks are cut and ops are decided, and put them back."""
    before = {key: getattr(*key) for key in SIZES}
    for key, values in SIZES.items():
        setattr(*key, rng.choice(values))
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(*key, value)


def wrong_bounds(step: Graph) -> list[str]:
    """Return the bounds of the program over blocks that some save set of `step` beats."""
    problem = SearchProblem(step, ONCE)
    timed, untimed = problem.blockwise, problem.blockwise_peak
    table, wrong = oracles.peaks_and_times(problem.graph), []
    for budget in sorted({peak for peak, _ in table.values()}):
        least = oracles.least_time(table, budget)
        found = timed.within(budget)
        bounds = [("within", float("inf") if found is None else found.cost_us)]
        bounds += [("plans", bound) for bound, _ in timed.plans(budget, max(1.5 * least, 1.0), without_limit)]
        bounds += [("untimed", float("inf"))] if untimed.within(budget) is None else []
        wrong += [
            f"{name}: {bound:g} us within {budget} bytes, which {least:g} us fit in"
            for name, bound in bounds
            if bound > least + 1e-6
        ]
    smallest = oracles.smallest_peak(table)
    for program in (timed, untimed):
        peaks = (bound for bound, _ in program.smallest_peak(0, smallest, without_limit))
        wrong += [f"a peak of {bound} bytes, but {smallest} is found" for bound in peaks if bound > smallest]
    return wrong


def main() -> int:
    """Try the number of graphs on the command line (4,000); return 1 if a bound is wrong."""
    tried = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    bad = 0
    for seed in range(tried):
        rng = random.Random(seed)
        step = random_graph(rng)
        with random_sizes(rng):
            wrong = wrong_bounds(step)
        bad += bool(wrong)
        print("".join(f"seed {seed}: {line}\n" for line in wrong), end="", flush=True)
    print(f"{bad} of {tried} graphs have wrong bounds")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
