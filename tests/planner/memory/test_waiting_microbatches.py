"""Plans while other microbatches wait, against brute force over save sets and replays of whole loops."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import graphs
import oracles
import pytest
from fuzzers.random_moves import ANY, random_moves
from graphs import chain
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.test_moves import timed_step

from autoac.planner import Graph, build, find_minimum_peak, plan, simulate
from autoac.planner.formats.profile import LinkRates
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.memory.schedule import Backward, Compute, Free, Recompute, recompute_us, schedule
from autoac.planner.memory.simulate import peak_bytes, waiting_bytes
from autoac.planner.offload import plan_offload
from autoac.planner.problem.graph import SaveSet
from autoac.planner.problem.moves import Link, with_moves

laws = settings(max_examples=40, derandomize=True, deadline=None)


def loop(in_flight: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yield each half of a loop that holds `in_flight` microbatches, as the first stage of 1F1B does."""
    for k in range(microbatches + in_flight - 1):
        if k < microbatches:
            yield "forward", k
        if k >= in_flight - 1:
            yield "backward", k - in_flight + 1


class Microbatch:
    """Replay the events of one microbatch half by half, without knowing of others."""

    def __init__(self, graph: Graph, save_set: SaveSet) -> None:
        self.graph, self.live = graph, 0
        events = list(schedule(graph, save_set))
        begins = next((i for i, e in enumerate(events) if isinstance(e, (Backward, Recompute))), len(events))
        self.halves = {"forward": events[:begins], "backward": events[begins:]}

    def run(self, half: str, held_by_others: int) -> int:
        """Return the most bytes live during a half."""
        graph, most = self.graph, 0
        for event in self.halves[half]:
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


def replayed(graph: Graph, save_set: SaveSet, in_flight: int, microbatches: int) -> int:
    """Return the peak of a whole loop, without the optimizer."""
    batches = [Microbatch(graph, save_set) for _ in range(microbatches)]
    most = 0
    for half, k in loop(in_flight, microbatches):
        others = sum(b.live for i, b in enumerate(batches) if i != k)
        most = max(most, batches[k].run(half, graph.static_bytes + others))
    assert all(batch.live == 0 for batch in batches)
    return most


def small(seed: int, most_ops: int = 6) -> tuple[Graph, random.Random]:
    rng = random.Random(seed)
    return build(graphs.random_profile(rng, most_ops)), rng


@laws
@given(graphs.seeds)
def test_simulated_peak_with_waiting_microbatches_is_the_loops(seed: int) -> None:
    graph, rng = small(seed)
    save_set = rng.choice(list(oracles.every_save_set(graph)))
    for n in (1, 2, 3, 5):
        alone = replace(graph, waiting_microbatches=n - 1, closing_bytes=0)
        assert simulate(alone, save_set).peak.live_bytes == replayed(graph, save_set, n, 5)


def test_simulated_peak_with_moves_is_the_loops() -> None:
    """Nothing that waiting microbatches moved is on the device."""
    moved = 0
    for seed in range(60):
        rng = random.Random(seed)
        graph = timed_step(rng, 8)
        save_set, moves = random_moves(graph, rng, 0.6)
        moving = with_moves(graph, moves, ANY)
        for n in (1, 2, 3, 5):
            alone = replace(moving, waiting_microbatches=n - 1, closing_bytes=0)
            assert simulate(alone, save_set).peak.live_bytes == replayed(moving, save_set, n, 5)
        moved += len(moves)
    assert moved > 30


def test_the_host_holds_what_each_microbatch_moves() -> None:
    graph = chain(8, 8, 8, 8, 1, runtime_us=[10.0] * 5)
    link = LinkRates(out_bytes_per_us=100.0, in_bytes_per_us=100.0, latency_us=0.0)
    high = peak_bytes(replace(graph, waiting_microbatches=2), graph.everything)
    found = [
        plan_offload(
            replace(graph, waiting_microbatches=2),
            budget_bytes=high * 2 // 3,
            link=Link.of(link, host),
            gap=0.0,
        )
        for host in (3 * 16, 3 * 16 - 1)
    ]
    assert [plan.moved_bytes for plan in found] == [16, 8]
    assert all(plan.peak <= high * 2 // 3 for plan in found)


@laws
@given(graphs.seeds, st.integers(1, 4))
def test_plan_is_the_fastest_save_set_whose_loop_fits(seed: int, n: int) -> None:
    graph, rng = small(seed)
    graph = replace(graph, closing_bytes=0)
    table = {
        save_set: (replayed(graph, save_set, n, 2 * n), recompute_us(graph, save_set))
        for save_set in oracles.every_save_set(graph)
    }
    peaks = sorted({peak for peak, _ in table.values()})
    waiting = replace(graph, waiting_microbatches=n - 1)
    ceiling = peak_bytes(waiting, graph.everything)
    budget = rng.choice([peak for peak in peaks if peak < ceiling] or [ceiling]) or 1
    made = plan(waiting, budget_bytes=budget, gap=0.0)
    assert made.recompute_us == pytest.approx(oracles.least_time(table, budget))
    assert made.bound_us == pytest.approx(made.recompute_us)
    assert made.peak <= budget


@laws
@given(graphs.seeds)
def test_minimum_peak_with_waiting_microbatches_is_the_smallest(seed: int) -> None:
    graph, _ = small(seed, 5)
    graph = replace(graph, waiting_microbatches=2)
    found = find_minimum_peak(graph, gap=0.0)
    assert found.found == oracles.smallest_peak(oracles.peaks_and_times(graph))


def test_saved_bytes_of_a_chain_count_once_for_each_microbatch() -> None:
    graph = chain(1, 8, 1, 8, 0)
    assert waiting_bytes(graph, frozenset({0, 2})) == 2
    # Alone 10 at the peak; two more microbatches hold 2 each.
    two_wait = replace(graph, waiting_microbatches=2)
    assert peak_bytes(two_wait, frozenset({0, 2})) == 14
    assert peak_bytes(two_wait, graph.everything) == 18 * 3
    assert sum(h.nbytes for h in live_at_peak(two_wait, frozenset({0, 2}))) == 14
    # With 24 bytes for three microbatches it pays to keep small values only.
    assert plan(two_wait, budget_bytes=24).recompute_us == 2.0
    assert plan(graph, budget_bytes=24).recompute_us == 0.0
