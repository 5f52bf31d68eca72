"""Run every planner on every graph and budget, and have the checker judge each schedule."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from benchmarks.public.check import Violation, judge
from benchmarks.public.instances import Instance
from benchmarks.public.lower_bound import least_again_us
from benchmarks.public.planners import checkmate_program, eviction, published
from benchmarks.public.planners.ours import ours
from benchmarks.public.planners.save_sets import SAVE_SET_PLANNERS
from benchmarks.public.step_graph import NoSchedule, Planner, StepGraph

OURS, PUBLISHED, CHECKMATE = "ours", "published", "Checkmate, HiGHS"
STATED = "stated"  # not a planner: the authors' figure for a schedule that was not given
BOUND = "bound"  # not a planner either: no schedule takes less
REFERENCES = (PUBLISHED, CHECKMATE)  # programs with hours or with full freedom, not everyday tools
ONLINE = {"DTR": eviction.dtr, "LRU": eviction.lru}


@dataclass(frozen=True, slots=True)
class Row:
    """One planner on one graph within one budget, judged."""

    graph: str
    source: str
    ops: int
    step_us: float
    budget: int
    planner: str
    again_us: float | None  # time of recomputes; None: no schedule, and `note` says why
    peak: int | None
    note: str
    cpu_s: float
    violation: bool = False

    @property
    def extra(self) -> float | None:
        """Return the time of recomputes as a fraction of the step, or None without a schedule."""
        return None if self.again_us is None else self.again_us / self.step_us


def planners(instance: Instance, cap_s: float) -> dict[str, Planner]:
    """Return all planners by their names on the page. To add one, add a line here."""
    return {
        OURS: ours,
        PUBLISHED: published.replay(instance.solutions),
        CHECKMATE: checkmate_program.with_cap(cap_s),
        **ONLINE,
        **SAVE_SET_PLANNERS,
    }


def rows_of(instance: Instance, cap_s: float) -> Iterator[Row]:
    """Yield a row for each budget and planner.

    Checkmate's recurrence frees a value only right after an op reads it. Online planners evict at any time,
    so they are judged by the rules of a step on its graphs too. These rules are more lenient.
    """
    graph = instance.graph
    data = graph.to_json()
    for budget in instance.budgets:
        for name, planner in planners(instance, cap_s).items():
            rules = data | {"rule": "step"} if name in ONLINE else data
            result: dict[str, float] | None = None
            note, violation = "", False
            began = _cpu_s()
            try:
                events = planner(graph, budget)
                spent = _cpu_s() - began
                result = judge(rules, events, budget)
            except NoSchedule as reason:
                note = str(reason)
            except Violation as broken:
                note, violation = str(broken), True
            except Exception as error:  # noqa: BLE001  # a planner may fail on a graph; the page names it
                note = f"failed: {type(error).__name__}: {error}"
            if result is None:
                spent = _cpu_s() - began
            again_us, peak = (result["again_us"], int(result["peak_bytes"])) if result else (None, None)
            yield row_of(graph, budget, name, again_us, peak, note, spent, violation=violation)
        yield _bound(graph, budget)
        yield from _stated(instance, budget)


def row_of(
    graph: StepGraph,
    budget: int,
    planner: str,
    again_us: float | None,
    peak: int | None = None,
    note: str = "",
    cpu_s: float = 0.0,
    *,
    violation: bool = False,
) -> Row:
    """Return the row of a planner on a graph."""
    of_graph = (graph.name, graph.source, len(graph.ops), graph.us)
    return Row(*of_graph, budget, planner, again_us, peak, note, cpu_s, violation)


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _bound(graph: StepGraph, budget: int) -> Row:
    began = _cpu_s()
    least_us = least_again_us(graph, budget)
    fits = math.isfinite(least_us)
    note = "" if fits else "no schedule fits"
    return row_of(graph, budget, BOUND, least_us if fits else None, None, note, _cpu_s() - began)


def _stated(instance: Instance, budget: int) -> Iterator[Row]:
    """Yield what authors state for a schedule that was not given, so that it could not be judged."""
    graph = instance.graph
    for p in graph.published:
        if p.budget == budget and (graph.name, budget) not in instance.solutions:
            note = "stated" + (", optimal" if p.optimal else "")
            yield row_of(graph, budget, STATED, p.us - graph.us, None, note)


def run_one(make: Callable[[], list[Instance]], cap_s: float) -> list[Row]:
    """Return the rows of one source of graphs."""
    warnings.simplefilter("ignore")  # torch's and PuLP's, of baselines
    logging.getLogger("torch.distributed._tools.sac_ilp").disabled = True  # "no solution" for some fractions
    return [row for instance in make() for row in rows_of(instance, cap_s)]


def run_all(
    sources: Sequence[tuple[str, Callable[[], list[Instance]]]], cap_s: float, processes: int
) -> Iterator[Row]:
    """Yield the rows of all sources, which run in `processes` processes."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        results = [(name, pool.submit(run_one, make, cap_s)) for name, make in sources]
        for name, result in results:
            rows = result.result()
            print(f"{name}: {len(rows)} rows, {sum(row.cpu_s for row in rows):.0f} CPU seconds", flush=True)
            yield from rows
