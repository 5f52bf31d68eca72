"""Check the segments that forward is cut into."""

from __future__ import annotations

import random

import graphs
from graphs import chain

from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.solver.arrays import as_arrays
from autoac.planner.solver.recompute_windows import find_windows
from autoac.planner.solver.start.segments import Segments


def _segments(graph: Graph) -> Segments:
    return Segments(as_arrays(find_windows(graph)))


def test_the_example_of_the_docstring() -> None:
    segments = _segments(chain(4, 4, 4, 4, 4, 4))
    assert segments.within(24) == frozenset()
    assert segments.within(12) == {3}
    assert segments.within(11) is None


def test_smallest_peak_of_a_chain_is_the_optimum() -> None:
    for seed in range(12):
        draw = random.Random(seed)
        graph = chain(*(draw.randint(1, 9) for _ in range(draw.randint(2, 9))))
        every = (SaveSet(i for i in graph.everything if mask >> i & 1) for mask in range(2 ** len(graph.ops)))
        best = min(peak_bytes(graph, save_set) for save_set in every)
        assert min(peak_bytes(graph, save_set) for save_set in _segments(graph).smallest()) == best


def test_save_set_within_a_budget_fits() -> None:
    graph = build(graphs.gpt2(4))
    ceiling = peak_bytes(graph, graph.everything)
    found = [_segments(graph).within(budget) for budget in range(ceiling // 8, ceiling, ceiling // 16)]
    assert any(found)
    for budget, save_set in zip(range(ceiling // 8, ceiling, ceiling // 16), found, strict=True):
        assert save_set is None or peak_bytes(graph, save_set) <= budget
