"""Test plans in which an op is recomputed once for each group of its uses."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
from programs import Program, gradients
from stepping import expected_log, scalar
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from ac_client import checkpoint
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.runtime.cursor import Cursor, Route
from ac_client.runtime.policy_context import save_recompute_policy
from ac_client.runtime.replay import EventLog
from autoac.planner.memory.simulate import simulate
from autoac.planner.plan import decided
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.problem.use_groups import UseGroups, later_runs, with_use_groups
from autoac.profiler import profile
from autoac.profiler.torch_facts.module_paths import watch_modules
from benchmarks.models.modules import Block, ConvNet, Transformer

PROGRAMS = int(os.environ.get("AUTOAC_PROGRAMS", "60"))  # the nightly target runs more


class UNet(nn.Module):
    """A skip connection around an inner block: the decoder needs it first, and the encoder last."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout())
        self.up = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.outer(x)
        below = F.interpolate(self.inner(F.max_pool2d(skip, 2)), scale_factor=2.0)
        return self.head(self.up(torch.cat([skip, below], 1))).tanh()


CASES = {
    "unet": (UNet, (2, 3, 16, 16)),
    "transformer": (lambda: Transformer(layers=2, width=32), (2, 16, 32)),
    "convolutions": (ConvNet, (16, 3, 8, 8)),
}


def random_groups(graph: Graph, chance: random.Random) -> UseGroups:
    """Return up to three use groups, between any uses, for ops that no in-place op shares memory with."""
    forced = with_forced_saves(graph, frozenset())
    groups = {}
    for op in graph.ops:
        versions = [graph.versions[w] for w in op.writes]
        alone = all(len(graph.storages[version.storage].versions) == 1 for version in versions)
        uses = {graph.saved_tensors[h].packed - 1 for version in versions for h in version.saved_tensors}
        uses |= {reader for version in versions for reader in version.readers}
        if uses and alone and op.id not in forced and chance.random() < 0.6:
            chosen = chance.sample(sorted(uses), chance.randint(1, min(3, len(uses))))
            groups[op.id] = tuple(OpId(at) for at in sorted(chosen, reverse=True))
    return groups


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


@pytest.mark.parametrize("case", CASES)
def test_peak_events_and_gradients_are_exact_with_random_use_groups(case: str) -> None:
    make, shape = CASES[case]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    batch = torch.randn(shape)
    found = profile(made(), batch, loss=scalar)
    plain = made()
    torch.manual_seed(1)
    scalar(plain(batch)).backward()
    chance, several = random.Random(5), 0
    for _ in range(6):
        graph = with_use_groups(build(found), random_groups(build(found), chance))
        probability, others = chance.choice([0.05, 0.2, 0.5]), later_runs(graph)
        drawn = (op.id for op in graph.ops if op.id not in others and chance.random() < probability)
        save_set = with_forced_saves(graph, frozenset(drawn))
        fields = decided(found, graph, save_set)
        several += any("@" in decision for decision in fields["decisions"].values())

        model = made()
        cursor = Cursor(Route(fields["decisions"], fields["use_groups"]), strict=True)
        watch_modules(model, cursor.enter, cursor.leave)
        torch.manual_seed(1)
        log, peak = measured(model, batch, cursor, found.static.total)
        assert log.events == expected_log(graph, save_set)
        assert peak == simulate(graph, save_set).peak.live_bytes
        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            assert expected.grad is not None
            assert parameter.grad is not None
            assert torch.equal(expected.grad, parameter.grad)
    assert several


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
