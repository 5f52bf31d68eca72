"""plan_stage() against brute force over save sets, judged by replaying whole pipelines."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import graphs
import oracles
import pytest
from fuzzers.random_moves import ANY, random_moves
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.test_moves import timed_step

from autoac.planner import (
    Constraints,
    Graph,
    InfeasibleBudget,
    Policy,
    as_planned,
    bounds,
    build,
    find_minimum_peak,
    plan,
    simulate,
)
from autoac.planner.errors import InvalidPipeline
from autoac.planner.formats.profile import LinkRates
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.memory.schedule import Backward, Compute, Free, Recompute, recompute_us, schedule
from autoac.planner.memory.simulate import peak_bytes, waiting_bytes
from autoac.planner.offload import plan_offload
from autoac.planner.pipeline.plan_stages import Stage, plan_stage, plan_stages
from autoac.planner.pipeline.schedules import Schedule, WorkKind, actions, in_flight
from autoac.planner.problem.graph import SaveSet, chain
from autoac.planner.problem.moves import Link, with_moves
from autoac.planner.problem.stage import stage_graph
from autoac.planner.solver.arrays import as_arrays
from autoac.planner.solver.moments import DuringBurst, DuringForward, DuringStep
from autoac.planner.solver.program import assignment, build_program
from autoac.planner.solver.recompute_windows import find_windows
from autoac.planner.units import GIB

seeds = st.integers(0, 2**32 - 1)
laws = settings(max_examples=40, derandomize=True, deadline=None)


class Microbatch:
    """Replay the events of one microbatch half by half, without knowing of others."""

    def __init__(self, graph: Graph, save_set: SaveSet) -> None:
        self.graph, self.live = graph, 0
        events = list(schedule(graph, save_set))
        begins = next((i for i, e in enumerate(events) if isinstance(e, (Backward, Recompute))), len(events))
        self.halves = {WorkKind.FORWARD: events[:begins], WorkKind.BACKWARD: events[begins:]}

    def run(self, kind: WorkKind, held_by_others: int) -> int:
        """Return the most bytes live during a half."""
        graph, most = self.graph, 0
        for event in self.halves[kind]:
            extra = 0
            match event:
                case Compute(op, nbytes):
                    self.live += nbytes
                    extra = graph.ops[op].workspace_bytes + graph.ops[op].extra_bytes
                case Recompute(op, nbytes, step):
                    self.live += nbytes
                    extra = graph.ops[op].workspace_bytes + graph.steps[step].extra_bytes_while_unpacking
                case Backward(step):
                    extra = graph.steps[step].extra_bytes_peak
                case Free(_, nbytes):
                    self.live -= nbytes
            most = max(most, held_by_others + self.live + extra)
        return most


def replayed(graph: Graph, save_set: SaveSet, order: Schedule, stage: int, p: int, m: int) -> int:
    """Return the peak of a stage over a whole step of the pipeline, without the optimizer."""
    batches = [Microbatch(graph, save_set) for _ in range(m)]
    most = 0
    for action in actions(order, stage, p, m):
        others = sum(b.live for k, b in enumerate(batches) if k != action.microbatch)
        most = max(most, batches[action.microbatch].run(action.kind, graph.static_bytes + others))
    assert all(batch.live == 0 for batch in batches)
    return most


def small(seed: int, most_ops: int = 6) -> tuple[Graph, random.Random]:
    rng = random.Random(seed)
    return build(graphs.random_profile(rng, most_ops)), rng


@laws
@given(seeds)
def test_simulated_peak_with_waiting_microbatches_is_the_pipelines(seed: int) -> None:
    graph, rng = small(seed)
    save_set = rng.choice(list(oracles.every_save_set(graph)))
    for order in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        p, m = rng.choice([(1, 3), (2, 4), (3, 5)])
        for stage in range(p):
            others = in_flight(order, stage, p, m) - 1
            alone = replace(graph, waiting_microbatches=others, closing_bytes=0)
            assert simulate(alone, save_set).peak.live_bytes == replayed(graph, save_set, order, stage, p, m)


def test_simulated_peak_with_moves_is_the_pipelines() -> None:
    """Compare with whole pipelines, where nothing that waiting microbatches moved is on the device."""
    moved = 0
    for seed in range(60):
        rng = random.Random(seed)
        graph = timed_step(rng, 8)
        save_set, moves = random_moves(graph, rng, 0.6)
        moving = with_moves(graph, moves, ANY)
        for order in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
            for stage in range(3):
                others = in_flight(order, stage, 3, 5) - 1
                alone = replace(moving, waiting_microbatches=others, closing_bytes=0)
                assert simulate(alone, save_set).peak.live_bytes == replayed(
                    moving, save_set, order, stage, 3, 5
                )
        moved += len(moves)
    assert moved > 30


def test_a_stage_with_a_host_moves_what_its_microbatches_hold() -> None:
    graph = chain(8, 8, 8, 8, 1, runtime_us=[10.0] * 5)
    link = LinkRates(out_bytes_per_us=100.0, in_bytes_per_us=100.0, latency_us=0.0)
    high = peak_bytes(replace(graph, waiting_microbatches=2), graph.everything)
    found = [
        plan_offload(
            replace(graph, waiting_microbatches=2),
            budget_bytes=high * 2 // 3,
            link=Link.of(link, host),
            gap=0.0,
        ).plan
        for host in (3 * 16, 3 * 16 - 1)
    ]
    assert [plan.moved_bytes for plan in found] == [16, 8]
    assert all(plan.peak <= high * 2 // 3 for plan in found)


@laws
@given(seeds, st.integers(1, 4))
def test_plan_stage_is_the_fastest_save_set_whose_pipeline_fits(seed: int, p: int) -> None:
    graph, rng = small(seed)
    graph = replace(graph, closing_bytes=0)
    table = {
        save_set: (
            replayed(graph, save_set, Schedule.ONE_F_ONE_B, 0, p, 2 * p),
            recompute_us(graph, save_set),
        )
        for save_set in oracles.every_save_set(graph)
    }
    peaks = sorted({peak for peak, _ in table.values()})
    ceiling = peak_bytes(replace(graph, waiting_microbatches=p - 1), graph.everything)
    budget = rng.choice([peak for peak in peaks if peak < ceiling] or [ceiling]) or 1
    made = plan_stage(graph, in_flight=p, budget_bytes=budget, gap=0.0)
    assert made.recompute_us == pytest.approx(oracles.least_time(table, budget))
    assert made.bound_us == pytest.approx(made.recompute_us)
    assert made.peak <= budget


@laws
@given(seeds, st.integers(1, 3))
def test_every_save_set_satisfies_the_rows_and_no_bound_exceeds_its_peak(seed: int, others: int) -> None:
    graph, _ = small(seed, 5)
    graph = replace(graph, waiting_microbatches=others)
    windows = find_windows(graph)
    moments = [DuringForward(op.id) for op in graph.ops] + [DuringStep(step.id) for step in graph.steps]
    moments += [DuringBurst(t, op.id) for t in range(1, windows.n_states + 1) for op in graph.ops]
    built = build_program(as_arrays(windows), None, moments)
    for save_set in oracles.every_save_set(graph):
        values = assignment(windows, built, save_set)
        rows = built.program.rows
        assert (rows.activity(values) <= rows.upper + 1e-6).all()
        assert built.peak_column is not None
        assert values[built.peak_column] * built.cost_scale <= peak_bytes(graph, save_set) + 1e-6
        assert bounds(graph).floor <= peak_bytes(graph, save_set)


@laws
@given(seeds)
def test_minimum_peak_with_waiting_microbatches_is_the_smallest(seed: int) -> None:
    graph, _ = small(seed, 5)
    graph = replace(graph, waiting_microbatches=2)
    found = find_minimum_peak(graph, gap=0.0)
    assert found.found == oracles.smallest_peak(oracles.peaks_and_times(graph))


def test_saved_bytes_of_a_chain_count_once_for_each_microbatch() -> None:
    graph = chain(1, 8, 1, 8, 0)
    assert waiting_bytes(graph, frozenset({0, 2})) == 2
    # Alone 10 at the peak; two more microbatches hold 2 each.
    assert peak_bytes(replace(graph, waiting_microbatches=2), frozenset({0, 2})) == 14
    assert peak_bytes(replace(graph, waiting_microbatches=2), graph.everything) == 18 * 3
    assert (
        sum(h.nbytes for h in live_at_peak(replace(graph, waiting_microbatches=2), frozenset({0, 2}))) == 14
    )
    # With 24 bytes for three microbatches it pays to keep small values only.
    assert plan_stage(graph, in_flight=3, budget_bytes=24).recompute_us == 2.0
    assert plan_stage(graph, in_flight=1, budget_bytes=24).recompute_us == 0.0


def test_waiting_microbatches_change_the_best_decision() -> None:
    # a: 4 bytes over all of forward and backward; b: 10 bytes. One microbatch alone keeps both.
    graph = chain(4, 10, runtime_us=[1.0, 5.0])
    kept = {n: plan_stage(graph, in_flight=n, budget_bytes=30).save_set for n in (1, 2, 3)}
    assert kept[1] == kept[2] == graph.everything
    assert peak_bytes(replace(graph, waiting_microbatches=2), kept[3]) <= 30


def test_each_waiting_microbatch_holds_its_own_batch_and_gradients_exist() -> None:
    profile = graphs.gpt2(1)
    static = profile.static.model_copy(update={"inputs": 1000})
    profile = profile.model_copy(update={"static": static})
    graph = stage_graph(profile, 4)
    assert graph.static_bytes == profile.static.total + 3000 + profile.gradient_nbytes
    assert graph.closing_bytes == profile.optimizer_workspace_nbytes
    with pytest.raises(InvalidPipeline, match="got 0"):
        stage_graph(profile, 0)


def test_the_first_stage_of_1f1b_recomputes_more_than_the_last() -> None:
    profiles = [graphs.gpt2(2, vocabulary=1024)] * 3
    ceiling = peak_bytes(stage_graph(profiles[0], 1), build(profiles[0]).everything)
    made = plan_stages(profiles, "1f1b", n_microbatches=6, budget_gb=1.05 * ceiling / 2**30)
    assert [stage.in_flight for stage in made.stages] == [3, 2, 1]
    spent = [stage.plan.recompute_us for stage in made.stages]
    assert spent[0] > spent[1] > spent[2] == 0
    assert made.times.bottleneck == 0
    assert made.times.step_us > made.plain.step_us
    assert made.slowdown > 0
    assert all(stage.plan.peak <= 1.05 * ceiling for stage in made.stages)
    assert made.stages[0].plan.policy().decisions  # a policy can be written for each stage


@pytest.mark.parametrize(
    "options",
    [
        {"in_flight": 1},
        {"in_flight": 3},
        {"in_flight": 2, "beside_bytes": 1 << 20, "constraints": Constraints(extra_static_bytes=999)},
    ],
)
def test_the_plan_of_a_stage_is_rebuilt_from_its_policy(options: dict[str, Any]) -> None:
    profile = graphs.gpt2(2, vocabulary=1024)
    graph = stage_graph(profile, options["in_flight"])
    budget = (bounds(graph).floor + 2 * peak_bytes(graph, graph.everything)) // 3 + (1 << 20)
    made = plan_stage(profile, budget_bytes=budget, **options)
    again = as_planned(Policy.from_json(made.policy().to_json()), profile)
    assert (again.peak, again.peak_at, again.recompute_us) == (made.peak, made.peak_at, made.recompute_us)
    assert again.graph.static_bytes == made.graph.static_bytes


def test_an_infeasible_stage_is_named() -> None:
    profiles = [graphs.gpt2(1, vocabulary=1024)] * 2
    with pytest.raises(InfeasibleBudget) as caught:
        plan_stages(profiles, "gpipe", n_microbatches=64, budget_gb=[0.2, 0.2])
    assert caught.value.__notes__ == ["This is stage 0 of 2, which holds 64 microbatches under gpipe."]
    with pytest.raises(InvalidPipeline, match=r"budget_gb must have one entry .* 2 stages, got 1"):
        plan_stages(profiles, "gpipe", n_microbatches=4, budget_gb=[1.0])


def test_split_backward_with_a_host_needs_the_bytes_between_its_halves() -> None:
    host = Constraints(host_budget_bytes=1 << 30)
    with pytest.raises(InvalidPipeline, match="weight_half_bytes must be given for zb-h1"):
        plan_stages([chain(1, 1, 1)] * 2, "zb-h1", n_microbatches=4, budget_gb=4.0, constraints=host)


def test_weight_half_bytes_count_for_microbatches_that_wait_for_it() -> None:
    profiles = [graphs.gpt2(1, vocabulary=1024)] * 2
    made = plan_stages(
        profiles, "zb-h1", n_microbatches=4, budget_gb=4.0, weight_half_bytes=[1 << 20, 2 << 20]
    )
    assert [(stage.in_flight, stage.waiting_bytes) for stage in made.stages] == [(2, 0), (1, 2 << 20)]
    without = plan_stages(profiles, "zb-h1", n_microbatches=4, budget_gb=4.0)
    assert [stage.in_flight for stage in without.stages] == [2, 2]


def replayed_in_halves(made: Stage, order: str, stage: int, p: int, m: int, half_bytes: int) -> int:
    """Return the peak of a stage whose microbatches hold `half_bytes` from the input half to the other."""
    graph, held, most = made.plan.graph, dict[tuple[int, int], int](), 0
    alone = replace(graph, waiting_microbatches=0, closing_bytes=0)
    static = graph.static_bytes - made.waiting_bytes  # of all chunks
    working = simulate(alone, made.plan.save_set).peak.live_bytes - graph.static_bytes
    for action in actions(order, stage, p, m):
        key = action.chunk, action.microbatch
        others = sum(nbytes for other, nbytes in held.items() if other != key)
        at_work = half_bytes if action.kind is WorkKind.WEIGHT else working
        most = max(most, static + others + at_work)
        held[key] = {
            WorkKind.FORWARD: waiting_bytes(graph, made.plan.save_set),
            WorkKind.INPUT: half_bytes,
            WorkKind.WEIGHT: 0,
        }[action.kind]
    assert not any(held.values())
    return most


def test_a_plan_fits_wherever_other_microbatches_wait_for_either_half() -> None:
    made_for = set()
    for seed in range(60):
        graph, rng = small(seed)
        graph = replace(graph, closing_bytes=0)
        half_bytes = rng.randrange(1, 2 + waiting_bytes(graph, graph.everything))
        order, p, m = rng.choice(["zb-h1", "zb-h2", "zb-v", "zb-v"]), 3, 6
        high = peak_bytes(replace(graph, waiting_microbatches=8), graph.everything)
        for share in (0.5, 0.7, 0.9):
            try:
                made = plan_stages(
                    [graph] * p,
                    order,
                    n_microbatches=m,
                    budget_gb=share * high / GIB,
                    weight_half_bytes=[half_bytes] * p,
                )
            except InfeasibleBudget:
                continue
            for stage, planned in enumerate(made.stages):
                assert replayed_in_halves(planned, order, stage, p, m, half_bytes) <= planned.plan.budget
                made_for.add((order, planned.waiting_bytes > 0))
    assert ("zb-v", True) in made_for  # where not only the most microbatches count


def test_one_microbatch_in_flight_is_a_plain_plan() -> None:
    graph = build(graphs.gpt2(2))
    known = bounds(graph)
    budget = (known.floor + known.ceiling) // 2
    alone = plan(graph, budget_bytes=budget)
    assert plan_stage(graph, in_flight=1, budget_bytes=budget).save_set == alone.save_set
