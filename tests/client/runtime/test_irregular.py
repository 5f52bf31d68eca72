"""Test irregular models: the smallest planned peak is at most that of torch's checkpoint."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import pytest
import torch
from stepping import Outcome, assert_same, expected_log, step, timed_by_flops
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoac.planner import Graph, bounds, build, find_minimum_peak, plan
from autoac.planner.formats.policy import decisions
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.profiler import profile
from benchmarks.models.tiny import IRREGULAR, ZooModel

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the zoo, observed, and trained plainly for a step."""

    entry: ZooModel
    profile: Profile
    graph: Graph
    plain: Outcome

    def carry_out(self, save_set: SaveSet) -> Outcome:
        """Run a step under a save set; check that it equals the plain step and follows the schedule."""
        saved = with_forced_saves(self.graph, save_set)
        policy = plan(self.profile, budget_bytes=bounds(self.graph).ceiling).policy()
        policy = policy.model_copy(update={"decisions": decisions(self.profile, saved)})
        standing = self.graph.static_bytes
        outcome = dense(step(self.entry.make, policy=policy, standing=standing, **self.entry.batch()))
        assert_same(self.plain, outcome)
        assert outcome.log.events == expected_log(self.graph, saved)
        return outcome


@pytest.fixture(scope="module", params=IRREGULAR, ids=lambda entry: entry.name)
def subject(one_thread: None, request: pytest.FixtureRequest) -> Subject:
    entry: ZooModel = request.param
    torch.manual_seed(0)
    found = timed_by_flops(profile(entry.make(), **entry.batch()))
    graph = build(found)
    plain = step(entry.make, standing=graph.static_bytes, **entry.batch())
    return Subject(entry, found, graph, dense(plain))


def dense(outcome: Outcome) -> Outcome:
    """Return `outcome` with dense copies of sparse gradients, which can be compared."""
    for name, gradient in outcome.gradients.items():
        if isinstance(gradient, Tensor) and gradient.is_sparse:
            outcome.gradients[name] = gradient.to_dense()
    return outcome


def checkpointed(entry: ZooModel) -> nn.Module:
    """Return the model of `entry` with each of its blocks under torch's checkpoint."""
    model = entry.make()
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def test_plain_peak_is_predicted(subject: Subject) -> None:
    assert subject.plain.peak == bounds(subject.graph).ceiling


def test_smallest_peak_is_reached_and_at_most_that_of_checkpointed_blocks(subject: Subject) -> None:
    found = find_minimum_peak(subject.profile, gap=0.12, work_limit=0.5)
    planned = plan(subject.profile, budget_bytes=found.found, start=[found.save_set], gap=0.5, work_limit=0.2)
    policy = planned.policy()
    standing = subject.graph.static_bytes
    ours = dense(step(subject.entry.make, policy=policy, standing=standing, **subject.entry.batch()))
    assert_same(subject.plain, ours)
    assert ours.log.events == expected_log(planned.graph, planned.save_set)
    make = functools.partial(checkpointed, subject.entry)
    torchs = step(make, standing=subject.graph.static_bytes, **subject.entry.batch())
    assert ours.peak == policy.predicted.peak_bytes
    assert ours.peak <= min(found.found, torchs.peak)


def test_any_save_set_changes_no_bit_and_its_peak_is_predicted(subject: Subject) -> None:
    chance = random.Random(3)
    drawn = frozenset(OpId(op.id) for op in subject.graph.ops if chance.random() < 0.5)
    assert subject.carry_out(drawn).peak == peak_bytes(subject.graph, drawn)
