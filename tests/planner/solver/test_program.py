"""The program is a relaxation of the simulator, and PuLP and the arrays say the same."""

from __future__ import annotations

import random

import graphs
import numpy as np
import oracles
import pulp
import pytest

from autoac.planner import Graph, Stopped, build
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import chain
from autoac.planner.solver.arrays import columns
from autoac.planner.solver.highs import Floats, Program, Rows, solve
from autoac.planner.solver.program import (
    Burst,
    Forward,
    Options,
    Point,
    Work,
    assignment,
    build_program,
)
from autoac.planner.solver.recompute_windows import Facts, facts


def every_point(f: Facts) -> list[Point]:
    graph = f.graph
    points: list[Point] = [Forward(op.id) for op in graph.ops]
    points += [Work(step.id) for step in graph.steps]
    points += [Burst(t, op.id) for t in range(1, f.n_states + 1) for op in graph.ops]
    return points


def activity(program: Program, values: Floats) -> Floats:
    rows = program.rows
    of_row = np.repeat(np.arange(len(rows)), np.diff(rows.starts))
    return np.bincount(of_row, rows.coefficients * values[rows.columns], len(rows))


def small(seed: int) -> Graph:
    return build(graphs.random_profile(random.Random(seed), 6))


@pytest.mark.parametrize("options", [Options(), Options(False, True, False)], ids=["default", "switched"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["few points", "all points"])
def test_every_save_set_satisfies_every_row_with_no_more_than_its_peak(
    options: Options, everywhere: bool
) -> None:
    # This is what makes the solver's bound a bound on every plan.
    for seed in range(60):
        graph = small(seed)
        f = facts(graph, merge=options.merge)
        points = every_point(f)
        if not everywhere:
            points = random.Random(seed).sample(points, min(3, len(points)))
        built = build_program(columns(f), None, points, options=options)
        assert built.peak is not None
        for save_set in oracles.every_save_set(graph):
            values = assignment(f, built, save_set)
            assert (activity(built.program, values) <= built.program.rows.upper + 1e-9).all()
            assert values[built.peak] * built.cost_scale <= peak_bytes(graph, save_set) + 1e-6


def test_with_all_points_the_least_peak_of_most_graphs_is_exact() -> None:
    # Not of all: uses that only saved tensors that are never unpacked hold back are left to the simulator.
    exact = 0
    for seed in range(40):
        graph = small(seed)
        f = facts(graph)
        outcome = solve(build_program(columns(f), None, every_point(f)).program, time_limit_s=30, gap=0.0)
        smallest = oracles.smallest_peak(oracles.peaks_and_times(graph))
        assert outcome.bound <= smallest + 1e-6
        exact += max(outcome.bound, graph.static_bytes + graph.closing_bytes) >= smallest - 1e-6
    assert exact >= 36


def test_the_order_of_columns_and_rows_changes_no_objective() -> None:
    for seed in range(15):
        graph = small(seed)
        f = facts(graph)
        built = build_program(columns(f), None, every_point(f))
        as_is = solve(built.program, time_limit_s=30, gap=0.0)
        mixed = solve(shuffled(built.program, random.Random(seed)), time_limit_s=30, gap=0.0)
        assert mixed.objective == pytest.approx(as_is.objective)


def shuffled(program: Program, rng: random.Random) -> Program:
    n, rows = program.n_columns, program.rows
    to_new = np.array(rng.sample(range(n), n), np.int32)
    to_old = np.argsort(to_new)
    order = rng.sample(range(len(rows)), len(rows))
    spans = [slice(rows.starts[i], rows.starts[i + 1]) for i in order]
    return Program(
        program.costs[to_old],
        program.lower[to_old],
        program.upper[to_old],
        program.integer[to_old],
        Rows(
            np.concatenate([[0], np.cumsum([s.stop - s.start for s in spans])]).astype(np.int32),
            np.concatenate([to_new[rows.columns[s]] for s in spans]).astype(np.int32),
            np.concatenate([rows.coefficients[s] for s in spans]),
            rows.lower[order],
            rows.upper[order],
        ),
    )


def test_pulp_with_its_own_rows_finds_the_same_optimum() -> None:
    graph = build(graphs.dropout())
    f = facts(graph)
    built = build_program(columns(f), 30, every_point(f))
    ours = solve(built.program, time_limit_s=30, gap=0.0)
    problem = built.program.as_pulp()
    problem.solve(pulp.HiGHS(msg=False, threads=1))
    assert ours.stopped is Stopped.OPTIMAL
    assert pulp.value(problem.objective) == pytest.approx(ours.objective)


def test_an_infeasible_program_has_no_candidate_and_an_infinite_bound() -> None:
    f = facts(chain(8, 8))
    outcome = solve(build_program(columns(f), 3, every_point(f)).program, time_limit_s=30, gap=0.0)
    assert (outcome.stopped, outcome.values, outcome.bound) == (Stopped.INFEASIBLE, None, np.inf)


def test_without_time_there_is_no_candidate_and_no_claim() -> None:
    graph = build(graphs.gpt2(4, batch=8, length=512, vocabulary=5000))
    f = facts(graph)
    program = build_program(columns(f), None, [Work(step.id) for step in graph.steps[::4]]).program
    outcome = solve(program, time_limit_s=1e-3, gap=0.0)
    assert outcome.stopped is Stopped.TIME_LIMIT
    assert outcome.values is None


def test_dropout_in_place_and_the_value_that_it_alone_rereads_are_one_decision() -> None:
    graph = build(graphs.dropout())
    f = facts(graph)
    assert f.leader[:4] == (3, 3, 3, 3)
    assert f.cost_us[3] == 9
    assert facts(graph, merge=False).leader[:4] == (0, 1, 2, 3)
