"""Check that the validator accepts valid graphs and plans, and names each rule that others break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import graphs
import pytest
from graph_rules import broken_graph_rules
from graphs import chain
from hypothesis import given, settings

from autoac.planner import build
from autoac.planner.formats.profile import RECOMPUTED_OP_US
from autoac.planner.problem.graph import Graph, Moment, OpId, StorageId, VersionId

few = settings(max_examples=60, derandomize=True, deadline=None)


@few
@given(graphs.seeds)
def test_graphs_built_from_profiles_are_valid(seed: int) -> None:
    assert broken_graph_rules(graphs.random_graph(seed, 8)) == []


def with_op(graph: Graph, **changed: Any) -> Graph:
    return replace(graph, ops=(graph.ops[0], replace(graph.ops[1], **changed), *graph.ops[2:]))


def with_first(graph: Graph, column: str, **changed: Any) -> Graph:
    first, *others = getattr(graph, column)
    return replace(graph, **{column: (replace(first, **changed), *others)})


def with_version(graph: Graph, **changed: Any) -> Graph:
    return with_first(graph, "versions", **changed)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda g: with_op(g, id=OpId(7)), "each part has its position as its id"),
        (lambda g: with_op(g, reads=(VersionId(9),)), "each reference leads to a part"),
        (lambda g: with_op(g, reads=(VersionId(2),)), "ops read versions of earlier ops"),
        (lambda g: with_op(g, must_save="pinned", must_recompute=True), "no op is both saved and recomputed"),
        (lambda g: with_op(g, workspace_bytes=-1), "no bytes are negative"),
        (lambda g: with_version(g, readers=()), "versions list their readers"),
        (lambda g: with_version(g, op=OpId(2)), "versions name their op"),
        (lambda g: with_version(g, previous=VersionId(1)), "ops read what they write over"),
        (lambda g: with_version(g, storage=StorageId(1)), "versions follow each other in their storage"),
        (lambda g: with_version(g, saved_tensors=()), "versions list their saved tensors"),
        (lambda g: with_first(g, "storages", released=Moment(99)), "storages are released within the step"),
        (
            lambda g: with_first(g, "saved_tensors", dropped=Moment(2)),
            "saved tensors are dropped after they are unpacked",
        ),
        (lambda g: with_first(g, "saved_tensors", unpacked=()), "steps list what they unpack"),
        (lambda g: with_first(g, "saved_tensors", dropped=Moment(5)), "steps drop at their end"),
    ],
)
def test_validator_names_the_broken_rule_of_a_graph(spoil: Callable[[Graph], Graph], rule: str) -> None:
    graph = chain(1, 2, 3)
    assert broken_graph_rules(graph) == []
    assert rule in broken_graph_rules(spoil(graph))


def test_recorded_op_costs_its_host_time_where_no_device_hides_it() -> None:
    found = graphs.step_with_fragments()
    on_cpu = found.environment.model_copy(update={"device_type": "cpu"})
    for profile, more in ((found, 0.0), (found.model_copy(update={"environment": on_cpu}), RECOMPUTED_OP_US)):
        assert all(op.recompute_us == op.runtime_us + more for op in build(profile).ops)
