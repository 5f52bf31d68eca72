"""Let `apply` search little: tests of the client prove gradients and peaks, not the last percent of time."""

from __future__ import annotations

from typing import Any

import pytest

from ac_client.planning import plan_batch
from autoac.planner import Plan, Profile, SolverOutOfTime, plan
from autoac.tape.unseen.fingerprints import Comparison


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound the search by work, not by the clock, because measured run times make some plans take long."""

    def quick(profile: Profile, *, progress: object, **terms: Any) -> Plan:  # silent on a busy machine
        try:
            return plan(profile, gap=0.5, work_limit=3, **terms)
        except SolverOutOfTime:
            return plan(profile, gap=0.5, **terms)

    monkeypatch.setattr(plan_batch, "plan", quick)


@pytest.fixture
def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave contents uncompared: a step that compares them takes more memory, and is not judged."""
    monkeypatch.setattr(Comparison, "enabled", False)
