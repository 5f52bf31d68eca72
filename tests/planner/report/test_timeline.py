"""Check the data of a page: the simulator's bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import drawings
import graphs
import pytest
from graphs import chain
from hypothesis import given, settings
from hypothesis import strategies as st

from autoac.planner import Plan, build, picture, plan, simulate
from autoac.planner.memory.lifetimes import lives
from autoac.planner.memory.simulate import extra_bytes
from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.report.timeline import FETCH, RECOMPUTE, Picture, Track

quick = settings(max_examples=150, derandomize=True, deadline=None)


def planned() -> Plan:
    return drawings.recompute_activations(drawings.small())


@quick
@given(graphs.seeds, st.sampled_from([0.1, 0.5, 0.9]))
def test_live_versions_add_up_at_every_instant(seed: int, share: float) -> None:
    chance = random.Random(seed)
    graph = build(graphs.random_profile(chance, 8))
    save_set: SaveSet = frozenset(OpId(op.id) for op in graph.ops if chance.random() < share)
    timeline = simulate(graph, save_set)
    found = lives(graph, save_set, timeline)
    for i, instant in enumerate(timeline.instants):
        held = sum(life.nbytes for life in found if life.begin <= i < life.end)
        assert (
            graph.static_bytes + held + extra_bytes(graph, timeline.instants[i].event) == instant.live_bytes
        )


def test_overwritten_memory_belongs_to_the_new_version() -> None:
    """Follow one buffer through `x -> empty_like -> bernoulli_ -> div_`."""
    graph = build(graphs.dropout())
    names = {op.id: op.name.partition("/")[2].partition("#")[0] for op in graph.ops}
    timeline = simulate(graph, frozenset())
    found = [(names[graph.versions[life.value].op], life.why) for life in lives(graph, frozenset(), timeline)]
    masks = [(name, why) for name, why in found if name in ("empty_like", "bernoulli_", "div_")]
    assert masks == [
        ("empty_like", "held by forward or Python"),
        ("bernoulli_", "held by forward or Python"),
        ("div_", "held by forward or Python"),
        ("empty_like", "recomputed"),
        ("bernoulli_", "recomputed"),
        ("div_", "recomputed"),
    ]


def live_by_module(drawn: Picture, track: Track, e: int) -> dict[str, int]:
    """Return the sum as the page computes it."""
    found: dict[str, int] = {}
    for op, nbytes, begin, end in zip(
        track.lives.op, track.lives.nbytes, track.lives.begin, track.lives.end, strict=True
    ):
        if begin <= e < end:
            module = drawn.modules[drawn.ops.module[op]]
            found[module] = found.get(module, 0) + nbytes
    return found


def assert_adds_up(drawn: Picture) -> None:
    for track in drawn.tracks:
        for e, live in enumerate(track.live_bytes):
            waiting = track.waiting_bytes[e] if track.waiting_bytes else 0
            standing = sum(nbytes for _, nbytes in drawn.static) + waiting + track.beside_bytes[e]
            assert standing + sum(live_by_module(drawn, track, e).values()) == live, (track.id, e)


def test_at_every_event_the_modules_bytes_add_up_to_what_is_live() -> None:
    assert_adds_up(picture(planned()))


def test_live_bytes_add_up_with_waiting_microbatches() -> None:
    graph = replace(chain(4, 8, 2, 8, static_bytes=3), waiting_microbatches=2)
    made = plan(graph, budget_bytes=simulate(graph, graph.everything).peak.live_bytes - 1)
    drawn = picture(made)
    assert_adds_up(drawn)
    assert set(drawn.tracks[0].waiting_bytes[:-1]) != {0}


def test_peaks_and_times_are_the_plans() -> None:
    made = planned()
    drawn = picture(made)
    first, plain, blocks = drawn.tracks
    assert (first.id, plain.id, blocks.id) == ("plan", "plain", "blocks")
    assert max(first.live_bytes) == first.live_bytes[first.peak] == made.peak
    assert plain.live_bytes[plain.peak] == made.ceiling
    assert blocks.live_bytes[blocks.peak] < made.ceiling
    assert first.end_us == pytest.approx(made.step_us + made.recompute_us)
    assert plain.end_us == pytest.approx(made.step_us)
    assert (drawn.budget_bytes, drawn.peak_at) == (made.budget, made.peak_at)
    assert first.kind.count(RECOMPUTE) == len(made.recompute_set)
    assert sum(layer.recompute_us for layer in drawn.layers) == pytest.approx(made.recompute_us)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_moves_are_drawn_in_the_time_of_the_plan(share: float) -> None:
    made = drawings.moving(share)
    drawn = picture(made)
    first, copies = drawn.tracks[0], drawn.copies
    assert_adds_up(drawn)
    assert bool(made.stall_us) == (share < 1)  # over the link that it was made for, compute never waits
    assert first.recompute_us == pytest.approx(made.recompute_us)
    assert first.end_us == pytest.approx(made.step_us + made.recompute_us + made.stall_us)
    assert sum(copy.stall_us for copy in copies) == pytest.approx(made.stall_us)
    assert sum(copy.nbytes for copy in copies) == made.moved_bytes
    assert {copy.op for copy in copies} == made.moved
    begin_us = (*first.begin_us, first.end_us)
    lives_of: dict[tuple[int, str], set[tuple[float, float]]] = {}
    for op, begin, end, why in zip(
        first.lives.op, first.lives.begin, first.lives.end, first.lives.why, strict=True
    ):
        lives_of.setdefault((op, drawn.reasons[why]), set()).add((begin_us[begin], begin_us[end]))
    for copy in copies:
        made_us, gone_us = zip(*lives_of[copy.op, "until it is on the host"], strict=True)
        fetched_us, dropped_us = zip(*lives_of[copy.op, "fetched from the host"], strict=True)
        assert max(made_us) < copy.host_us[0] <= copy.out_us[0] < copy.out_us[1] <= copy.free_us
        after = min(us - copy.free_us for us in gone_us if us > copy.free_us - 0.01)  # of two digits
        assert after < made.stall_us + 0.01  # the next kernel may have to wait for more
        assert max(fetched_us) - 0.01 < copy.in_us[0] < copy.in_us[1] < max(dropped_us) + 0.01
        assert copy.in_us[1] < copy.host_us[1] <= first.end_us
    assert {op for op, why in lives_of if why.endswith("the host")} == made.moved
    ran = [op for op, kind in zip(first.at, first.kind, strict=True) if kind == RECOMPUTE]
    fetched_ops = [op for op, kind in zip(first.at, first.kind, strict=True) if kind == FETCH]
    assert (set(ran), set(fetched_ops)) == (made.recompute_set, made.moved)
    assert sum(layer.moved_bytes for layer in drawn.layers) == made.moved_bytes
    assert all(layer.kept_bytes == sum(one.kept_bytes for one in layer.modules) for layer in drawn.layers)


def test_equal_save_sets_share_one_track() -> None:
    profile = graphs.gpt2(1, batch=1, length=32, vocabulary=64)
    drawn = picture(plan(profile, budget_gb=100))  # nothing is recomputed, and there is but one block
    assert [track.id for track in drawn.tracks] == ["plan"]


def test_backward_step_is_in_the_module_of_its_forward_op() -> None:
    drawn = picture(planned())
    where = {
        (drawn.labels[label], drawn.modules[module])
        for label, module in zip(drawn.steps.label, drawn.steps.module, strict=True)
    }
    assert ("SoftmaxBackward0", "transformer.h.1.attn") in where
    assert ("AddmmBackward0", "transformer.h.1.mlp.c_fc") in where
    assert ("TanhBackward0", "transformer.h.2.mlp.act") in where
