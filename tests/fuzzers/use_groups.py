"""Train random networks under random policies with `recompute@2` and `@3`, and compare with the plain step.

    make bench-use-groups

A network is a sequence of layers with skip connections of any length. Its policy has a random save set and
up to three use groups for most ops, between any of their uses. The policy goes through its JSON into `apply`,
and two steps run. Each must have the ops of the schedule, the predicted peak to the byte, and the plain
gradients, buffers and generator state bit for bit.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from programs import same
from stepping import EventLog, expected_log
from torch import Tensor, nn

import ac_client
from ac_client import save_recompute_policy
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Graph, Policy, build, schedule, simulate
from autoac.planner.memory.schedule import Recompute
from autoac.planner.plan import plan_of
from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.problem.use_groups import UseGroups, later_runs, with_use_groups
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.variables import Options
from autoac.profiler import profile
from fuzzers.nested_checkpoints import BATCH, LENGTH, WIDTH, Layer
from fuzzers.random_programs import run_programs

STEPS = 3  # the second runs modules without the mode of which everything is saved
AS_IT_IS = Options(use_groups=False)  # the graph has what it needs
CHANCES_TO_SAVE = (0.05, 0.2, 0.5)


class SkipNetwork(nn.Module):
    """Layers in sequence; some outputs are joined with an earlier one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)  # so that there are gradients
        self.layers = nn.ModuleList(Layer(chance.randrange(Layer.KINDS)) for _ in range(chance.randint(3, 8)))
        self.joins = [chance.choice(["", "", "add", "multiply", "cat"]) for _ in self.layers]
        self.sources = [chance.randint(0, i) for i in range(len(self.layers))]
        self.narrow = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = [self.first(x)]
        for layer, join, source, narrow in zip(
            self.layers, self.joins, self.sources, self.narrow, strict=True
        ):
            y, earlier = layer(outputs[-1]), outputs[source]
            match join:
                case "add":
                    y = y + earlier
                case "multiply":
                    y = y * earlier.sigmoid()
                case "cat":
                    y = narrow(torch.cat([y, earlier], -1))
            outputs.append(y)
        return outputs[-1].square().mean()


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


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of a network."""

    log: list[tuple[str, str]]
    peak: int
    tensors: list[Tensor | None]  # gradients, buffers, the generator's state


def steps(model: nn.Module, batch: Tensor, static_bytes: int) -> list[Step]:
    """Run `STEPS` training steps."""
    taken = []
    for number in range(STEPS):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        log = EventLog()
        logging = functools.partial(save_recompute_policy, log=log)
        with (
            mock.patch("ac_client.planning.planned_forward.save_recompute_policy", logging),
            AllocatorTimeline(base=static_bytes) as timeline,
        ):
            model(batch).backward()
        tensors = [*(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
        taken.append(Step(log.events, timeline.peak_bytes, [*tensors, torch.get_rng_state()]))
    return taken


@dataclass(frozen=True, slots=True)
class Tried:
    """One network under one policy."""

    seed: int
    again: int  # second and third runs of an op in one backward
    differs: str  # "", or what the steps have else than predicted


def tried(make: Callable[[], nn.Module], batch: Tensor, seed: int) -> Tried:
    """Train a model plainly and under the random policy of `seed`.

    Args:
        make: return the model, which computes its loss from `batch`; the same each time.
    """
    chance, found = random.Random(seed), profile(make(), batch)
    plain_graph = build(found)
    graph = with_use_groups(plain_graph, random_groups(plain_graph, chance))
    probability, others = chance.choice(CHANCES_TO_SAVE), later_runs(graph)
    drawn = (op.id for op in graph.ops if op.id not in others and chance.random() < probability)
    save_set = with_forced_saves(graph, frozenset(drawn))
    policy = Policy.from_json(
        plan_of(SearchProblem(graph, AS_IT_IS), found, 1 << 40, save_set).policy().to_json()
    )
    again = sum(isinstance(event, Recompute) and event.op in others for event in schedule(graph, save_set))
    return Tried(seed, again, difference(make, batch, policy, graph, save_set))


def difference(
    make: Callable[[], nn.Module], batch: Tensor, policy: Policy, graph: Graph, save_set: SaveSet
) -> str:
    """Train a model plainly and under `policy`; return "", or what the steps have else than predicted.

    Args:
        graph, save_set: what `policy` was made from.
    """
    model = make()
    ac_client.apply(model, policy=policy, strict=True)
    both = steps(make(), batch, graph.static_bytes), steps(model, batch, graph.static_bytes)
    log, peak = expected_log(graph, save_set), simulate(graph, save_set).peak.live_bytes
    for number, (plain, ours) in enumerate(zip(*both, strict=True)):
        if not all(map(same, plain.tensors, ours.tensors)):
            return f"step {number}: gradients, buffers or the generator's state"
        if ours.log != log:
            return f"step {number}: the ops that ran"
        if ours.peak != peak and number:  # in the first step, backward also compares contents
            return f"step {number}: peak predicted {peak}, measured {ours.peak}"
    return ""


def tried_network(seed: int) -> Tried:
    """Train the network of `seed`."""
    torch.manual_seed(seed)
    batch = torch.randn(BATCH, LENGTH, WIDTH)
    return tried(functools.partial(SkipNetwork, seed), batch, seed)


def summary(found: Sequence[Tried]) -> str:
    """Return what ran, as text."""
    running, runs = sum(bool(one.again) for one in found), sum(one.again for one in found)
    return (
        f"{running} of {len(found)} networks run an op again more than once: "
        f"{runs} second and third runs, {STEPS} steps each"
    )


if __name__ == "__main__":
    run_programs(__doc__, tried_network, summary)
