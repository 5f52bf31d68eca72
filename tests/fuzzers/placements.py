"""Recompute random programs over DTensors, and compare their gradients with those of the plain program.

    make bench-placements

A program distributes a few parameters and an input over a mesh, each with a placement of its own, and runs
products, pointwise ops, norms, dropout, views, writes in place, redistributions and round trips to local
tensors. All its outputs are recomputed in backward, or those that a random choice leaves.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import outputs_of_ranks
from stepping import EventLog, recomputed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from autoac.tape.runtime.policy_context import save_recompute_policy

ROWS, WIDTH, STEPS = 4, 8, 10
KINDS = 14


def placed(chosen: random.Random, mesh: DeviceMesh, dims: int = 2) -> list[Placement]:
    """Return a placement for each dimension of the mesh."""
    dimensions = [chosen.randrange(dims + 1) for _ in range(mesh.ndim)]
    return [Replicate() if at == dims else Shard(at) for at in dimensions]


def run(seed: int, mesh: DeviceMesh, policy: Any, log: EventLog | None) -> tuple[Tensor, list[Tensor], int]:
    """Return the loss, all gradients, and how many ops were recomputed."""
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    leaves = [
        distribute_tensor(torch.randn(*size), mesh, placed(chosen, mesh)).requires_grad_()
        for size in ((ROWS, WIDTH), *[(WIDTH, WIDTH)] * 3)
    ]
    steps = [(chosen.randrange(KINDS), placed(chosen, mesh), chosen.randrange(3)) for _ in range(STEPS)]
    with nullcontext() if policy is None else save_recompute_policy(policy, log=log):
        loss = forward(leaves, steps, mesh)
    loss.backward()
    gradients = [local(leaf.grad) for leaf in leaves if leaf.grad is not None]
    return loss.detach(), gradients, len(recomputed(log)) if log is not None else 0


Step = tuple[int, list[Placement], int]  # its kind, the placement that it may lead to, its weight


def forward(leaves: Sequence[Tensor], steps: Sequence[Step], mesh: DeviceMesh) -> Tensor:
    y, earlier = leaves[0], leaves[0]
    for kind, placements, which in steps:
        y, earlier = step(kind, y, earlier, leaves[1 + which], placements, mesh), y
    loss = y.square().mean() + earlier.mean()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def step(kind: int, y: Any, earlier: Any, weight: Any, placements: list[Placement], mesh: DeviceMesh) -> Any:
    match kind:
        case 0 | 1:
            return y @ weight / WIDTH**0.5
        case 2:
            return y.sin()
        case 3:
            return F.gelu(y) + y
        case 4:
            return y.redistribute(mesh, placements)
        case 5:
            return y + earlier
        case 6:
            return y.tanh().redistribute(mesh, placements) * 1.5
        case 7:
            return F.layer_norm(y, (WIDTH,))
        case 8:
            return F.dropout(y, 0.3)
        case 9:
            return (y.exp() + 1).mul_(0.5).clamp(max=2.0)
        case 10:
            return (y.t() * 2).t()
        case 11:
            inside = y.to_local()
            return DTensor.from_local(inside.sigmoid() * inside, mesh, y.placements, run_check=False)
        case 12:
            return torch.stack([y, y.cos()]).sum(0)
        case _:
            return F.softmax(y, -1) + y


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of one program."""

    seed: int
    refused: bool = False  # without us: DTensor has no rule for the op and these placements
    recomputed: int = 0
    differs: str = ""


def tried(seed: int, mesh: DeviceMesh) -> Tried:
    """Run the program of a seed plainly, and under two policies."""
    try:
        wanted, gradients, _ = run(seed, mesh, None, None)
    except (RuntimeError, NotImplementedError, ValueError):
        return Tried(seed, refused=True)
    kinds = random.Random(seed)

    def some(*_: Any, **__: Any) -> CheckpointPolicy:
        saves = kinds.random() < 0.3
        return CheckpointPolicy.PREFER_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    count = 0
    for policy in ("recompute_all", some):
        log = EventLog()
        loss, found, again = run(seed, mesh, policy, log)
        count += again
        if not torch.equal(loss, wanted):
            return Tried(seed, differs="the loss")
        if len(found) != len(gradients) or not all(map(torch.equal, found, gradients)):
            return Tried(seed, differs="a gradient")
    return Tried(seed, recomputed=count)


def tried_here(seeds: Sequence[int]) -> list[Tried]:
    """Try programs over a mesh of all ranks of the process group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [tried(seed, mesh) for seed in seeds]


SCRIPT = """
import json
from dataclasses import asdict
from fuzzers.placements import tried_here
print(json.dumps([asdict(one) for one in tried_here(range({first}, {end}))]))
"""


def tried_on(world: int, first: int, end: int) -> list[Tried]:
    """Try programs on several ranks; return the outcomes of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        script = SCRIPT.format(first=first, end=end)
        outs = outputs_of_ranks(script, Path(folder) / "store", world, timeout=1200)
    return [Tried(**one) for out in outs for one in json.loads(out.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, nargs=2, default=(300, 100), help="on one rank, and on two")
    wrong = 0
    for world, programs in zip((1, 2), parser.parse_args().programs, strict=True):
        found = tried_on(world, 0, programs)
        failures = [one for one in found if one.differs]
        ran, again = sum(not one.refused for one in found) // world, sum(one.recomputed for one in found)
        print(f"{world} ranks: {ran} of {programs} programs ran, {again} ops recomputed", *failures, sep="\n")
        wrong += len(failures)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
