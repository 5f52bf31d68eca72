"""Check the words and tables of a plan: layers that decide alike share a row."""

from __future__ import annotations

import random
from dataclasses import replace

import graphs
import pytest
from hypothesis import given, settings

from autoac.planner import Stopped, build, explain, plan
from autoac.planner.memory.schedule import Compute, Free, schedule
from autoac.planner.problem.graph import OpId
from autoac.planner.report import summary
from autoac.planner.report.by_module import (
    Decision,
    OpDecision,
    by_module,
    fold_paths,
    op_decisions,
    rows_in_words,
)
from autoac.planner.units import format_us

laws = settings(max_examples=60, derandomize=True, deadline=None)


def test_plan_for_a_gpu_says_what_the_allocator_reserves() -> None:
    found = plan(graphs.step_with_fragments(), budget_gb=1)
    assert "reserves 68.00 MiB for it, with expandable segments 60.00 MiB." in explain(found)
    assert "reserves" not in explain(plan(graphs.gpt2(1), budget_gb=40))


def test_layers_that_decide_alike_are_one_row_with_the_sums_of_all() -> None:
    ops = []
    for layer in range(4):
        ops.append(OpDecision(f"h.{layer}.mlp/aten.mm.default#0", Decision.SAVED, kept_bytes=8))
        ops.append(OpDecision(f"h.{layer}.mlp/aten.gelu.default#0", Decision.RECOMPUTED, 0, 5, 2.0))
    ops[5] = OpDecision("h.2.mlp/aten.gelu.default#0", Decision.SAVED, kept_bytes=5)
    first, other = by_module(ops)
    assert (first.name, first.modules) == ("h.0-1,3.mlp", ("h.0.mlp", "h.1.mlp", "h.3.mlp"))
    assert (first.keeps, first.recomputes) == (("mm.default",), ("gelu.default",))
    assert (first.kept_bytes, first.recomputed_bytes, first.recompute_us) == (24, 15, 6.0)
    assert (other.name, other.keeps, other.kept_bytes) == ("h.2.mlp", ("mm.default", "gelu.default"), 13)
    assert list(rows_in_words([first])) == [
        "h.0-1,3.mlp (3 modules)",
        "  each keeps mm.default  (8 B, 24 B in all)",
        "  each recomputes gelu.default  (2 us, 6 us in all)",
    ]


def test_occurrence_is_shown_if_a_module_has_several_of_an_op() -> None:
    keys = ["m/aten.mul.Tensor#0", "m/aten.mul.Tensor#1", "m/aten.mm.default#0"]
    (row,) = by_module(OpDecision(key, Decision.SAVED) for key in keys)
    assert row.keeps == ("mul.Tensor#0", "mul.Tensor#1", "mm.default")


def test_lines_of_many_ops_and_of_many_modules_name_the_first_and_count_the_rest() -> None:
    keys = [f"m/aten.mul.Tensor#{i}" for i in range(1000)]
    keys += [f"h.{i}/aten.mm.default#0" for i in range(0, 2000, 2)]
    one, of_mul, several, of_mm = rows_in_words(by_module(OpDecision(key, Decision.SAVED) for key in keys))
    assert (one, of_mm) == ("m", "  each keeps mm.default")
    assert of_mul.startswith("  keeps mul.Tensor#0, mul.Tensor#1, ")
    assert of_mul.endswith(", mul.Tensor#23 and 976 more")
    assert several.startswith("h.0,2,4,")
    assert several.endswith("... (1000 modules)")
    assert len(several) < 150


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a", "b"], ["a", "b"]),
        (["h.0", "h.1", "h.3"], ["h.0-1,3"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"], ["l.0-1.e.0-1"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.0-1.e.0", "l.0.e.1"]),  # never l.0-1.e.0-1
        (["conv1", "conv2"], ["conv1", "conv2"]),  # a number in a name is part of the name
        (["h.0", "h.0.mlp", "h.1"], ["h.0-1", "h.0.mlp"]),
        ([""], [""]),
    ],
)
def test_a_folded_name_spells_its_modules_and_no_other(paths: list[str], names: list[str]) -> None:
    groups = fold_paths(paths, lambda path: "same")
    assert [name for name, _ in groups] == names
    assert sorted(path for _, of_it in groups for path in of_it) == sorted(paths)


@laws
@given(graphs.seeds)
def test_kept_bytes_are_held_when_backward_begins(seed: int) -> None:
    rng = random.Random(seed)
    graph = build(graphs.random_profile(rng))
    save_set = frozenset(OpId(op.id) for op in graph.ops if rng.random() < 0.5)
    n = len(graph.ops)
    live = 0  # at the end of forward
    for event in schedule(graph, save_set):
        match event:
            case Compute(_, nbytes):
                live += nbytes
            case Free(_, nbytes):
                live -= nbytes
            case _:
                break
    rows = op_decisions(graph, save_set)
    kept = sum(row.kept_bytes for row in rows)
    held_anyway = sum(s.nbytes for s in graph.storages if s.versions and s.released > n)
    assert kept <= live <= kept + held_anyway or not graph.steps[0].unpacks
    assert {row.key for row in rows} == {op.name for op in graph.ops}


def test_explanation_of_equal_layers_has_fewer_lines_than_modules() -> None:
    profile = graphs.gpt2(6)
    made = plan(profile, budget_bytes=graphs.between(profile))
    text = explain(made)
    assert "(6 modules)\n  each " in text
    assert len(text.splitlines()) < len(profile.modules)
    assert made.peak_at in text


def test_recompute_time_has_the_range_of_measured_run_times() -> None:
    profile = graphs.gpt2(2)
    times = profile.ops.runtime_us
    made = plan(profile, budget_bytes=graphs.between(profile))
    assert "by the spread" not in explain(made)
    spread = profile.ops.model_copy(update={"spread_us": tuple(us / 10 for us in times)})
    measured = replace(made, profile=profile.model_copy(update={"ops": spread}))
    least, most = format_us(0.9 * made.recompute_us), format_us(1.1 * made.recompute_us)
    assert f"{format_us(made.recompute_us)} ({least} to {most} by the spread" in explain(measured)


def test_gap_of_more_than_five_percent_is_said_in_words() -> None:
    says = summary._proof(100.0, 90.0, 1e6, Stopped.WORK_LIMIT.value)
    assert "a gap of 10.0% of the recompute and 0.00% of the step" in says
    assert "The gap is large" in says
    assert "large" not in summary._proof(100.0, 99.0, 1e6, Stopped.WORK_LIMIT.value)


def test_plan_of_other_run_times_is_not_called_proven() -> None:
    says = summary._proof(1e5, 0.0, 1e6, Stopped.OPTIMAL.value)
    assert "not known" in says
    assert "proven" not in says
    assert "too little of the step" in summary._proof(100.0, 0.0, 1e6, Stopped.OPTIMAL.value)
