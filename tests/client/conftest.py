"""Let `apply` search little: tests of the client prove gradients and peaks, not the last percent of time.

Use groups depend on measured run times, and the smallest peak depends on them. So a budget that one observed
step names may be too small for the next one. Tests of the client name and plan without them, where that fits;
tests of use groups are in runtime/test_use_groups.py and tests/fuzzers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from ac_client.planning import plan_batch
from autoac.planner import InfeasibleBudget, Plan, Profile, SolverOutOfTime, plan
from autoac.planner.solver.variables import Options
from autoac.tape.runtime.policy_context import active
from autoac.tape.unseen.fingerprints import Comparison


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound the search by work, not by the clock, because measured run times make some plans take long."""

    def searched(profile: Profile, **terms: Any) -> Plan:
        try:
            return plan(profile, gap=0.5, work_limit=3, **terms)
        except SolverOutOfTime:
            return plan(profile, gap=0.5, **terms)

    def quick(profile: Profile, *, progress: object, **terms: Any) -> Plan:  # silent on a busy machine
        try:
            return searched(profile, options=Options(use_groups=False), **terms)
        except InfeasibleBudget as of_once:
            with suppress(InfeasibleBudget):
                return searched(profile, **terms)
            raise of_once from None

    monkeypatch.setattr(plan_batch, "plan", quick)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compile the models of each test from scratch."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def nothing_is_open() -> Iterator[None]:
    """Assert that a test has left each region, mode and pair of hooks."""
    yield
    assert active.region is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture
def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave contents uncompared: a step that compares them takes more memory, and is not judged."""
    monkeypatch.setattr(Comparison, "enabled", False)
