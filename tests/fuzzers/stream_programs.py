"""Compare random programs on several streams, planned and plain: gradients bit for bit, peaks to the byte.

    make bench-streams

runs 1,000 of them on the stand-in device of tests/standin, at the worst timing that their events allow. On a
machine with a GPU, `PYTHONPATH=tests python -m fuzzers.stream_programs` runs them there, at whatever timing.

A program draws ops, views, in-place writes and random numbers on the current stream and two side streams. It
waits for what it reads and tells the allocator of each reader, as torch's notes on CUDA ask.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from programs import KINDS, WRITES, run_instruction, same
from torch import Tensor, nn
from waiting import engine_lets_go

import ac_client
from autoac.planner import build
from autoac.planner.minimum_peak import WORK_LIMIT, search_minimum_peak
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.time_limit import Allowance, Stopwatch
from autoac.planner.solver.variables import Options
from autoac.planner.units import GIB
from autoac.profiler import profile
from autoac.tape.capture.op_recorder import CROSSES_STREAMS
from autoac.tape.runtime.policy_context import save_recompute_policy
from fuzzers.random_programs import run_programs

SIZE = 8
SIDES = 2
DRAWN = [*range(KINDS), *set(range(KINDS)).difference(WRITES)]  # half as many writes as elsewhere
PLANNED_EVERY = 5  # programs, of which one is also profiled and planned


@dataclass
class Value:
    """A tensor of a program, and an event after the work that made or wrote it."""

    tensor: Tensor
    stream: torch.cuda.Stream
    ready: torch.cuda.Event


@dataclass
class Streams:
    """The streams of a running program."""

    all: list[torch.cuda.Stream]
    values: list[Value] = field(default_factory=list)

    def add(self, tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
        self.values.append(Value(tensor, stream, stream.record_event()))
        return tensor

    def read(self, value: Value, stream: torch.cuda.Stream) -> Tensor:
        """Return the tensor of `value`, ready for `stream`."""
        if stream != value.stream:
            stream.wait_event(value.ready)
            value.tensor.record_stream(stream)
        return value.tensor

    @contextmanager
    def alone(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Run the body on `stream` after all earlier work, and all later work after the body."""
        for other in self.all:
            stream.wait_stream(other)
        yield
        for other in self.all:
            other.wait_stream(stream)


class StreamProgram(nn.Module):
    """A model whose forward is drawn from a seed; it is the same every time it runs."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(SIZE, SIZE, generator=generator) for _ in range(2)]
        self.weights = nn.ParameterList([nn.Parameter(weight.cuda()) for weight in weights])
        self.seed, self.length = seed, length
        self.sides = [torch.cuda.Stream() for _ in range(SIDES)]

    def forward(self, x: Tensor) -> Tensor:
        chance = random.Random(self.seed)
        main = torch.cuda.current_stream()
        streams = Streams([main, *self.sides])
        for tensor in (x, *self.weights):
            streams.add(tensor, main)
        for _ in range(self.length):
            _instruction(chance, streams, chance.choice(streams.all))
        total = None
        for value in streams.values[-4:]:
            part = streams.read(value, main).square().mean()
            total = part if total is None else total + part
        assert total is not None
        return total


def _instruction(chance: random.Random, streams: Streams, stream: torch.cuda.Stream) -> None:
    """Run one random op on `stream`."""
    a, b, kind = chance.choice(streams.values), chance.choice(streams.values), chance.choice(DRAWN)
    with torch.cuda.stream(stream):
        if kind not in WRITES:
            made = run_instruction(kind, streams.read(a, stream), streams.read(b, stream))
            assert made is not None
            streams.add(made, stream)
            return
        with streams.alone(stream):
            a.tensor.record_stream(stream)
            b.tensor.record_stream(stream)
            run_instruction(kind, a.tensor, b.tensor.detach())


Results = list[Tensor | None] | str


def batch() -> Tensor:
    return torch.linspace(-2, 2, SIZE * SIZE).view(SIZE, SIZE).cuda().requires_grad_()


def results_of(program: StreamProgram, x: Tensor, policy: object = None) -> Results:
    """Return loss, gradients and generator state of a step; the reason if autograd refuses the program.

    Args:
        policy: of a region around forward; None for none.
    """
    torch.cuda.manual_seed_all(program.seed)
    try:
        with nullcontext() if policy is None else save_recompute_policy(policy):
            loss = program(x)
        loss.backward()
        engine_lets_go("cuda")
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error) or "a view of" in str(error):
            return "refused"
        raise
    leaves = [x, *program.weights]
    gradients = [None if leaf.grad is None else leaf.grad.cpu() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [loss.detach().cpu(), *gradients, torch.cuda.get_rng_state()]


def equal(one: Results, other: Results) -> bool:
    """Return True if both are equal, bit for bit."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return all(map(same, one, other))


@dataclass
class Comparison:
    """Results of comparing one program with itself under policies.

    Attributes:
        skipped: why plain autograd does not run it: it refuses the program, or races itself.
        mismatches: where the program under a policy differs from the plain one.
        recomputed: ops that the plan recomputes.
        crossing: ops that the plan must save, because another stream reads them.
    """

    skipped: str = ""
    mismatches: list[str] = field(default_factory=list)
    planned: bool = False
    recomputed: int = 0
    crossing: int = 0

    @property
    def differs(self) -> str:
        return "; ".join(self.mismatches)

    def __str__(self) -> str:
        return self.differs


def compare(seed: int, *, planned: bool, take_races: Callable[[], list[str]] = list) -> Comparison:
    """Run one program plainly, in two regions, and, with `planned`, under a plan.

    Args:
        seed: of the program.
        take_races: returns the races so far, and forgets them; the stand-in detects them.
    """
    found = Comparison()
    program, x = StreamProgram(seed, 4 + seed % 22), batch()
    take_races()
    plain = results_of(program, x)
    if isinstance(plain, str) or take_races():
        found.skipped = plain if isinstance(plain, str) else "racing"
        return found

    def check(name: str, results: Results) -> None:
        found.mismatches += [f"program {seed}, {name}: {race}" for race in take_races()]
        if not equal(plain, results):
            found.mismatches.append(f"program {seed}, {name}: not the plain results")

    coin = random.Random(seed)
    check("recompute all", results_of(program, x, "recompute_all"))
    check("random policy", results_of(program, x, lambda *_args, **_named: coin.random() < 0.4))
    if planned:
        found.planned = True
        profiled = profile(program, x)
        reasons = [profiled.reasons[reason] for reason in profiled.ops.must_save if reason >= 0]
        found.crossing = reasons.count(CROSSES_STREAMS)
        # The observed step has other run times, on which use groups depend.
        once = SearchProblem(build(profiled), Options(use_groups=False))
        smallest = search_minimum_peak(once, Allowance(WORK_LIMIT, Stopwatch(math.inf), None)).found
        ac_client.apply(program, (smallest + once.ceiling) // 2 / GIB)
        for name in ("observed step", "first planned step", "second planned step"):
            check(name, results_of(program, x))
        before = torch.cuda.memory_allocated()  # with cuBLAS's workspaces, which are static too
        torch.cuda.reset_peak_memory_stats()
        check("planned step", results_of(program, x))
        peak = torch.cuda.max_memory_allocated() - before + profiled.static.total
        report = ac_client.applied(program).report()
        found.recomputed = report.recomputed
        if peak != report.predicted_peak_bytes:
            predicted = f"predicted {report.predicted_peak_bytes}"
            found.mismatches.append(f"program {seed}: peak {peak}, {predicted}")
    return found


def summary(found: Sequence[Comparison]) -> str:
    """Return what ran, as text."""
    ran = [one for one in found if not one.skipped]
    plans = [one for one in ran if one.planned]
    skipped = (f"{sum(one.skipped == why for one in found)} are {why}" for why in ("refused", "racing"))
    return (
        f"{len(ran)} programs ran in three ways, {len(plans)} of them also under a plan; without a policy "
        f"{', '.join(skipped)}\n{sum(p.recomputed for p in plans)} ops recomputed, "
        f"{sum(p.crossing for p in plans)} saved because another stream reads them"
    )


def main(take_races: Callable[[], list[str]] = list) -> None:
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    run_programs(
        __doc__, lambda seed: compare(seed, planned=seed % PLANNED_EVERY == 0, take_races=take_races), summary
    )


if __name__ == "__main__":
    main()
