"""Check which points are compared, and when a plan counts as beaten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import gpt2

from benchmarks.plans import compare
from benchmarks.plans.compare import COMPARISONS, Answer, Comparison, Point

SMALL = gpt2(2, batch=2, length=64, width=48, vocabulary=64)


def point(peak, us, baseline="b"):
    return Point(baseline, f"{peak}", peak, us)


def answered(budget, us, bound=None):
    return Answer(budget, budget, us, us if bound is None else bound, "optimal", 0.1)


EMPTY = Comparison("m", "d", "c", 3, 3, 10.0, 0, 100, 10, 10, 0.0)


def test_a_point_beaten_in_both_peak_and_time_is_not_on_the_front():
    assert compare.pareto([point(5, 9), point(4, 9), point(6, 3), point(7, 3), point(4, 12)]) == [
        point(4, 9),
        point(6, 3),
    ]


@pytest.mark.parametrize(
    ("ours", "lost"), [(4.9, False), (5.0, False), (5.0000001, False), (5.1, True), (None, True)]
)
def test_a_plan_is_beaten_when_it_is_slower_at_the_exact_peak(ours, lost):
    rival = point(50, 5.0)
    done = replace(
        EMPTY, points=[rival, point(60, 0.0)], answers=[replace(answered(50, 5.0), recompute_us=ours)]
    )
    assert [p for p, _ in compare.beaten(done)] == ([rival] if lost else [])


def test_a_second_run_continues_where_the_first_stopped(monkeypatch):
    monkeypatch.setattr(
        compare, "BASELINES", {"per-block checkpoint": compare.BASELINES["per-block checkpoint"]}
    )
    monkeypatch.setattr(compare, "BUDGETS", 3)
    states = []
    done = compare.compare("m", SMALL, keep=lambda c: states.append(COMPARISONS.dump_json(c)))
    assert len(done.answers) >= compare.BUDGETS
    assert not compare.beaten(done)
    halfway = COMPARISONS.validate_json(states[3])
    begun = len(halfway.answers)
    asked = []
    monkeypatch.setattr(
        compare, "answer", lambda profile, budget: asked.append(budget) or answered(budget, 1.0)
    )
    resumed = compare.compare("m", SMALL, halfway)
    assert len(asked) == len(done.answers) - begun
    assert {a.budget for a in resumed.answers} == {a.budget for a in done.answers}


def test_another_profile_or_code_starts_from_the_beginning(monkeypatch):
    monkeypatch.setattr(compare, "BASELINES", {})
    monkeypatch.setattr(compare, "answer", lambda profile, budget: answered(budget, 1.0))
    stale = replace(EMPTY, answers=[answered(1, 1.0)])
    assert compare.compare("m", SMALL, stale).at(1) is None
