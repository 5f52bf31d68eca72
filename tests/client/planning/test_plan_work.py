"""Check how much a training step waits for its plan."""

from __future__ import annotations

import pytest
import torch

from ac_client.planning import plan_batch
from ac_client.planning.plan_batch import WORK_LIMIT, plan  # before a fixture takes its place
from autoac.planner import bounds, build
from autoac.planner.errors import SolverOutOfTime
from autoac.planner.plan import DEFAULT_WORK_LIMIT
from autoac.planner.solver.time_limit import Allowance
from autoac.profiler import profile
from benchmarks.models.modules import Transformer


def test_step_waits_for_less_work_than_a_plan_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []
    original = Allowance.__init__

    def record(self: Allowance, work_limit: float, *others: object) -> None:
        limits.append(work_limit)
        original(self, work_limit, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Allowance, "__init__", record)
    graph = build(profile(Transformer(), torch.ones(2, 8, 32)))
    plan(graph, budget_bytes=bounds(graph).ceiling - 1)
    assert limits[0] == WORK_LIMIT < DEFAULT_WORK_LIMIT


def test_budget_that_little_work_does_not_reach_is_planned_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[object] = []

    def planned(_profile: object, **terms: object) -> str:
        limits.append(terms.get("work_limit"))
        if len(limits) == 1:
            raise SolverOutOfTime(10, 600.0)
        return "a plan"

    monkeypatch.setattr(plan_batch, "plan_profile", planned)
    assert plan(object(), budget_bytes=10) == "a plan"  # type: ignore[arg-type, comparison-overlap]
    assert limits == [WORK_LIMIT, None]
