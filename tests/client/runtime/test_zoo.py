"""Test real architectures: results of the plain step, events of the schedule, the predicted peak."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from stepping import Outcome, assert_same, expected_log, step, timed_by_flops
from torch import nn

from autoac.planner import Graph, Policy, bounds, build, find_minimum_peak, plan
from autoac.planner.formats.policy import decisions
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.profiler import profile
from benchmarks.models.tiny import ZOO, ZooModel

pytestmark = pytest.mark.usefixtures("one_thread")

Casting = Callable[[], contextlib.AbstractContextManager[Any]]

CASTINGS: dict[str, Casting] = {
    "fp32": contextlib.nullcontext,
    "bf16 autocast": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the zoo, observed, planned, and trained plainly for a step."""

    entry: ZooModel
    casting: Casting
    profile: Profile
    graph: Graph
    save_set: SaveSet  # the plan's
    policy: Policy  # the plan's
    plain: Outcome
    binds: bool  # True if some plan takes less memory than saving everything

    def step(self, policy: Any) -> Outcome:
        return measured(self.entry, self.casting, self.graph, policy)

    def carry_out(self, save_set: SaveSet) -> Outcome:
        return self.step(self.policy.model_copy(update={"decisions": decisions(self.profile, save_set)}))


def trained(entry: ZooModel) -> nn.Module:
    return entry.make().train()


def measured(entry: ZooModel, casting: Casting, graph: Graph, policy: Any) -> Outcome:
    make = functools.partial(trained, entry)
    return step(make, policy=policy, around=casting, standing=graph.static_bytes, **entry.batch())


@pytest.fixture(
    scope="module",
    params=[(entry, casting) for entry in ZOO for casting in CASTINGS.values()],
    ids=[f"{entry.name}, {casting}" for entry in ZOO for casting in CASTINGS],
)
def subject(one_thread: None, request: pytest.FixtureRequest) -> Subject:
    """Plan at a budget halfway between the plain peak and a peak near the smallest."""
    entry, casting = request.param
    torch.manual_seed(0)
    with casting():
        found = timed_by_flops(profile(trained(entry), **entry.batch()))
    graph = build(found)
    smallest = find_minimum_peak(found, gap=0.3, work_limit=0.3).found
    planned = plan(found, budget_bytes=(smallest + bounds(graph).ceiling) // 2, gap=0.5, work_limit=0.3)
    plain = measured(entry, casting, graph, None)
    binds = smallest < bounds(graph).ceiling
    return Subject(entry, casting, found, graph, planned.save_set, planned.policy(), plain, binds)


def assert_predicted(outcome: Outcome, graph: Graph, save_set: SaveSet) -> None:
    """Check that log and peak equal the schedule's, except for bytes that no visible op allocates.

    `x[0] = 3` is a `fill_` that reads the 3 from a tensor that C++ makes below every dispatch mode. To replay
    the `fill_`, the runtime holds that tensor, 8 bytes for an integer.
    """
    assert outcome.recomputed()
    assert outcome.log.events == expected_log(graph, save_set)
    unseen = 8 * outcome.recomputed().count("aten.fill_.Tensor")
    measured, predicted = outcome.peak, peak_bytes(graph, save_set)
    assert predicted <= measured <= predicted + unseen


def coin(seed: int) -> Callable[..., bool]:
    chance = random.Random(seed)
    probability = chance.choice([0.2, 0.5, 0.8])
    return lambda ctx, out, op, *args, **kwargs: chance.random() < probability


REGIONS: dict[str, Callable[[], Any]] = {
    "recompute all": lambda: "recompute_all",
    **{f"coin {seed}": functools.partial(coin, seed) for seed in range(1)},
}


def test_plain_peak_is_predicted(subject: Subject) -> None:
    measured, predicted = subject.plain.peak, bounds(subject.graph).ceiling
    assert measured == predicted


@pytest.mark.parametrize("region", REGIONS)
def test_region_changes_no_bit(subject: Subject, region: str) -> None:
    outcome = subject.step(REGIONS[region]())
    assert outcome.recomputed()
    assert_same(subject.plain, outcome)


def test_plan_changes_no_bit_and_its_peak_is_predicted(subject: Subject) -> None:
    outcome = subject.step(subject.policy)
    assert_same(subject.plain, outcome)
    if not subject.binds:
        pytest.skip("with this CPU's kernels the peak is one kernel's workspace, whatever is saved")
    assert_predicted(outcome, subject.graph, subject.save_set)


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_any_save_set_changes_no_bit_and_its_peak_is_predicted(subject: Subject, probability: float) -> None:
    chance = random.Random(1)
    drawn = frozenset(OpId(op.id) for op in subject.graph.ops if chance.random() < probability)
    save_set = with_forced_saves(subject.graph, drawn)
    outcome = subject.carry_out(save_set)
    assert_same(subject.plain, outcome)
    assert_predicted(outcome, subject.graph, save_set)
