"""Check how much a training step waits for its plan, and what is said meanwhile."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from ac_client.planning import plan_batch
from ac_client.planning.plan_batch import PlanNotice, plan, waiting_work  # before a fixture takes its place
from autoac.planner import Profile, Progress, bounds, build
from autoac.planner.errors import SolverOutOfTime
from autoac.planner.plan import DEFAULT_WORK_LIMIT, FLOOR_SHARE
from autoac.planner.solver.time_limit import Allowance
from autoac.profiler import profile
from benchmarks.models.modules import Transformer


@pytest.fixture(scope="module")
def step() -> Profile:
    return profile(Transformer(), torch.ones(2, 8, 32))


def lasting(step: Profile, seconds: float) -> Profile:
    n = len(step.ops)
    ops = step.ops.model_copy(update={"runtime_us": (seconds * 1e6 / n,) * n})
    n = len(step.backward)
    backward = step.backward.model_copy(update={"runtime_us": (0.0,) * n})
    return step.model_copy(update={"ops": ops, "backward": backward})


def test_plan_takes_the_time_of_twenty_steps_or_two_seconds(step: Profile) -> None:
    assert waiting_work(lasting(step, 0.01)) == 2.0
    assert waiting_work(lasting(step, 1.0)) == pytest.approx(20.0)
    assert waiting_work(lasting(step, 100.0)) == DEFAULT_WORK_LIMIT


def test_step_waits_for_less_work_than_a_plan_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, step: Profile
) -> None:
    limits: list[float] = []
    original = Allowance.__init__

    def record(self: Allowance, work_limit: float, *others: object) -> None:
        limits.append(work_limit)
        original(self, work_limit, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Allowance, "__init__", record)
    plan(step, budget_bytes=bounds(build(step)).ceiling - 1, progress=PlanNotice("model"))
    assert limits[0] == waiting_work(step) < DEFAULT_WORK_LIMIT


def test_budget_that_little_work_does_not_reach_is_planned_with_more(
    monkeypatch: pytest.MonkeyPatch, step: Profile, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[object] = []

    def planned(_profile: object, **terms: object) -> str:
        limits.append(terms.get("work_limit"))
        if len(limits) == 1:
            raise SolverOutOfTime(10, 600.0)
        return "a plan"

    monkeypatch.setattr(plan_batch, "plan_profile", planned)
    assert plan(step, budget_bytes=10, progress=PlanNotice("model")) == "a plan"  # type: ignore[comparison-overlap]
    assert limits == [waiting_work(step), None]
    assert "the search goes on" in caplog.text
    limits.clear()
    with pytest.raises(SolverOutOfTime):  # one share of a device of several
        plan(step, budget_bytes=10, progress=PlanNotice("model", brief=True))
    assert limits == [waiting_work(step) / FLOOR_SHARE]


def test_notice_comes_after_two_seconds_and_then_every_ten(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    notice = PlanNotice("model: planning 241 ops", clock=lambda: now[0])
    notice.most_s = 20.0
    said = []
    for second in range(25):
        now[0] = float(second)
        notice(Progress(100.0, 90.0, 0.1 if second > 5 else math.inf, 0.0))
        said.append(len(caplog.messages))
    assert [second for second in range(1, 25) if said[second] > said[second - 1]] == [2, 12, 22]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert caplog.messages[0] == "model: planning 241 ops: no plan yet, at most about 18 s of CPU time more"
    assert "gap of the best plan 10.0%" in caplog.messages[1]
