"""Compare every baseline on one profile with our plans at their peaks and at eight more budgets."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from autoac.planner import PlannerError, Profile, bounds, build
from autoac.planner import find_minimum_peak as smallest_peak
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import plan
from autoac.planner.problem.graph import Graph
from benchmarks.plans import profiles
from benchmarks.plans.baselines import BASELINES
from benchmarks.plans.block_rules import as_run
from benchmarks.results import ROOT, source_digest, write_result

OUT = ROOT / "build" / "bench" / "plans"
GAP = 0.01
FLOOR_WORK = 20.0  # of the search for the minimum peak
GROWTH = "llama_l"  # prefix of models that differ only in layers, and have no baselines
BUDGETS = 8  # between the minimum peak and the save-all peak
MOST_POINTS = 4  # of one baseline, at whose peaks we plan
LEAST_RATIO = 0.1  # of ours / theirs, in a mean
SLOWER = 1e-6  # relative: beyond this a plan counts as slower than a baseline; below it is rounding


@dataclass(frozen=True, slots=True)
class Point:
    """A baseline's save set, as the simulator judges it."""

    baseline: str
    setting: str
    peak: int
    recompute_us: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Our plan within a budget; `recompute_us` is None if no plan was found in time."""

    budget: int
    peak: int | None
    recompute_us: float | None
    bound_us: float
    stopped: str
    cpu_s: float  # from Profile to Plan, of this process; other processes do not add to it

    @property
    def gap(self) -> float:
        """Return the gap of the plan, or 1 without a plan."""
        if self.recompute_us is None:
            return 1.0
        return max(0.0, 1 - self.bound_us / self.recompute_us) if self.recompute_us > 0 else 0.0


@dataclass(slots=True)
class Comparison:
    """The results for one profile; lists grow while the comparison runs."""

    name: str
    digest: str  # the profile's
    code: str  # of the planner and the baselines
    ops: int
    steps: int
    step_us: float  # forward and backward without recomputation
    static_bytes: int
    ceiling: int
    floor_proven: int
    floor_found: int
    floor_s: float
    points: list[Point] = field(default_factory=list)
    families: dict[str, float] = field(default_factory=dict)  # evaluated baselines and their seconds
    failures: dict[str, str] = field(default_factory=dict)  # baselines that raised, and the error
    answers: list[Answer] = field(default_factory=list)

    def at(self, budget: int) -> Answer | None:
        """Return our answer within exactly that budget."""
        return next((answer for answer in self.answers if answer.budget == budget), None)


COMPARISONS = TypeAdapter(Comparison)


# Which points and budgets are compared.


def pareto(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other beats in both peak and recompute time, smallest peak first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak, p.recompute_us)):
        if not front or point.recompute_us < front[-1].recompute_us:
            front.append(point)
    return front


def spread(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of the points, evenly by position, including the first and the last."""
    if len(points) <= most:
        return list(points)
    chosen = {round(i * (len(points) - 1) / (most - 1)) for i in range(most)}
    return [points[i] for i in sorted(chosen)]


def selected(points: Iterable[Point], ceiling: int) -> list[Point]:
    """Return the points at whose peaks we plan: a few of the best of each baseline.

    Points at the save-all peak or above are left out: saving everything recomputes nothing and fits there.
    """
    by_baseline: dict[str, list[Point]] = {}
    for point in points:
        if point.peak < ceiling:
            by_baseline.setdefault(point.baseline, []).append(point)
    return [p for family in by_baseline.values() for p in spread(pareto(family), MOST_POINTS)]


def between(floor: int, ceiling: int, count: int) -> list[int]:
    """Return `count` evenly spaced budgets between the two, both excluded."""
    return [floor + (ceiling - floor) * i // (count + 1) for i in range(1, count + 1)]


def best_within(points: Iterable[Point], peak: int) -> Point | None:
    """Return the fastest baseline point with a peak of at most `peak`."""
    return min((p for p in points if p.peak <= peak), key=lambda p: (p.recompute_us, p.peak), default=None)


def beaten(comparison: Comparison) -> list[tuple[Point, Answer]]:
    """Return the baseline points that are faster than our plan at their peak; none are expected."""
    found = []
    for point in comparison.points:
        answer = comparison.at(point.peak)
        if answer is not None and (
            answer.recompute_us is None or answer.recompute_us > point.recompute_us * (1 + SLOWER)
        ):
            found.append((point, answer))
    return found


def ratio(ours_us: float | None, theirs_us: float) -> float | None:
    """Return ours / theirs, or None without a plan or a time to divide by."""
    return None if ours_us is None or theirs_us <= 0 else ours_us / theirs_us


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean of ratios ours / theirs, each counted as at least LEAST_RATIO.

    Just below the save-all peak we recompute next to nothing; a ratio there could dominate the mean.
    """
    logs = [math.log(max(r, LEAST_RATIO)) for r in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


# The comparison itself.


def code_digest() -> str:
    """Return the digest of the planner and of the baselines."""
    here = Path(__file__).parent
    names = ("baselines", "block_rules", "knapsacks", "minimum_cut", "op_kinds", "sac_milp")
    return source_digest(folders=["planner"], files=[here / f"{name}.py" for name in names])


def begin(name: str, profile: Profile, graph: Graph) -> Comparison:
    """Return a comparison that has only the minimum and the save-all peak."""
    began = time.perf_counter()
    floor = smallest_peak(profile, work_limit=FLOOR_WORK)
    return Comparison(
        name=name,
        digest=profile.digest,
        code=code_digest(),
        ops=len(graph.ops),
        steps=len(graph.steps),
        step_us=sum(op.runtime_us for op in graph.ops) + sum(step.runtime_us for step in graph.steps),
        static_bytes=graph.static_bytes,
        ceiling=bounds(graph).ceiling,
        floor_proven=floor.proven,
        floor_found=floor.found,
        floor_s=time.perf_counter() - began,
    )


def evaluate(graph: Graph, baseline: str) -> list[Point]:
    """Return the distinct points of a baseline."""
    points: dict[tuple[int, float], Point] = {}
    for setting, save_set in BASELINES[baseline](graph).items():
        peak = peak_bytes(*as_run(graph, baseline, setting, save_set))
        point = Point(baseline, setting, peak, recompute_us(graph, save_set))
        points.setdefault((point.peak, point.recompute_us), point)
    return list(points.values())


def answer(profile: Profile, budget: int) -> Answer:
    """Plan within `budget`, and time it."""
    began = time.process_time()
    try:
        found = plan(profile, budget_bytes=budget, gap=GAP, step_gap=0.0)  # not within 0.1 % of the step
    except PlannerError as error:
        return Answer(budget, None, None, 0.0, type(error).__name__, time.process_time() - began)
    return Answer(
        budget=budget,
        peak=found.peak,
        recompute_us=found.recompute_us,
        bound_us=found.bound_us,
        stopped=found.stopped.value,
        cpu_s=time.process_time() - began,
    )


def compare(
    name: str,
    profile: Profile,
    known: Comparison | None = None,
    *,
    baselines: bool = True,
    keep: Callable[[Comparison], None] = lambda _: None,
) -> Comparison:
    """Compare all baselines with our plans on one profile.

    Args:
        known: the result of an earlier run; used if profile and code are the same.
        baselines: if False, only plan at the evenly spaced budgets.
        keep: called with the comparison after each answer.
    """
    graph = build(profile)
    if known is None or (known.digest, known.code) != (profile.digest, code_digest()):
        known = begin(name, profile, graph)
        keep(known)
    for baseline in BASELINES if baselines else ():
        if baseline not in known.families and baseline not in known.failures:
            began = time.perf_counter()
            try:
                known.points += evaluate(graph, baseline)
            except Exception as error:  # noqa: BLE001  # a baseline may fail on a model; the report names it
                known.failures[baseline] = f"{type(error).__name__}: {error}"
            else:
                known.families[baseline] = time.perf_counter() - began
            keep(known)
    budgets = between(known.floor_found, known.ceiling, BUDGETS)
    for budget in sorted({*budgets, *(p.peak for p in selected(known.points, known.ceiling))}):
        if known.at(budget) is None:
            known.answers.append(answer(profile, budget))
            keep(known)
    return known


def load(path: Path) -> Comparison | None:
    """Return the comparison in a file, or None if the file is missing or of another format."""
    try:
        return COMPARISONS.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def compare_model(name: str, device: str, folder: Path) -> str:
    """Compare a model of `profiles.CASES`, and return a line about it.

    The comparison is written to a file after each answer. What the file has of the same profile and code is
    kept.
    """
    logging.getLogger("torch.distributed._tools.sac_ilp").disabled = True  # "no solution" for some fractions

    def keep(comparison: Comparison) -> None:
        write_result(COMPARISONS.dump_json(comparison, indent=1).decode(), path)

    began = time.perf_counter()
    path, baselines = folder / f"{name}.{device}.json", not name.startswith(GROWTH)
    profile = profiles.load(name, device)
    done = compare(path.stem, profile, load(path), baselines=baselines, keep=keep)
    return f"{_summary(done)} ({time.perf_counter() - began:.0f} s)"


def _summary(done: Comparison) -> str:
    worst: Any = max((a.gap for a in done.answers), default=0.0)
    slowest = max((a.cpu_s for a in done.answers), default=0.0)
    lost = len(beaten(done))
    return (
        f"{done.name}: {done.ops} ops, {len(done.points)} baseline points, {len(done.answers)} plans, "
        f"beaten {lost} times, worst gap {worst:.2%}, slowest plan {slowest:.1f} s"
    )
