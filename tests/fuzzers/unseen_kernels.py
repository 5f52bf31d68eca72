"""Train random networks with unseen kernels in all our ways; compare with plain and torch's checkpoint.

    make bench-unseen

A network is a sequence of blocks of linear layers, activations, norms, dropouts, views, in-place writes, and
layers whose kernels PyTorch does not dispatch, in Functions and outside of them. Three steps run in each way:
`apply` with pins and within budgets, `checkpoint` around each block, and `save_recompute_policy`. One network
in eight has compiled blocks. A way passes if outputs and gradients are the plain ones bit for bit, or if
it is refused by an error of ours, unless torch's checkpoint has the plain gradients in the place of ours.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from stepping import EventLog
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from unseen_kernels.layers import KINDS, WIDTH, Unseen
from unseen_kernels.steps import Run, equal, in_a_region, in_checkpoints, loss_of, plainly, steps

import ac_client
from ac_client.planning import plan_batch
from autoac.planner import PlannerError, find_minimum_peak, plan
from autoac.profiler import ProfilerError, profile
from fuzzers.nested_checkpoints import Layer
from fuzzers.random_programs import run_programs

CHANCE_UNSEEN = 0.45
COMPILED_OF = 8  # one network in so many has compiled blocks
OURS = (
    PlannerError,
    ProfilerError,
    ac_client.ApplyError,
    ac_client.ContentsDiffer,
    ac_client.LeftThePath,
    ac_client.PolicyConflict,
    ac_client.StaleError,
)
VISIBLE = (1, 2, 3, 4, 5, 7, 8, 9, 10, 11)  # the kinds of `Layer` that take two dimensions


@dataclass(frozen=True, slots=True)
class Network:
    """Describe the random network of a seed."""

    seed: int
    rows: int
    blocks: tuple[tuple[str | int, ...], ...]  # kinds of layers, unseen ones and visible ones
    compiled: frozenset[int]  # numbers of compiled blocks
    double: bool

    def make(self, compiled: bool = True) -> nn.Sequential:
        torch.default_generator.manual_seed(self.seed)
        made = nn.Sequential(
            *(
                nn.Sequential(*(Unseen(k) if k in KINDS else Layer(k, WIDTH) for k in kinds))
                for kinds in self.blocks
            )
        )
        if self.double:
            made.double()
        if compiled:
            for number in self.compiled:
                made[number].compile(backend="aot_eager")
        return made

    def batch(self, step: int) -> Tensor:
        chance = torch.Generator().manual_seed(self.seed + step)
        dtype = torch.float64 if self.double else torch.float32
        return torch.randn(self.rows, WIDTH, generator=chance, dtype=dtype).requires_grad_()

    def __str__(self) -> str:
        described = (
            f"[{', '.join(map(str, kinds))}]{' compiled' if i in self.compiled else ''}"
            for i, kinds in enumerate(self.blocks)
        )
        return f"seed {self.seed}, {self.rows} rows{', double' * self.double}: {' '.join(described)}"


def network(seed: int) -> Network:
    """Return the network of a seed."""
    chance = random.Random(seed)
    blocks = tuple(
        tuple(
            chance.choice(KINDS) if chance.random() < CHANCE_UNSEEN else chance.choice(VISIBLE)
            for _ in range(chance.randint(1, 3))
        )
        for _ in range(chance.randint(2, 4))
    )
    if not any(kind in KINDS for kinds in blocks for kind in kinds):
        blocks = ((*blocks[0], chance.choice(KINDS)), *blocks[1:])
    # A kernel on pointers cannot be traced, so a compiled block is one of visible layers.
    visible = [i for i, kinds in enumerate(blocks) if not any(kind in KINDS for kind in kinds)]
    compiled = frozenset(visible[:1]) if seed % COMPILED_OF == 0 else frozenset[int]()
    return Network(seed, chance.choice((16, 16, 16, 12, 64)), blocks, compiled, chance.random() < 0.15)


@dataclass(slots=True)
class Outcome:
    """One network, run in one way."""

    way: str
    state: str  # "equal", "refused", "wrong" or "crashed"
    detail: str = ""
    recomputed: int = 0


def tried(program: Network, plain: list[Tensor], way: str, torch_is_equal: bool) -> Outcome:
    """Run `program` in one of our ways."""
    log = EventLog()
    try:
        model, run, recomputed = _prepared(program, way, log)
        ours = steps(model, run, program.batch)
    except OURS as error:
        # A plan has other choices than to refuse where torch is right; checkpoint has none.
        state = "wrong" if torch_is_equal and way == "checkpoint" else "refused"
        return Outcome(way, state, type(error).__name__)
    except Exception as error:  # noqa: BLE001 - counted, and printed with its network
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = str(error).splitlines()[0][:120] if str(error) else ""
        return Outcome(way, "crashed", f"{type(error).__name__}: {words} ({last.filename}:{last.lineno})")
    if equal(plain, ours):
        return Outcome(way, "equal", recomputed=recomputed(model))
    return Outcome(way, "wrong", _worst(plain, ours))


def _worst(plain: list[Tensor], ours: list[Tensor]) -> str:
    pairs = [(a.double(), b.double()) for a, b in zip(plain, ours, strict=False) if not torch.equal(a, b)]
    return f"{len(pairs)} of {len(plain)} differ, by {max(float((a - b).abs().max()) for a, b in pairs):.3g}"


def _prepared(program: Network, way: str, log: EventLog) -> tuple[nn.Module, Run, Callable[[nn.Module], int]]:
    def logged(_: nn.Module) -> int:
        return sum(kind == "recompute" for kind, _name in log.events)

    def reported(model: nn.Module) -> int:
        return ac_client.applied(model).report().recomputed

    model = program.make()
    match way:
        case "checkpoint":
            return model, partial(in_checkpoints, log=log), logged
        case "region":
            return model, partial(in_a_region, log=log), logged
        case "apply, all pinned":
            ac_client.pin(model, "must_recompute")
            budget = 1.0
        case "apply, a block pinned":
            ac_client.pin(model[program.seed % len(model)], "must_recompute")
            budget = 1.0
        case _:
            share = float(way.split()[-1])
            found = profile(program.make(), program.batch(0), loss=loss_of)
            smallest = find_minimum_peak(found, work_limit=1).found
            largest = plan(found, budget_bytes=1 << 40, gap=0.5, work_limit=1).peak
            budget = (smallest + share * (largest - smallest)) / 2**30
    ac_client.apply(model, budget_gb=budget)
    return model, plainly, reported


def ways(seed: int) -> tuple[str, ...]:
    """Return our ways to run the program of a seed; budgets take the most time, so each gets one."""
    share = (0.0, 0.15, 0.4, 0.7)[seed % 4]
    return "checkpoint", "region", "apply, all pinned", "apply, a block pinned", f"apply at {share}"


def in_torchs_checkpoints(net: nn.Module, x: Tensor) -> Tensor:
    for block in net:
        x = torchs_checkpoint(block, x, use_reentrant=False)
    return x


@dataclass(slots=True)
class Tried:
    """One network in all ways."""

    program: Network
    torch_is_equal: bool
    outcomes: list[Outcome]

    @property
    def differs(self) -> str:
        bad = [o for o in self.outcomes if o.state in ("wrong", "crashed")]
        return "; ".join(f"{o.way}: {o.state}: {o.detail}" for o in bad)

    def __str__(self) -> str:
        return f"{self.program}: {self.differs}"


def tried_network(seed: int) -> Tried:
    """Run the network of `seed` plainly, under torch's checkpoint, and in all our ways."""
    torch.compiler.reset()
    program = network(seed)
    plain = steps(program.make(), plainly, program.batch)
    try:
        theirs = steps(program.make(), in_torchs_checkpoints, program.batch)
        torch_is_equal = equal(plain, theirs)
    except RuntimeError:
        torch_is_equal = False
    outcomes = [tried(program, plain, way, torch_is_equal) for way in ways(seed)]
    return Tried(program, torch_is_equal, outcomes)


def summary(found: Sequence[Tried]) -> str:
    """Return how often each way was equal, refused, wrong or crashed."""
    outcomes = [outcome for one in found for outcome in one.outcomes]
    counts = Counter((" ".join(o.way.split()[:2]), o.state) for o in outcomes)
    lines = [f"{way}: {n} {state}" for (way, state), n in sorted(counts.items())]
    lines.append(f"{sum(o.recomputed > 0 for o in outcomes)} of {len(outcomes)} recomputed something")
    lines.append(f"torch's checkpoint is equal to plain on {sum(one.torch_is_equal for one in found)}")
    return "\n".join(lines)


def main() -> None:
    torch._dynamo.config.suppress_errors = False
    plan_batch.plan = partial(plan, gap=0.5, work_limit=1)
    run_programs(__doc__, tried_network, summary, programs=2000)


if __name__ == "__main__":
    main()
