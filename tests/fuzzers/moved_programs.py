"""Compare random programs that move outputs to the host with plain ones: gradients bit for bit, and bytes.

    make bench-moves

runs 1,000 of them on the stand-in device of tests/standin, at the worst timing that events allow: what a
stream has not waited for is NaN, and so is freed memory. `PYTHONPATH=tests python -m
fuzzers.moved_programs` runs them on a GPU if there is one, else between two arenas of a CPU.

Each program is profiled once, every third with two forwards before one backward, and moves are drawn at
random. It then runs in several ways: as profiled, with the graph kept and run a second time, for the
gradients of one parameter only, without a backward, and with an exception in forward. Nothing may be left on
the host after any of them.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from stepping import EventLog, expected_log
from torch import Tensor
from waiting import engine_lets_go

from ac_client import save_recompute_policy
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Graph, build
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import decided
from autoac.planner.problem.graph import SaveSet
from autoac.planner.problem.moves import Move, with_moves
from autoac.profiler import Loop, observe
from autoac.tape.runtime.cursor import Cursor, Route
from autoac.tape.runtime.moves.host_memory import host_memory
from autoac.tape.torch_facts.module_paths import watch_modules
from fuzzers.nested_checkpoints import BATCH, LENGTH, WIDTH
from fuzzers.random_moves import ANY, random_moves
from fuzzers.random_programs import run_programs
from fuzzers.use_groups import SkipNetwork

DRAWS = 2  # of moves for each program
ON_CPU = 8 + 5056  # a number that becomes a tensor, and the state of the generator: no bytes of a device


@dataclass(frozen=True)
class Tried:
    """The outcome of one program; `differs` says in what it differs from the plain one, or from the plan."""

    seed: int
    differs: str
    moves: int
    moved_bytes: int

    def __str__(self) -> str:
        return f"{self.seed}: {self.differs}"


def loss_of(out: Tensor | Sequence[Tensor]) -> Tensor:
    """Return a scalar, which saves nothing of the model, for its output or those of several forwards."""
    return torch.stack([each.sum() for each in ([out] if isinstance(out, Tensor) else out)]).sum()


def tried(seed: int) -> Tried:
    """Run the program of `seed`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chance, made = random.Random(seed), torch.Generator().manual_seed(seed)
    batches = [
        torch.randn(BATCH, LENGTH, WIDTH, generator=made).to(device) for _ in range(2 if seed % 3 == 0 else 1)
    ]
    model = SkipNetwork(seed).to(device)
    found = observe(model, (batches[0],), {}, loss=loss_of, loop=Loop(forwards=len(batches)))
    graph, n_moves, moved_bytes = build(found), 0, 0
    expected = _gradients(seed, batches, None)
    for _ in range(DRAWS):
        save_set, moves = random_moves(graph, chance, chance.choice((0.2, 0.6, 1.0)))
        fields = decided(found, with_moves(graph, moves, ANY), save_set, moves)
        items, ends = list(fields["decisions"].items()), (*found.forward_ends[:-1], len(graph.ops))
        routes = [
            Route(dict(items[begin:end]), fields["use_groups"], fields["moves"], fields["needed_until"])
            for begin, end in pairwise((0, *ends))
        ]
        nbytes = sum(graph.nbytes(w) for move in moves for w in graph.ops[move.op].writes)
        n_moves, moved_bytes = n_moves + len(moves), moved_bytes + nbytes
        differs = _as_predicted(graph, save_set, moves, seed, batches, routes, nbytes)
        differs = differs or _in_other_ways(seed, batches, routes, expected)
        if differs:
            return Tried(seed, differs, n_moves, moved_bytes)
    return Tried(seed, "", n_moves, moved_bytes)


def _as_predicted(
    graph: Graph,
    save_set: SaveSet,
    moves: Sequence[Move],
    seed: int,
    batches: Sequence[Tensor],
    routes: Sequence[Route],
    nbytes: int,
) -> str:
    """Run a step as it was profiled, and compare it with the planner."""
    moving, device = with_moves(graph, moves, ANY), batches[0].device
    host_memory.peak, log = 0, EventLog()
    cuda = device.type == "cuda"
    _let_go(device)
    with contextlib.nullcontext() if cuda else AllocatorTimeline() as timeline:
        model = _model(seed, device)
        if timeline is not None:
            timeline.mark("step")
        else:
            _multiply(device)
            _let_go(device)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        held, loss = _forward(model, batches, routes, log)
        loss.backward()
        del held
    if timeline is not None:
        static = sum(one.untyped_storage().nbytes() for one in (*model.parameters(), *model.buffers()))
        peak = timeline.peak_since("step") + graph.static_bytes - static
    else:
        peak = torch.cuda.max_memory_allocated() + graph.static_bytes - before
    wanted = peak_bytes(moving, save_set)
    if log.events != expected_log(moving, save_set):
        return "other events than predicted"
    if not wanted <= peak <= wanted + (0 if cuda else ON_CPU):
        return f"the peak is {peak}, predicted {wanted}"
    if host_memory.peak != nbytes:
        return f"the host's peak is {host_memory.peak}, predicted {nbytes}"
    return ""


def _let_go(device: torch.device) -> None:
    """Free what earlier programs left: it must not go in the middle of the next one."""
    gc.collect()
    engine_lets_go(device)


def _multiply(device: torch.device) -> None:
    """Have cuBLAS allocate its workspaces, which a step of training finds and a profile counts."""
    one = torch.ones(1, 1, device=device, requires_grad=True)
    (one @ one).backward()


def _in_other_ways(
    seed: int, batches: Sequence[Tensor], routes: Sequence[Route], expected: list[Tensor]
) -> str:
    """Run the program in ways that were not profiled, and compare what it computes with plain."""
    for way in ("whole", "twice", "one", "never", "fails"):
        found = _gradients(seed, batches, routes, way)
        wanted = expected[:1] if way == "one" else [] if way in ("never", "fails") else expected
        if not all(map(torch.equal, found, wanted)) or len(found) != len(wanted):
            return f"gradients differ ({way})"
        if host_memory.used:
            return f"{host_memory.used} bytes are left on the host ({way})"
    return ""


def _gradients(
    seed: int, batches: Sequence[Tensor], routes: Sequence[Route] | None, way: str = "whole"
) -> list[Tensor]:
    model = _model(seed, batches[0].device)
    parameters = list(model.parameters())
    if way == "fails":
        model.layers[-1].register_forward_pre_hook(interrupted)
    try:
        _, loss = _forward(model, batches, routes)
    except InterruptedError:
        return []
    if way == "never":
        return []
    if way == "one":
        return list(torch.autograd.grad(loss, parameters[:1], allow_unused=True, materialize_grads=True))
    if way == "twice":
        torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [gradient.clone() for gradient in found]


def interrupted(*_: Any) -> None:
    raise InterruptedError


def _model(seed: int, device: torch.device) -> SkipNetwork:
    model = SkipNetwork(seed).to(device)
    torch.manual_seed(seed)
    return model


def _forward(
    model: SkipNetwork, batches: Sequence[Tensor], routes: Sequence[Route] | None, log: EventLog | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the outputs and the loss."""
    if routes is None:
        outs = [model(batch) for batch in batches]
        return outs, loss_of(outs)
    outs = []
    for batch, route in zip(batches, routes, strict=True):
        cursor = Cursor(route)
        watches = watch_modules(model, cursor.enter, cursor.leave)  # type: ignore[arg-type]
        with watches, save_recompute_policy(cursor, log=log):
            outs.append(model(batch))
            if len(outs) == len(batches):
                loss = loss_of(outs)
    return outs, loss


def summary(found: Sequence[Tried]) -> str:
    """Return what ran, as text."""
    moves, nbytes = sum(one.moves for one in found), sum(one.moved_bytes for one in found)
    return f"{len(found)} programs, {moves} moves of {nbytes / 2**20:.1f} MiB in all"


def main(races: Callable[[], list[str]] = list) -> None:
    """Run the command in the module docstring.

    Args:
        races: returns the races since its last call, on a device that notes them.
    """

    def without_races(seed: int) -> Tried:
        found = tried(seed)
        raced = races()
        return found if found.differs or not raced else replace(found, differs=raced[0])

    run_programs(__doc__, without_races, summary)


if __name__ == "__main__":
    main()
