"""Train random networks with dropouts, some of them saved packed, and compare with the plain step.

    make bench-packed-masks

Masks have sizes that fill no byte, three types and several layouts. Some are shared by two products, written
again after a use, or drawn by other ops than torch's dropout. The policy has a random save set, goes through
its JSON into `apply`, and two steps run. Each must have the ops of the schedule, the predicted peak to the
byte, and the plain gradients, buffers and generator state bit for bit.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoac.planner import Policy
from autoac.planner.plan import plan_of
from autoac.planner.problem.build import build
from autoac.planner.problem.packing import added_ops, is_packed, with_packing, worth_packing
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.planner.solver.start.search_problem import Problem
from autoac.profiler import profile
from benchmarks.fuzzers.random_programs import run_programs
from benchmarks.fuzzers.use_groups import AS_IT_IS, difference

BATCH, LENGTH, WIDTH = 3, 29, 19  # 1,653 elements
KINDS = 10
CHANCES_TO_SAVE = (0.05, 0.3, 0.6)
CHANCE_TO_PACK = 0.6


def _drawn(x: Tensor, p: float) -> Tensor:
    return _scaled(torch.empty_like(x).bernoulli_(1 - p), p)


def _scaled(mask: Tensor, p: float) -> Tensor:
    scaled: Tensor = torch.ops.aten.div_.Scalar(mask, 1 - p)  # as F.dropout calls it
    return scaled


def dropped(x: Tensor, kind: int, p: float) -> Tensor:
    """Return `x` after a dropout of some kind."""
    match kind:
        case 0 | 1:
            return F.dropout(x, p)
        case 2:
            return F.dropout(x.transpose(0, 2), p).transpose(0, 2)
        case 3:
            return F.dropout(x.bfloat16(), p).float()
        case 4:
            return F.dropout(x.double(), p).float()
        case 5:
            return F.dropout(x.sin(), p, inplace=True)
        case 6:  # one mask, used twice
            mask = _drawn(x, p)
            return (x * mask).tanh() + x.sin() * mask
        case 7:  # written after its use
            mask = _drawn(x, p)
            y = x * mask.clone()
            mask.mul_(2)
            return y * mask
        case 8:  # written between the ops that draw and scale it, so it has three values
            mask = torch.empty_like(x).bernoulli_(1 - p)
            mask[0] += 1
            return x * _scaled(mask, p)
        case _:
            return F.alpha_dropout(x, p)


class DroppingNetwork(nn.Module):
    """Layers in sequence, with a dropout after each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(chance.randint(2, 5)))
        self.drops = [(chance.randrange(KINDS), chance.choice((0.1, 0.25, 0.5, 0.9))) for _ in self.layers]
        self.joins = [chance.random() < 0.4 for _ in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer, (kind, p), join in zip(self.layers, self.drops, self.joins, strict=True):
            y = dropped(F.gelu(layer(x)), kind, p)
            x = x + y if join else y
        return x.square().mean()


@dataclass(frozen=True, slots=True)
class TriedMasks:
    """One network under one policy."""

    seed: int
    packed: int  # masks
    differs: str  # "", or what the steps have else than predicted


def tried_masks(seed: int) -> TriedMasks:
    """Train the network of `seed` plainly and under a random policy."""
    chance, make = random.Random(seed), functools.partial(DroppingNetwork, seed)
    torch.manual_seed(seed)
    batch = torch.randn(BATCH, LENGTH, WIDTH)
    found = profile(make(), batch)
    step = build(found)
    graph = with_packing(step, worth_packing(step))
    probability, others = chance.choice(CHANCES_TO_SAVE), added_ops(graph)
    drawn = {op.id for op in graph.ops if op.id not in others and chance.random() < probability}
    drawn |= {pack.bits for pack in graph.packs if chance.random() < CHANCE_TO_PACK}
    save_set = with_forced_saves(graph, frozenset(drawn))
    policy = Policy.from_json(plan_of(Problem(graph, AS_IT_IS), found, 1 << 40, save_set).policy().to_json())
    packed = sum(is_packed(pack, save_set) for pack in graph.packs)
    return TriedMasks(seed, packed, difference(make, batch, policy, graph, save_set))


def main() -> None:
    def summary(found: Sequence[TriedMasks]) -> str:
        packing, masks = sum(bool(one.packed) for one in found), sum(one.packed for one in found)
        return f"{packing} of {len(found)} networks save masks packed: {masks} masks"

    run_programs(__doc__, tried_masks, summary)


if __name__ == "__main__":
    main()
