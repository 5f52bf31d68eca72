"""Plan with and without use groups: frontiers of networks with skip connections, plan times of transformers.

python -m benchmarks.plans.use_groups [NAMES] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from autoac.planner import Plan, PlannerError, Profile, build, plan
from autoac.planner.minimum_peak import WORK_LIMIT, MinimumPeak, search_minimum_peak
from autoac.planner.plan import DEFAULT_TIME_LIMIT_S
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance, Stopwatch
from autoac.planner.solver.variables import Options, options_for
from autoac.planner.units import GIB, format_bytes
from benchmarks.plans.profiles import CASES, load
from benchmarks.results import add_out_argument, markdown_table, write_result

NETWORKS = ("unet_sd15", "densenet161")
TRANSFORMERS = ("vit_h14", "gpt2_xl", "llama3_8b", "t5_3b")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)  # of the way from a minimum peak to the save-all peak
TIMED_SHARES = (0.2, 0.35, 0.5, 0.75)  # the same, from the proven bound of the minimum peak
ROUNDS = 2

FRONTIER_HEAD = (
    "model",
    "budget",
    "once: % of the step",
    "bound",
    "CPU s",
    "with use groups",
    "bound",
    "CPU s",
)
TIMES_HEAD = ("model", "ops with use groups", "CPU s, once", "with use groups", "median ratio")


def problem_of(profile: Profile, use_groups: bool) -> SearchProblem:
    """Return the problem of `profile` with or without use groups."""
    return SearchProblem(build(profile), options_for(profile, Options(use_groups=use_groups)))


def smallest(problem: SearchProblem) -> MinimumPeak:
    """Search for the minimum peak as `find_minimum_peak` does."""
    return search_minimum_peak(problem, Allowance(WORK_LIMIT, Stopwatch(DEFAULT_TIME_LIMIT_S, None), None))


def timed(profile: Profile, budget: int, use_groups: bool) -> tuple[Plan | PlannerError, float]:
    """Return the plan or the error, and CPU seconds."""
    began = time.process_time()
    found: Plan | PlannerError
    try:
        found = plan(profile, budget_bytes=budget, options=Options(use_groups=use_groups))
    except PlannerError as error:
        found = error
    return found, time.process_time() - began


def cells(profile: Profile, budget: int, use_groups: bool) -> list[str]:
    """Plan, and return recompute time and its bound in % of the step, and CPU seconds."""
    found, seconds = timed(profile, budget, use_groups)
    if isinstance(found, PlannerError):
        return [type(found).__name__, "", f"{seconds:.1f}"]
    shares = (us / found.step_us for us in (found.recompute_us, found.bound_us))
    return [*(f"{100 * share:.2f}" for share in shares), f"{seconds:.1f}"]


def frontier_rows(name: str, profile: Profile, budgets: Sequence[int] = ()) -> list[list[str]]:
    """Return a row for each budget; without `budgets`, from the minimum peaks on."""
    problems = [problem_of(profile, use_groups) for use_groups in (False, True)]
    if not problems[1].graph.runs:
        problems = problems[:1]  # the same program
    if not budgets:
        least = [smallest(problem).found for problem in problems]
        low, high = min(least), problems[0].ceiling
        budgets = sorted({*least, *(int(low + share * (high - low)) for share in SHARES)})
    rows = []
    for budget in budgets:
        once = cells(profile, budget, False)
        rows.append(
            [name, format_bytes(budget), *once, *(cells(profile, budget, True) if problems[1:] else once)]
        )
        print("  ".join(rows[-1]), flush=True)
    return rows


def times_row(name: str, profile: Profile) -> list[str]:
    """Return the median times of plans with and without use groups, planned in turn, and of their ratios."""
    problem = problem_of(profile, True)
    low, high = problem.bounds.floor, problem.ceiling
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS):
        for share in TIMED_SHARES:
            for use_groups in (False, True) if number % 2 == 0 else (True, False):
                budget = int(low + share * (high - low))
                seconds[use_groups].append(timed(profile, budget, use_groups)[1])
    ratio = statistics.median(g / once for once, g in zip(*seconds.values(), strict=True))
    times = (f"{statistics.median(spent):.2f}" for spent in seconds.values())
    row = [name, str(len(problem.graph.runs)), *times, f"{ratio:.2f}"]
    print("  ".join(row), flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.use_groups", description=__doc__)
    parser.add_argument("names", nargs="*", default=[*NETWORKS, *TRANSFORMERS], metavar="NAME")
    parser.add_argument("--budget-gb", nargs="*", type=float, default=[], metavar="GIB", help="of frontiers")
    add_out_argument(parser)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(CASES):
        parser.error(f"NAME must be a model of {', '.join(CASES)}; got {', '.join(sorted(unknown))}")
    budgets = [int(gib * GIB) for gib in options.budget_gb]
    frontiers, times = [], []
    for name in options.names:
        profile = load(name)
        if name in TRANSFORMERS:
            times.append(times_row(name, profile))
        else:
            frontiers += frontier_rows(name, profile, budgets)
    tables = [(FRONTIER_HEAD, frontiers), (TIMES_HEAD, times)]
    write_result("\n\n".join(markdown_table(head, rows) for head, rows in tables if rows), options.out)


if __name__ == "__main__":
    main()
