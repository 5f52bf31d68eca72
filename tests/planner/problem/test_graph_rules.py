"""Check that the validator accepts valid graphs and plans, and names each rule that others break."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import graphs
import pytest
from graph_rules import broken_graph_rules
from graphs import chain
from hypothesis import given, settings
from hypothesis import strategies as st

from autoac.planner import build
from autoac.planner.formats.profile import RECOMPUTED_OP_US
from autoac.planner.problem.graph import Graph, Moment, OpId, VersionId

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=60, derandomize=True, deadline=None)


@few
@given(seeds)
def test_graphs_built_from_profiles_are_valid(seed: int) -> None:
    assert broken_graph_rules(build(graphs.random_profile(random.Random(seed), 8))) == []


def with_op(graph: Graph, **changed: Any) -> Graph:
    return replace(graph, ops=(graph.ops[0], replace(graph.ops[1], **changed), *graph.ops[2:]))


def with_version(graph: Graph, **changed: Any) -> Graph:
    return replace(graph, versions=(replace(graph.versions[0], **changed), *graph.versions[1:]))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda g: with_op(g, id=OpId(7)), "op at position 1 must have the id 1"),
        (lambda g: with_op(g, reads=(VersionId(9),)), "must refer to one of 3 versions, got 9"),
        (lambda g: with_op(g, reads=(VersionId(2),)), "must read versions of earlier ops, got version 2"),
        (lambda g: with_op(g, must_save="pinned", must_recompute=True), "must not be both saved (pinned)"),
        (lambda g: with_op(g, workspace_bytes=-1), "bytes of op1 must not be negative, got -1"),
        (lambda g: with_version(g, readers=()), "version 0 must list op1 as a reader"),
        (
            lambda g: with_version(g, previous=VersionId(1)),
            "version 0 must be in the same storage as version 1",
        ),
        (lambda g: with_version(g, saved_tensors=()), "version 0 must list saved tensor 0"),
        (
            lambda g: replace(g, storages=(replace(g.storages[0], released=Moment(99)), *g.storages[1:])),
            "storage 0 must be released at a moment from 0 to 6, got 99",
        ),
        (
            lambda g: replace(
                g, saved_tensors=(replace(g.saved_tensors[0], dropped=Moment(2)), *g.saved_tensors[1:])
            ),
            "saved tensor 0 must be dropped after step 2, which unpacks it, got 2",
        ),
    ],
)
def test_validator_names_the_broken_rule_of_a_graph(spoil: Callable[[Graph], Graph], words: str) -> None:
    graph = chain(1, 2, 3)
    assert broken_graph_rules(graph) == []
    assert any(words in sentence for sentence in broken_graph_rules(spoil(graph)))


def test_recorded_op_costs_its_host_time_where_no_device_hides_it() -> None:
    found = graphs.step_with_fragments()
    on_cpu = found.environment.model_copy(update={"device_type": "cpu"})
    for profile, more in ((found, 0.0), (found.model_copy(update={"environment": on_cpu}), RECOMPUTED_OP_US)):
        assert all(op.recompute_us == op.runtime_us + more for op in build(profile).ops)
