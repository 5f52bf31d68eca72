"""One profile: every baseline, and our plan at the peaks that they reach and at eight budgets between.

    python -m benchmarks.plans.compare NAME.DEVICE.json [--out FOLDER]

writes FOLDER/NAME.DEVICE.json after each answer. Run again, it goes on where it stopped, as long as the
profile and the code are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from autoac.planner import PlannerError, Profile, bounds, build
from autoac.planner import find_minimum_peak as smallest_peak
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import plan
from autoac.planner.problem.graph import Graph
from benchmarks.plans import checkmate
from benchmarks.plans.baselines import BASELINES, as_run

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "bench" / "plans"
GAP = 0.01
TIME_LIMIT_S = 60.0  # of Checkmate's solves; ours have the planner's own limit on work
FLOOR_WORK = 20.0  # of the search of the smallest peak
BUDGETS = 8  # between floor and ceiling
MOST_POINTS = 4  # of a family, at whose peaks we plan
LEAST_RATIO = 0.1  # of ours to theirs, in a mean
SLOWER = 1e-6  # relative: beyond this a plan counts as slower than a baseline; below it is rounding


@dataclass(frozen=True, slots=True)
class Point:
    """What the simulator says of a baseline's save set."""

    baseline: str
    setting: str
    peak: int
    recompute_us: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Our plan within a budget; without a `recompute_us` there was none in time."""

    budget: int
    peak: int | None
    recompute_us: float | None
    bound_us: float
    stopped: str
    rounds: int
    wall_s: float  # from Profile to Plan
    solver_s: float | None  # of it, HiGHS's; None where Plan does not tell
    cpu_s: float  # as wall_s, of this process's own time: the same on a machine that others use too

    @property
    def gap(self) -> float:
        """As `Plan.gap`; 1 where there is no plan."""
        if self.recompute_us is None:
            return 1.0
        return max(0.0, 1 - self.bound_us / self.recompute_us) if self.recompute_us > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Unlimited:
    """Checkmate's optimum within a budget; see checkmate.py for what can be compared."""

    budget: int
    recompute_us: float | None  # None: no schedule found
    bound_us: float
    twice: bool  # an op runs again more than once
    wall_s: float


@dataclass(slots=True)
class Comparison:
    """All that is known of one profile; grows while it is worked out."""

    name: str
    digest: str  # the profile's
    code: str  # of the planner and the baselines
    ops: int
    steps: int
    step_us: float  # forward and backward with nothing run again
    static_bytes: int
    ceiling: int
    floor_proven: int
    floor_found: int
    floor_s: float
    points: list[Point] = field(default_factory=list)
    families: dict[str, float] = field(default_factory=dict)  # baselines evaluated, and their seconds
    failures: dict[str, str] = field(default_factory=dict)  # baselines that broke, and how
    answers: list[Answer] = field(default_factory=list)
    optima: list[Unlimited] = field(default_factory=list)

    def to_json(self) -> str:
        """Readable, and the same for the same content."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """What `to_json` wrote."""
        data = json.loads(text)
        return cls(
            **{
                **data,
                "points": [Point(**row) for row in data["points"]],
                "answers": [Answer(**row) for row in data["answers"]],
                "optima": [Unlimited(**row) for row in data["optima"]],
            }
        )

    def at(self, budget: int) -> Answer | None:
        """Our answer within exactly that budget."""
        return next((answer for answer in self.answers if answer.budget == budget), None)


# What to compare.


def pareto(points: Iterable[Point]) -> list[Point]:
    """Those that no other beats in peak and recompute time at once, smallest peak first; of equals, one."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak, p.recompute_us)):
        if not front or point.recompute_us < front[-1].recompute_us:
            front.append(point)
    return front


def spread(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` of them, the first and the last included, evenly by position."""
    if len(points) <= most:
        return list(points)
    chosen = {round(i * (len(points) - 1) / (most - 1)) for i in range(most)}
    return [points[i] for i in sorted(chosen)]


def selected(points: Iterable[Point], ceiling: int) -> list[Point]:
    """The points at whose peaks we plan: of each baseline a few of its best, below the ceiling.

    A plan that saves everything has the ceiling as its peak and runs nothing again, so a baseline that
    reaches no less is no rival.
    """
    by_baseline: dict[str, list[Point]] = {}
    for point in points:
        if point.peak < ceiling:
            by_baseline.setdefault(point.baseline, []).append(point)
    return [p for family in by_baseline.values() for p in spread(pareto(family), MOST_POINTS)]


def between(floor: int, ceiling: int, count: int) -> list[int]:
    """`count` budgets, evenly spaced, both ends left out."""
    return [floor + (ceiling - floor) * i // (count + 1) for i in range(1, count + 1)]


def best_within(points: Iterable[Point], peak: int) -> Point | None:
    """The fastest of all baselines that keeps within `peak`."""
    return min((p for p in points if p.peak <= peak), key=lambda p: (p.recompute_us, p.peak), default=None)


def beaten(comparison: Comparison) -> list[tuple[Point, Answer]]:
    """Baseline points that are faster than our plan at their peak; there should be none."""
    found = []
    for point in comparison.points:
        answer = comparison.at(point.peak)
        if answer is not None and (
            answer.recompute_us is None or answer.recompute_us > point.recompute_us * (1 + SLOWER)
        ):
            found.append((point, answer))
    return found


def ratio(ours_us: float | None, theirs_us: float) -> float | None:
    """Ours to theirs; None where there is nothing to divide by, or no plan of ours."""
    return None if ours_us is None or theirs_us <= 0 else ours_us / theirs_us


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Of ratios of ours to theirs; one below LEAST_RATIO counts as that.

    Just below the ceiling we run next to nothing again, and a baseline that still runs much would drown
    all others.
    """
    logs = [math.log(max(r, LEAST_RATIO)) for r in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


# Doing it.


def code_digest() -> str:
    """Identifies the planner and the baselines: the first digits of a SHA-256 of their sources."""
    here = Path(__file__).parent
    sources = [*sorted((ROOT / "planner").rglob("*.py")), here / "baselines.py", here / "checkmate.py"]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def begin(name: str, profile: Profile, graph: Graph) -> Comparison:
    """The comparison with nothing compared yet: floor and ceiling."""
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
    """The points of a baseline, equal ones once."""
    points: dict[tuple[int, float], Point] = {}
    for setting, save_set in BASELINES[baseline](graph).items():
        peak = peak_bytes(*as_run(graph, baseline, setting, save_set))
        point = Point(baseline, setting, peak, recompute_us(graph, save_set))
        points.setdefault((point.peak, point.recompute_us), point)
    return list(points.values())


def answer(profile: Profile, budget: int) -> Answer:
    """Our plan, timed."""
    began, cpu_began = time.perf_counter(), time.process_time()
    try:
        found = plan(profile, budget_bytes=budget, gap=GAP)
    except PlannerError as error:
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        return Answer(budget, None, None, 0.0, type(error).__name__, 0, wall_s, None, cpu_s)
    return Answer(
        budget=budget,
        peak=found.peak,
        recompute_us=found.recompute_us,
        bound_us=found.bound_us,
        stopped=found.stopped.value,
        rounds=found.rounds,
        wall_s=time.perf_counter() - began,
        solver_s=getattr(found, "solver_s", None),
        cpu_s=time.process_time() - cpu_began,
    )


def unlimited(graph: Graph, budget: int) -> Unlimited:
    """Checkmate's optimum, timed."""
    began = time.perf_counter()
    found = checkmate.optimum(graph, budget, time_limit_s=TIME_LIMIT_S)
    wall_s = time.perf_counter() - began
    if found is None or math.isinf(found.recompute_us):
        return Unlimited(budget, None, found.bound_us if found else 0.0, False, wall_s)
    return Unlimited(budget, found.recompute_us, found.bound_us, found.twice, wall_s)


def compare(
    name: str,
    profile: Profile,
    known: Comparison | None = None,
    *,
    baselines: bool = True,
    keep: Callable[[Comparison], None] = lambda _: None,
) -> Comparison:
    """Everything about one profile.

    Args:
        known: what an earlier run found; used if it was of the same profile and the same code.
        baselines: whether to compare at all; if not, only our plans at the budgets between.
        keep: called with what is known after each answer.
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
            except Exception as error:  # noqa: BLE001  # theirs may break on a model; the report names it
                known.failures[baseline] = f"{type(error).__name__}: {error}"
            else:
                known.families[baseline] = time.perf_counter() - began
            keep(known)
    budgets = between(known.floor_found, known.ceiling, BUDGETS)
    for budget in sorted({*budgets, *(p.peak for p in selected(known.points, known.ceiling))}):
        if known.at(budget) is None:
            known.answers.append(answer(profile, budget))
            keep(known)
    if baselines and len(graph.ops) <= checkmate.MOST_OPS:
        done = {optimum.budget for optimum in known.optima}
        for budget in budgets:
            if budget not in done:
                known.optima.append(unlimited(graph, budget))
                keep(known)
    return known


def read_profile(path: Path) -> Profile:
    """A profile as JSON, or as JSON in zstd."""
    content = path.read_bytes()
    return Profile.from_json(
        zstandard.ZstdDecompressor().decompress(content) if path.suffix == ".zst" else content
    )


def load(path: Path) -> Comparison | None:
    """The comparison in a file; None if there is none, or one of another make."""
    try:
        return Comparison.from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError):
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    """The command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.compare")
    parser.add_argument("profile", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--no-baselines", action="store_true", help="only our plans, at eight budgets")
    options = parser.parse_args(arguments)
    logging.getLogger("torch.distributed._tools.sac_ilp").disabled = True  # "no solution" is expected of it

    name = ".".join(options.profile.name.split(".")[:2])
    path: Path = options.out / f"{name}.json"

    def keep(comparison: Comparison) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(comparison.to_json())
        part.replace(path)

    began = time.perf_counter()
    profile = read_profile(options.profile)
    done = compare(name, profile, load(path), baselines=not options.no_baselines, keep=keep)
    print(_summary(done), f"({time.perf_counter() - began:.0f} s)", flush=True)


def _summary(done: Comparison) -> str:
    worst: Any = max((a.gap for a in done.answers), default=0.0)
    slowest = max((a.cpu_s for a in done.answers), default=0.0)
    lost = len(beaten(done))
    return (
        f"{done.name}: {done.ops} ops, {len(done.points)} baseline points, {len(done.answers)} plans, "
        f"beaten {lost} times, worst gap {worst:.2%}, slowest plan {slowest:.1f} s"
    )


if __name__ == "__main__":
    main()
