"""Several passes of backward through one graph: each recomputes afresh, and plans are the fastest."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations

import graphs
import pytest

from autoac.planner import PlannerError, build, plan
from autoac.planner.memory.schedule import recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import Graph, Moment, OpId, SaveSet, StepId
from autoac.planner.problem.passes import with_passes
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.problem.use_groups import later_runs

ROUNDING_US = 1e-6


def with_a_pass_before(graph: Graph, k: int) -> Graph:
    """Return the step in which a pass over the first `k` steps, which drops nothing, comes first."""
    n = len(graph.ops)
    before = [replace(step, drops=()) for step in graph.steps[:k]]
    after = [replace(step, id=StepId(step.id + k)) for step in graph.steps]
    return replace(
        graph,
        steps=(*before, *after),
        saved_tensors=tuple(
            replace(
                saved,
                unpacked=(*(s for s in saved.unpacked if s < k), *(StepId(s + k) for s in saved.unpacked)),
                dropped=Moment(saved.dropped + k * (saved.dropped > n)),
            )
            for saved in graph.saved_tensors
        ),
        storages=tuple(
            replace(s, released=Moment(s.released + k * (s.released > n))) for s in graph.storages
        ),
        pass_ends=(k,),
    )


def save_sets(graph: Graph) -> dict[SaveSet, tuple[int, float]]:
    """Return peak and recompute time of each save set of a graph with passes."""
    later = later_runs(graph)
    first = [op.id for op in graph.ops if op.id not in later and not op.must_save]
    subsets = chain.from_iterable(combinations(first, size) for size in range(len(first) + 1))
    complete = {with_forced_saves(graph, frozenset(subset)) for subset in subsets}
    return {each: (peak_bytes(graph, each), recompute_us(graph, each)) for each in complete}


@pytest.mark.parametrize("seed", range(40))
def test_plan_of_two_passes_is_the_fastest_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    alone = build(graphs.random_profile(rng, rng.choice((5, 6, 7))))
    graph = with_a_pass_before(alone, rng.randint(1, len(alone.steps)))
    table = save_sets(with_passes(graph))
    for budget in rng.sample(peaks := sorted({peak for peak, _ in table.values()}), min(3, len(peaks))):
        least = min(us for peak, us in table.values() if peak <= budget)
        made = plan(graph, budget_bytes=max(budget, 1), gap=0.0)
        assert made.peak <= budget
        assert made.bound_us <= least + ROUNDING_US
        assert made.recompute_us == pytest.approx(least, abs=ROUNDING_US)
        assert table[made.save_set] == (made.peak, made.recompute_us)
    if peaks[0] > 1:
        with pytest.raises(PlannerError):
            plan(graph, budget_bytes=peaks[0] - 1, gap=0.0)


@pytest.mark.parametrize("seed", range(40))
def test_a_second_pass_over_all_does_what_the_first_did(seed: int) -> None:
    alone = graphs.random_graph(seed, 7)
    twice = with_passes(with_a_pass_before(alone, len(alone.steps)))
    later = later_runs(twice)
    first = [op.id for op in twice.ops if op.id not in later]
    rng = random.Random(seed)
    saved = frozenset(op for op in range(len(first)) if rng.random() < 0.4)
    once = recompute_us(alone, frozenset(map(OpId, saved)))
    assert recompute_us(twice, frozenset(first[op] for op in saved)) == pytest.approx(2 * once)
