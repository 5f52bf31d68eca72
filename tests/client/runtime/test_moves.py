"""Compare steps that move outputs to the host with plain ones, the planner and the allocator."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import scalar, seeded
from torch import nn

from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.runtime.cursor import Cursor, Route
from ac_client.runtime.moves.host_memory import host_memory
from ac_client.runtime.policy_context import save_recompute_policy
from ac_client.runtime.replay import EventLog
from autoac.planner.memory.simulate import simulate
from autoac.planner.plan import decided
from autoac.planner.problem.build import build
from autoac.planner.problem.moves import with_moves
from autoac.profiler import profile
from autoac.profiler.torch_facts.module_paths import watch_modules
from benchmarks.fuzzers import moved_programs
from benchmarks.fuzzers.expected_log import expected_log
from benchmarks.fuzzers.random_moves import ANY, random_moves
from benchmarks.models.modules import ConvNet, Gates, Recurrent, Transformer

Gradients = list[torch.Tensor | None]
Make = Callable[[], nn.Module]

CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "transformer": (lambda: Transformer(layers=3, width=64), (4, 64, 64)),
    "convolutions": (ConvNet, (16, 3, 8, 8)),
    "recurrent": (Recurrent, (4, 6, 8)),
    "chunks in place": (Gates, (64, 16)),
}


def casting(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()


def plain(make: Make, batch: torch.Tensor, autocast: bool) -> Gradients:
    model = seeded(make)
    torch.manual_seed(1)
    with casting(autocast):
        loss = scalar(model(batch))
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def moved(
    make: Make, batch: torch.Tensor, route: Route, static: int, autocast: bool
) -> tuple[int, EventLog, Gradients]:
    model = seeded(make)
    log, cursor = EventLog(), Cursor(route, strict=True)
    watch_modules(model, cursor.enter, cursor.leave)
    torch.manual_seed(1)
    with AllocatorTimeline(base=static) as timeline:
        with casting(autocast), save_recompute_policy(cursor, log=log):
            out = model(batch)
            loss = scalar(out)
        loss.backward()
        del loss
    return timeline.peak_bytes, log, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_bytes_events_and_gradients_are_as_predicted(case: str, autocast: bool) -> None:
    make, shape = CASES[case]
    batch = torch.randn(shape)
    with casting(autocast):
        found = profile(seeded(make), batch, loss=scalar)
    graph, expected = build(found), plain(make, batch, autocast)
    rng, n_moves = random.Random(5), 0
    for share in (1.0, 0.5, 0.2, 0.7, 1.0, 0.4):
        save_set, moves = random_moves(graph, rng, share)
        moving = with_moves(graph, moves, ANY)
        n_moves += len(moves)
        fields = decided(found, moving, save_set, moves)
        route = Route(fields["decisions"], fields["use_groups"], fields["moves"])
        host_memory.peak = 0
        peak, log, gradients = moved(make, batch, route, found.static.total, autocast)
        assert log.events == expected_log(moving, save_set)
        assert peak == simulate(moving, save_set).peak.live_bytes
        assert host_memory.peak == sum(graph.nbytes(w) for move in moves for w in graph.ops[move.op].writes)
        assert host_memory.used == 0
        for got, want in zip(gradients, expected, strict=True):
            assert (got is None and want is None) or torch.equal(got, want)
    assert n_moves


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_run_as_predicted(seed: int) -> None:
    assert moved_programs.tried(seed).differs == ""
