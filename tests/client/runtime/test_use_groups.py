"""Test plans in which an op is recomputed once for each group of its uses."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
from fuzzers.use_groups import steps, tried_network
from programs import Program, gradients, same
from stepping import EventLog, expected_log, scalar
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

import ac_client
from ac_client import checkpoint, save_recompute_policy
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Policy, build, plan, simulate
from autoac.planner.minimum_peak import WORK_LIMIT, search_minimum_peak
from autoac.planner.problem.graph import OpId
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.problem.use_groups import later_runs, with_use_groups
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance, Stopwatch
from autoac.planner.solver.variables import Options
from autoac.profiler import profile
from autoac.tape.runtime.cursor import Cursor, Route
from benchmarks.models.modules import Block

PROGRAMS = int(os.environ.get("AUTOAC_PROGRAMS", "60"))  # the nightly target runs more


class UNet(nn.Module):
    """Two skip connections, channels that double with each level, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = self.layer(3, 8), self.layer(8, 16)
        self.bottom = nn.Sequential(self.layer(16, 32), nn.Dropout(0.2))
        self.inner_up, self.outer_up = self.layer(32 + 16, 16), self.layer(16 + 8, 8)
        self.head = nn.Conv2d(8, 4, 1)

    @staticmethod
    def layer(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outer = self.outer(x)
        inner = self.inner(F.max_pool2d(outer, 2))
        y = F.interpolate(self.bottom(F.max_pool2d(inner, 2)), scale_factor=2.0)
        y = F.interpolate(self.inner_up(torch.cat([inner, y], 1)), scale_factor=2.0)
        return self.head(self.outer_up(torch.cat([outer, y], 1))).square().mean()


def unet() -> UNet:
    torch.manual_seed(0)
    return UNet()


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
    reason="other convolutions unfold their input, which takes more than all activations together",
)
def test_unet_trains_below_the_smallest_peak_that_it_has_without_use_groups(
    images: torch.Tensor, one_thread: None
) -> None:
    found = profile(unet(), images)
    once = SearchProblem(build(found), Options(use_groups=False))
    least_once = search_minimum_peak(once, Allowance(WORK_LIMIT, Stopwatch(60.0, None), None))
    planned = plan(found, budget_bytes=least_once.proven - 1, gap=0.2)  # infeasible without use groups
    policy = Policy.from_json(planned.policy().to_json())
    assert any("@" in decision for decision in policy.decisions.values())

    model = unet()
    ac_client.apply(model, policy=policy, strict=True)
    plain = steps(unet(), images, found.static.total)
    ours = steps(model, images, found.static.total)
    for expected, step in zip(plain, ours, strict=True):
        assert step.peak == planned.peak
        assert step.log == expected_log(planned.graph, planned.save_set)
        assert all(map(same, expected.tensors, step.tensors))
    assert planned.peak < least_once.proven <= least_once.found


def test_random_networks_under_random_policies_are_exact() -> None:
    found = [tried_network(seed) for seed in range(12)]
    assert sum(bool(one.again) for one in found) > 6
    assert [one for one in found if one.differs] == []


def measured(model: nn.Module, batch: torch.Tensor, policy: object, static: int) -> tuple[EventLog, int]:
    """Return the runtime's log and the allocator's peak of a step under `policy`."""
    log = EventLog()
    with AllocatorTimeline(base=static) as timeline:
        with save_recompute_policy(policy, log=log):
            out = model(batch)
            loss = scalar(out)
        loss.backward()
        del loss
    return log, timeline.peak_bytes


class Pairs(nn.Module):
    """Run each pair of blocks by `outer`, and each of its blocks by `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 4, dropout=0.0) for _ in range(4))
        self.outer: Callable[..., torch.Tensor] = lambda f, x: f(x)
        self.inner = self.outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for a, b in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = self.outer(lambda t, a=a, b=b: self.inner(b, self.inner(a, t)), x)
        return x


def test_nested_checkpoints_have_the_events_and_the_peak_of_use_groups() -> None:
    def made() -> Pairs:
        torch.manual_seed(0)
        return Pairs()

    batch = torch.randn(2, 64, 32)
    found = profile(made(), batch, loss=scalar)
    plain = build(found)
    modules = [found.modules[row] for row in found.ops.module]
    groups: dict[OpId, tuple[OpId, ...]] = {}
    for block in range(4):
        inside = [op for op, name in enumerate(modules) if f"{name}.".startswith(f"blocks.{block}.")]
        # The block's last op packs nothing. The next op packs its input at the position of that last op.
        groups |= {OpId(op): (OpId(len(modules) - 1), OpId(inside[-2])) for op in inside[:-1]}
    graph = with_use_groups(plain, groups)
    outside = (
        op.id for op in graph.ops if ".blocks." not in f".{op.name}" and op.id not in later_runs(graph)
    )
    save_set = with_forced_saves(graph, frozenset(outside))

    model = made()
    model.outer = model.inner = checkpoint
    log, peak = measured(model, batch, CheckpointPolicy.PREFER_SAVE, found.static.total)
    assert log.events == expected_log(graph, save_set)
    assert peak == simulate(graph, save_set).peak.live_bytes
    assert simulate(graph, save_set).peak.live_bytes < simulate(plain, frozenset()).peak.live_bytes


def random_route(seed: int, ops: list[str]) -> Route:
    """Return random decisions and use groups for `ops`, the positions of which may have no use at all."""
    chance = random.Random(seed)
    decisions, groups = {}, {}
    keys = [f"./{op}#{i}" for i, op in enumerate(ops)]
    for i, key in enumerate(keys):
        decisions[key] = "save" if chance.random() < 0.2 else "recompute"
        if decisions[key] == "recompute" and chance.random() < 0.7:
            later = chance.sample(range(i, len(keys)), min(chance.randint(1, 3), len(keys) - i))
            groups[key] = [keys[at] for at in sorted(later, reverse=True)]
            if len(later) > 1:
                decisions[key] = f"recompute@{len(later)}"
    return Route(decisions, groups)


def test_random_programs_with_random_use_groups_have_the_plain_gradients() -> None:
    compared = 0
    for seed in range(PROGRAMS):
        program = Program(seed, random.Random(seed).randint(5, 30))
        plain, log = gradients(program, None), EventLog()
        with save_recompute_policy("must_save_all", log=log):
            gradients(program, None)
        ops = [op for kind, op in log.events if kind == "compute"]
        planned = gradients(program, Cursor(random_route(seed, ops)))
        if isinstance(plain, list):
            assert isinstance(planned, list)
            for a, b in zip(plain, planned, strict=True):
                assert (a is b is None) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
            compared += 1
    assert compared > PROGRAMS / 2
