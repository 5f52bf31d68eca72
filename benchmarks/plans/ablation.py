"""Switch off one part of the solver at a time: `python -m benchmarks.plans.ablation [NAMES]`.

A name is one of a model, or of a file with a profile. For each, at 5, 30 and 60 % of the way from the minimum
to the save-all peak (or at `--share`), a plan is made with all parts and without each. A row has the time
lost, and what is not proven, as shares of the step; and CPU seconds. docs/formulation.md, "What each part
buys", has the rows that tell.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autoac.planner import PlannerError, Profile, bounds, build, find_minimum_peak, plan
from autoac.planner.plan import Plan
from autoac.planner.solver import efforts as efforts_module
from autoac.planner.solver import search
from autoac.planner.solver.chain import blockwise
from autoac.planner.solver.start.segments import Segments
from autoac.planner.solver.variables import Options
from benchmarks.plans.profiles import CASES, load

SHARES = (0.05, 0.3, 0.6)  # of the way from the minimum to the save-all peak
FLOOR_WORK = 15.0


@contextmanager
def without_effort(name: str) -> Iterator[None]:
    """Leave out the efforts of this name, whatever the round."""
    original = efforts_module.efforts

    def others(now: efforts_module.Round) -> list[efforts_module.Effort]:
        found = original(now)
        return [effort for effort in found if getattr(effort, "func", effort).__name__ != name]

    with patch.object(search, "efforts", others):
        yield


def replaced(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return what sets an attribute of `owner` for a while."""
    return lambda: patch.object(owner, name, value)


PARTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "segments": replaced(Segments, "within", lambda *_: None),
    "ops in turn, prices": replaced(blockwise, "needs_turns", lambda _: False),
    "blocks": lambda: without_effort("blocks"),
    "lower limits": lambda: without_effort("lowered_limits"),
    "neighborhoods": lambda: without_effort("neighborhood"),
    "filling": replaced(search, "filled", lambda _graph, save_set, _budget: save_set),
}
SWITCHES = {"merging": "merge_followers", "use groups": "use_groups"}


def planned(profile: Profile, budget: int, work_limit: float, part: str = "") -> tuple[Plan | None, float]:
    """Plan without `part`; return the plan, or None without one, and its CPU seconds."""
    options = Options(**{SWITCHES[part]: False}) if part in SWITCHES else None
    began = time.process_time()
    with PARTS.get(part, nullcontext)():
        try:
            made = plan(profile, budget_bytes=budget, work_limit=work_limit, options=options)
        except PlannerError:
            made = None
    return made, time.process_time() - began


def row(title: str, made: Plan | None, seconds: float, whole: Plan) -> str:
    """Return a line: time lost and not proven as shares of the step, CPU seconds, and why it stopped."""
    if made is None:
        return f"{title:34} no plan, {seconds:.1f} s"
    lost = (made.recompute_us - whole.recompute_us) / whole.step_us
    unproven = (made.recompute_us - made.bound_us) / whole.step_us
    return f"{title:34} {lost:+8.3%}  unproven {unproven:.3%}  {seconds:6.1f} s  {made.stopped}"


def main() -> None:
    """Run the command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.ablation", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAMES", help=", ".join(CASES))
    parser.add_argument("--work", type=float, default=60.0, help="units of work for a plan")
    parser.add_argument("--part", action="append", choices=[*PARTS, *SWITCHES], help="default: each in turn")
    parser.add_argument("--share", action="append", type=float, help="default: 0.05, 0.3, 0.6")
    options = parser.parse_args()
    for name in options.names or CASES:
        profile = load(name) if name in CASES else Profile.from_json(Path(name).read_bytes())
        low, high = find_minimum_peak(profile, work_limit=FLOOR_WORK).found, bounds(build(profile)).ceiling
        for share in options.share or SHARES:
            budget = int(low + share * (high - low))
            whole, seconds = planned(profile, budget, options.work)
            if whole is None:
                print(f"{name} {share:.0%}: no plan")
                continue
            print(row(f"{name} {share:.0%}, all parts", whole, seconds, whole), flush=True)
            for part in options.part or [*PARTS, *SWITCHES]:
                print(
                    row(f"  without {part}", *planned(profile, budget, options.work, part), whole), flush=True
                )


if __name__ == "__main__":
    main()
