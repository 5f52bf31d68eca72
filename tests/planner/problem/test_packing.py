"""Test the third way to hold a version: packed."""

from __future__ import annotations

from dataclasses import replace

from autoac.planner import plan
from autoac.planner.memory.schedule import Compute, Free, Recompute, recompute_us, schedule
from autoac.planner.memory.simulate import peak_bytes, simulate
from autoac.planner.problem.graph import Graph, OpId, Packable, VersionId, chain
from autoac.planner.problem.packing import with_packing, worth_packing
from autoac.planner.problem.save_sets import without_cost_free_recomputes
from autoac.planner.problem.validate import broken_graph_rules

# op1 writes 8 bytes that fit in 1; packing takes 1 us and unpacking 0.5, recomputing 6.
STEP = replace(
    chain(4, 8, 4, 4, runtime_us=[4, 6, 1, 1], static_bytes=1),
    packable=(Packable(VersionId(1), 1, 1.0, 0.5),),
)
GRAPH = with_packing(STEP, worth_packing(STEP))
OP0, OP1, BITS, UNPACK, OP2, OP3 = map(OpId, range(6))
OTHERS = frozenset({OP0, OP2, OP3})


def named(graph: Graph, save_set: frozenset[OpId]) -> list[str]:
    short = {Compute: "run", Recompute: "again", Free: "free"}
    return [
        f"{short[type(event)]} {graph.ops[event.op].name if not isinstance(event, Free) else event.version}"
        for event in schedule(graph, save_set)
        if type(event) in short
    ]


def test_graph_with_packing_is_valid_and_has_two_more_ops() -> None:
    assert [op.name for op in GRAPH.ops] == ["op0", "op1", "/op1@bits", "/op1@unpack", "op2", "op3"]
    assert not broken_graph_rules(GRAPH)


def test_packed_version_is_held_as_bits_and_unpacked_once() -> None:
    events = named(GRAPH, OTHERS | {BITS})
    assert "again /op1@unpack" in events
    assert "again op1" not in events
    assert recompute_us(GRAPH, OTHERS | {BITS}) == 1.5
    saved_us, again_us = recompute_us(GRAPH, OTHERS | {UNPACK}), recompute_us(GRAPH, OTHERS)
    assert (saved_us, again_us) == (0, 6)
    # When backward begins: 1 static byte, ops 0, 2 and 3 with 12, and the version, its bits, or nothing.
    at_turn = [
        next(i.live_bytes for i in simulate(GRAPH, OTHERS | {op}).instants if i.moment == len(GRAPH.ops))
        for op in (UNPACK, BITS, OP0)
    ]
    assert at_turn == [21, 14, 13]


def test_without_packing_the_step_is_the_plain_one() -> None:
    old_id = {OP0: 0, OP1: 1, OP2: 2, OP3: 3}
    for chosen in ({OP0}, {OP0, OP1}, {OP2}, {OP0, OP2, OP3}, {OP1}, set()):
        plain = frozenset(OpId(old_id[op]) for op in chosen)
        assert peak_bytes(GRAPH, frozenset(chosen)) == peak_bytes(STEP, plain)
        assert recompute_us(GRAPH, frozenset(chosen)) == recompute_us(STEP, plain)


def test_completing_a_save_set_packs_nothing() -> None:
    completed = without_cost_free_recomputes(GRAPH, {OP0})
    assert not completed & {OP1, BITS, UNPACK}


def test_version_that_python_holds_or_that_must_be_saved_is_not_packed() -> None:
    held = replace(STEP.storages[1], released=STEP.end)
    pinned = replace(STEP.ops[1], must_save="pinned")
    for other in (
        replace(STEP, storages=(STEP.storages[0], held, *STEP.storages[2:])),
        replace(STEP, ops=(STEP.ops[0], pinned, *STEP.ops[2:])),
        replace(STEP, packable=(Packable(VersionId(1), 8, 1.0, 0.5),)),
    ):
        assert not worth_packing(other)


def test_plan_packs_where_the_version_does_not_fit_and_recomputing_takes_longer() -> None:
    found = {budget: plan(STEP, budget_bytes=budget, gap=0.0) for budget in (21, 20, 19)}
    assert [len(one.graph.packs) for one in found.values()] == [0, 1, 1]
    assert [one.recompute_us for one in found.values()] == [0, 1.5, 1.5]
    dear = replace(STEP, packable=(Packable(VersionId(1), 1, 9.0, 0.5),))
    assert not plan(dear, budget_bytes=20, gap=0.0).graph.packs
