"""Check that the program is a relaxation of the simulator, and that PuLP reads it the same way."""

from __future__ import annotations

import random
import subprocess
import sys

import graphs
import numpy as np
import oracles
import pytest
from graphs import chain

from autoac.planner import Graph, InfeasibleBudget, Stopped, build, find_minimum_peak, plan
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import OpId
from autoac.planner.problem.use_groups import with_use_groups
from autoac.planner.solver.arrays import as_arrays
from autoac.planner.solver.highs import solve
from autoac.planner.solver.moments import ConstrainedMoment, DuringBurst, DuringForward, DuringStep
from autoac.planner.solver.program import assignment, build_program
from autoac.planner.solver.recompute_windows import NEVER, Role, Windows, find_windows
from autoac.planner.solver.variables import Options


def every_moment(windows: Windows) -> list[ConstrainedMoment]:
    graph = windows.graph
    moments: list[ConstrainedMoment] = [DuringForward(op.id) for op in graph.ops]
    moments += [DuringStep(step.id) for step in graph.steps]
    moments += [DuringBurst(t, op.id) for t in range(1, windows.n_states + 1) for op in graph.ops]
    return moments


def small(seed: int, *, with_groups: bool = False) -> Graph:
    rng = random.Random(seed)
    graph = build(graphs.random_profile(rng, 5 if with_groups else 6))
    return with_use_groups(graph, groups_at_random(graph, rng)) if with_groups else graph


def groups_at_random(graph: Graph, rng: random.Random) -> dict[OpId, tuple[OpId, ...]]:
    groups = {}
    for op in graph.ops:
        storages = [graph.storages[graph.versions[w].storage] for w in op.writes]
        never_alone = not storages or any(len(storage.versions) > 1 for storage in storages)
        if not (op.must_save or never_alone) and rng.random() < 0.5 and len(groups) < 2:
            positions = range(op.id, len(graph.ops))
            chosen = rng.sample(positions, min(len(positions), rng.randint(2, 3)))
            groups[op.id] = tuple(OpId(position) for position in sorted(chosen, reverse=True))
    return groups


def assert_relaxes(windows: Windows, moments: list[ConstrainedMoment], options: Options) -> None:
    """Assert that the rows allow each save set with its peak, so that bounds hold for every plan."""
    built = build_program(as_arrays(windows), None, moments, options=options)
    assert built.peak_column is not None
    for save_set in oracles.every_save_set(windows.graph):
        values, rows = assignment(windows, built, save_set), built.program.rows
        assert (rows.activity(values) <= rows.upper + 1e-9).all()
        assert values[built.peak_column] * built.cost_scale <= peak_bytes(windows.graph, save_set) + 1e-6


@pytest.mark.parametrize("options", [Options(), Options(False, True, False)], ids=["default", "switched"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["few moments", "all moments"])
def test_every_save_set_satisfies_every_row_with_at_most_its_peak(options: Options, everywhere: bool) -> None:
    for seed in range(60):
        windows = find_windows(small(seed), merge_followers=options.merge_followers)
        moments = every_moment(windows)
        if not everywhere:
            moments = random.Random(seed).sample(moments, min(3, len(moments)))
        assert_relaxes(windows, moments, options)


def test_every_save_set_with_use_groups_satisfies_every_row() -> None:
    # Of an op with several runs, outputs may be kept from any run to any later one.
    count = 0
    for seed in range(110):
        windows = find_windows(graph := small(seed, with_groups=True))
        if graph.runs and not any(windows.role[run] is Role.UNUSED for row in graph.runs for run in row):
            count += 1
            assert_relaxes(windows, every_moment(windows), Options())
    assert count > 10


@pytest.mark.parametrize("seed", [2664, 3709])
def test_smallest_peak_with_use_groups_is_a_budget_that_is_planned(seed: int) -> None:
    # A run that serves a later run alone would have a smaller peak, and no row describes it.
    graph = small(seed, with_groups=True)
    smallest = find_minimum_peak(graph).found
    assert smallest == min(peak_bytes(graph, save_set) for save_set in oracles.every_save_set(graph))
    found = plan(graph, budget_bytes=smallest, gap=0.0)
    assert found.peak == smallest
    assert found.gap == 0
    with pytest.raises(InfeasibleBudget):
        plan(graph, budget_bytes=smallest - 1)


def test_least_peak_of_most_graphs_is_exact_with_all_moments() -> None:
    # Not of all: uses that only saved tensors that are never unpacked hold back are left to the simulator.
    exact = 0
    for seed in range(40):
        graph = small(seed)
        windows = find_windows(graph)
        outcome = solve(
            build_program(as_arrays(windows), None, every_moment(windows)).program, time_limit_s=30, gap=0.0
        )
        smallest = oracles.smallest_peak(oracles.peaks_and_times(graph))
        assert outcome.bound <= smallest + 1e-6
        exact += max(outcome.bound, graph.static_bytes + graph.closing_bytes) >= smallest - 1e-6
    assert exact >= 36


def test_an_infeasible_program_has_no_candidate_and_an_infinite_bound() -> None:
    windows = find_windows(chain(8, 8))
    outcome = solve(
        build_program(as_arrays(windows), 3, every_moment(windows)).program, time_limit_s=30, gap=0.0
    )
    assert (outcome.stopped, outcome.values, outcome.bound) == (Stopped.INFEASIBLE, None, np.inf)


def test_solve_without_time_has_neither_a_candidate_nor_a_bound() -> None:
    graph = build(graphs.gpt2(4, batch=8, length=512, vocabulary=5000))
    windows = find_windows(graph)
    program = build_program(
        as_arrays(windows), None, [DuringStep(step.id) for step in graph.steps[::4]]
    ).program
    outcome = solve(program, time_limit_s=1e-3, gap=0.0)
    assert outcome.stopped is Stopped.TIME_LIMIT
    assert outcome.values is None


def test_worked_example_of_the_documentation() -> None:
    # recompute_windows.py, arrays.py, variables.py, memory_constraints.py and program.py show these numbers.
    tape = graphs.Tape()
    (a,) = tape.op("a", [], 4, us=4)
    (b,) = tape.op("b", [a], 6, us=1)
    (c,) = tape.op("c", [b], 2, us=4)
    (d,) = tape.op("d", [c], 3, us=1)
    saved = [tape.save(v) for v in (a, c, d)]
    for step, saved_tensor in zip("dca", reversed(saved), strict=True):
        tape.step(step, [saved_tensor])
    windows = find_windows(build(tape.profile()))
    assert windows.earliest == (1, 1, 1, 1)
    assert windows.latest == (3, 2, 2, 1)
    assert windows.first_needed == (3, NEVER, 2, 1)
    assert windows.leader == (0, 2, 2, 3)
    assert windows.cost_us == (4, 0, 5, 1)
    arrays = as_arrays(windows)
    assert arrays.row.tolist() == [0, 1, 1, 2]
    assert list(zip(arrays.edge_op, arrays.edge_source, strict=True)) == [(1, 0), (2, 1)]
    moments = [DuringStep(0), DuringStep(1), DuringBurst(1, 1)]
    built = build_program(arrays, 9, moments, options=Options(dense_share=1.0, sparse_stride=1))
    names = ["1", "s_a", "s_c", "s_d", "x_a1", "x_a2", "x_c1"]
    assert built.program.n_columns == len(names)
    assert built.program.costs[1:4].tolist() == [-4, -5, -1]
    rows = built.program.rows
    lines = [
        dict(zip(np.array(names)[rows.columns[s]].tolist(), rows.coefficients[s].tolist(), strict=True))
        for s in (slice(i, j) for i, j in zip(rows.starts, rows.starts[1:], strict=False))
    ]
    assert list(zip(lines, rows.upper.tolist(), strict=True)) == [
        ({"s_a": 4, "s_c": 2, "x_a1": 4, "x_c1": 2}, 9 - 3),
        ({"s_a": 4, "x_a2": 4}, 9 - 2),
        ({"s_a": 4, "s_c": 2, "s_d": 3, "x_a1": 4, "x_c1": 6}, 9),
        ({"x_a1": 1, "x_a2": -1}, 0),
        ({"s_a": 1, "x_a2": 1}, 1),
        ({"s_c": 1, "x_c1": 1}, 1),
        ({"s_a": -1, "x_a1": -1, "x_c1": 1}, 0),
        ({"s_a": -1, "s_c": -1, "x_a2": -1}, -1),
        ({"s_c": -1, "s_d": -1, "x_c1": -1}, -1),
    ]


def test_in_place_ops_of_a_dropout_mask_are_one_decision() -> None:
    graph = build(graphs.dropout())
    windows = find_windows(graph)
    assert windows.leader[:4] == (3, 3, 3, 3)
    assert windows.cost_us[3] == 9
    assert find_windows(graph, merge_followers=False).leader[:4] == (0, 1, 2, 3)


def test_solver_that_prints_as_it_is_first_made_leaves_stdout_clean() -> None:
    """HiGHS 1.16 prints two lines from C, past sys.stdout, whatever its options say."""
    code = (
        "import highspy, os\n"
        "class Loud(highspy.Highs):\n"
        "    made = 0\n"
        "    def __init__(self):\n"
        "        if not Loud.made: os.write(1, b'Running HiGHS')\n"
        "        Loud.made += 1\n"
        "        super().__init__()\n"
        "highspy.Highs = Loud\n"
        "files = sorted(os.listdir('/proc/self/fd'))\n"
        "import autoac.planner.solver.highs\n"
        "assert sorted(os.listdir('/proc/self/fd')) == files\n"
        "os.write(1, str(Loud.made).encode())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1"
