"""Check the judge on schedules so small that the answer is seen by eye."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.public import check
from benchmarks.public.check import Violation, judge
from benchmarks.public.step_graph import StepGraph, StepOp, StepValue

# a -> b, then backward ops c (reads b) and d (reads a): 10, 20 and 5 bytes of outputs a, b and c.
CHAIN = StepGraph(
    name="chain",
    source="test",
    ops=(
        StepOp("a", 1, ()),
        StepOp("b", 2, (0,)),
        StepOp("c", 4, (1,)),
        StepOp("d", 8, (0, 2), repeatable=False),
    ),
    values=(StepValue(0, 10), StepValue(1, 20), StepValue(2, 5)),
    forward_ops=2,
    static_bytes=100,
).checked()
SAVE_ALL = [
    ("compute", 0),
    ("compute", 1),
    ("compute", 2),
    ("free", 1),
    ("compute", 3),
    ("free", 0),
    ("free", 2),
]


def under_checkmate(last=0):
    """Return CHAIN under Checkmate's rule, where op d has an output of `last` bytes."""
    values = (*CHAIN.values, StepValue(3, last))
    return StepGraph("chain", "test", CHAIN.ops, values, 2, 100, rule="checkmate").to_json()


AGAIN = [
    *(("compute", 0), ("compute", 1), ("free", 0), ("compute", 2), ("free", 1)),
    *(("compute", 0), ("compute", 3), ("free", 0), ("free", 2)),
]


def test_a_schedule_without_recomputes_takes_the_time_of_the_step():
    assert judge(CHAIN.to_json(), SAVE_ALL) == {"peak_bytes": 135, "us": 15, "again_us": 0}


def test_a_recompute_costs_time_and_its_peak_is_counted():
    assert judge(CHAIN.to_json(), AGAIN) == {"peak_bytes": 130, "us": 16, "again_us": 1}


def test_the_recurrence_holds_until_the_end_of_a_stage_a_value_that_no_op_reads_in_it():
    """The last stage begins with values 0, 1 and 2, runs op 0 again, and counts value 0 twice."""
    events = [*(("compute", op) for op in (0, 1, 2, 0)), ("free", 1), ("compute", 3)]
    assert judge(under_checkmate(last=7), events)["peak_bytes"] == 100 + (10 + 20 + 5) + 10 + 7
    assert judge(under_checkmate(last=7) | {"rule": "step"}, events)["peak_bytes"] == 100 + (10 + 20 + 5) + 10


@pytest.mark.parametrize(
    "events",
    [
        SAVE_ALL[:-3],  # d never runs
        [("compute", 1), *SAVE_ALL],  # not the next first run
        [("compute", 0), ("compute", 1), ("free", 1), ("compute", 2)],  # reads what is not live
        [*SAVE_ALL, ("free", 0)],  # frees what is not live
        [*SAVE_ALL[:5], ("compute", 3), *SAVE_ALL[5:]],  # d is not repeatable
        [("compute", 0), ("compute", 1, [0]), *SAVE_ALL[2:]],  # b is not in place
        [("compute", 7), *SAVE_ALL],
        [("evict", 0), *SAVE_ALL],
    ],
)
def test_a_broken_rule_is_a_violation(events):
    with pytest.raises(Violation):
        judge(CHAIN.to_json(), events)
    if ("compute", 1, [0]) not in events:  # graphs of Checkmate have no in-place ops
        with pytest.raises(Violation):
            judge(under_checkmate(), events)


def test_a_peak_above_the_budget_is_a_violation():
    judge(CHAIN.to_json(), SAVE_ALL, 135)
    with pytest.raises(Violation, match="135"):
        judge(CHAIN.to_json(), SAVE_ALL, 134)


def test_bytes_of_first_runs_recomputes_and_workspace_are_counted():
    ops = (StepOp("a", 1, (), workspace_bytes=3), StepOp("b", 1, (0,), first_bytes=50, before_bytes=20))
    graph = StepGraph("", "", (*ops, StepOp("c", 1, ())), (StepValue(0, 10), StepValue(1, 1)), 1)
    once = [("compute", 0), ("compute", 1), ("compute", 2)]
    again = [("compute", 0), ("free", 0), ("compute", 0), ("compute", 1), ("compute", 2)]
    assert judge(graph.to_json(), once)["peak_bytes"] == 10 + 1 + 50
    assert judge(graph.to_json() | {"static_bytes": 60}, again)["peak_bytes"] == 60 + 10 + 1 + 50
    ops = (ops[0], StepOp("b", 1, (0,), before_bytes=90))
    graph = StepGraph("", "", (*ops, StepOp("c", 1, ())), (StepValue(0, 10), StepValue(1, 1)), 1)
    assert judge(graph.to_json(), again)["peak_bytes"] == 10 + 3 + 90


def test_an_in_place_op_writes_over_the_previous_value_or_into_a_copy():
    values = (StepValue(0, 10), StepValue(1, 10, previous=0))
    graph = StepGraph("", "", (StepOp("a", 1, ()), StepOp("b", 1, (0,))), values, 2, keep=(1,)).to_json()
    assert judge(graph, [("compute", 0), ("compute", 1, [0])])["peak_bytes"] == 10
    assert judge(graph, [("compute", 0), ("compute", 1), ("free", 0)])["peak_bytes"] == 20
    with pytest.raises(Violation):
        judge(graph, [("compute", 0), ("compute", 1, [0]), ("free", 0)])


def test_a_held_value_is_not_freed_early_and_a_kept_one_is_live_at_the_end():
    graph = StepGraph("", "", (StepOp("a", 1, ()), StepOp("b", 1, ())), (StepValue(0, 1, held_until=2),), 2)
    judge(graph.to_json(), [("compute", 0), ("compute", 1), ("free", 0)])
    with pytest.raises(Violation, match="held until"):
        judge(graph.to_json(), [("compute", 0), ("free", 0), ("compute", 1)])
    with pytest.raises(Violation, match="at the end"):
        judge(graph.to_json() | {"keep": [0]}, [("compute", 0), ("compute", 1), ("free", 0)])


def test_the_checker_runs_alone_with_nothing_but_the_standard_library(tmp_path):
    (tmp_path / "check.py").write_text(Path(check.__file__).read_text())
    (tmp_path / "graph.json").write_text(json.dumps(CHAIN.to_json()))
    (tmp_path / "events.json").write_text(json.dumps(AGAIN))
    command = [
        sys.executable,
        "-I",
        "check.py",
        "graph.json",
        "events.json",
    ]  # isolated: no site-packages of ours
    fits, over = (
        subprocess.run([*command, budget], cwd=tmp_path, capture_output=True, text=True, check=False)
        for budget in ("130", "129")
    )
    assert json.loads(fits.stdout) == {"peak_bytes": 130, "us": 16, "again_us": 1}
    assert over.returncode == 1
    assert "129" in over.stderr
