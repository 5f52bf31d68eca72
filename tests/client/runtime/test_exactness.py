"""Compare predicted peaks with the allocator and predicted events with the runtime, for an outside loss."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from awkward_modules import ConvNet, Gates, InPlace, Views
from fuzzers.random_moves import ANY, random_moves
from stepping import EventLog, expected_log, scalar, seeded
from torch import nn

import ac_client
from ac_client import save_recompute_policy
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Graph, Profile, build, plan, schedule, simulate
from autoac.planner.memory.schedule import Recompute, recompute_us
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import decided
from autoac.planner.problem.graph import OpId, SaveSet
from autoac.planner.problem.moves import Move, with_moves
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.profiler import observe, profile
from autoac.tape.runtime.cursor import Cursor, Route
from autoac.tape.runtime.moves.host_memory import host_memory
from autoac.tape.torch_facts.module_paths import watch_modules
from benchmarks.models.modules import Transformer
from tests.client.observing.test_inner_backwards import Equilibrium, ForcesAfterDropout

Make = Callable[[], nn.Module]


class Forces(nn.Module):
    """Differentiate by a leaf that forward makes, so backward gives that leaf a gradient too."""

    def __init__(self, energy: Callable[[torch.Tensor], torch.Tensor], *, copies: bool) -> None:
        super().__init__()
        self.energy, self.copies = energy, copies
        self.inner = nn.Linear(24, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.clone() if self.copies else x.detach()).requires_grad_()
        distances = (x[:, :1] - torch.linspace(0, 5, 24)) ** 2
        y = self.inner(self.energy(-distances)).square().sum()
        (force,) = torch.autograd.grad(y, x, create_graph=True)
        return force.square()


class Differentiated(torch.autograd.Function):
    """Compute the gradients in forward, as Liger's fused cross-entropy does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w.t()).tanh()
        slope = 1 - y * y
        ctx.save_for_backward((slope @ w).detach(), (slope.t() @ x).detach())
        return y.sum()

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_x, of_w = ctx.saved_tensors
        return of_x, of_w


class FusedLoss(nn.Module):
    """Return saved tensors as the gradients of a leaf and of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 64), nn.Tanh())
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Differentiated.apply(self.before(x), self.head.weight)  # type: ignore[no-any-return]


CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "transformer": (lambda: Transformer(layers=3, width=64), (4, 64, 64)),
    "convolutions": (ConvNet, (16, 3, 8, 8)),
    "in place": (lambda: InPlace(rows=512), (512, 16)),
    "views": (Views, (64, 8)),
    "chunks in place": (Gates, (64, 16)),
    "backward in forward": (lambda: nn.Sequential(nn.Linear(16, 16), ForcesAfterDropout()), (64, 16)),
    "forces, exp": (lambda: Forces(torch.exp, copies=True), (500, 3)),
    "forces, tanh": (lambda: Forces(torch.tanh, copies=False), (500, 3)),
    "hook that differentiates": (Equilibrium, (64, 16)),
    "saved tensors as gradients": (FusedLoss, (2, 16)),
}


def casting(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()


def measured(
    make: Make, batch: torch.Tensor, route: Route, static: int, autocast: bool = False
) -> tuple[int, EventLog, list[torch.Tensor | None]]:
    """Return the peak of a step, its events, and the gradients."""
    model = seeded(make)
    log = EventLog()
    cursor = Cursor(route, strict=True)
    watch_modules(model, cursor.enter, cursor.leave)
    torch.manual_seed(1)
    with AllocatorTimeline(base=static) as timeline:
        with casting(autocast), save_recompute_policy(cursor, log=log):
            out = model(batch)
            loss = scalar(out)
        loss.backward()
        del loss
    return timeline.peak_bytes, log, [parameter.grad for parameter in model.parameters()]


def plain_gradients(make: Make, batch: torch.Tensor, autocast: bool) -> list[torch.Tensor | None]:
    model = seeded(make)
    torch.manual_seed(1)
    with casting(autocast):
        loss = scalar(model(batch))
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def profiled(case: str, autocast: bool) -> tuple[Make, torch.Tensor, Profile]:
    """Return the model of a case, its batch, and the profile of a step."""
    make, shape = CASES[case]
    if autocast and case in ("in place", "views"):
        pytest.skip("these models mix types by hand")
    batch = torch.randn(shape)
    with casting(autocast):
        return make, batch, profile(seeded(make), batch, loss=scalar)


def route_of(found: Profile, graph: Graph, save_set: SaveSet, moves: Sequence[Move] = ()) -> Route:
    """Return what the policy of a save set tells the runtime."""
    fields = decided(found, graph, save_set, moves)
    return Route(fields["decisions"], fields["use_groups"], fields["moves"], fields["needed_until"])


def save_sets(found: Profile, n: int) -> list[SaveSet]:
    graph = build(found)
    chance = random.Random(7)
    sets = [graph.everything, graph.must_save]
    for _ in range(n):
        probability = chance.choice([0.1, 0.3, 0.5, 0.7, 0.9])
        sets.append(frozenset(OpId(op.id) for op in graph.ops if chance.random() < probability))
    return [with_forced_saves(graph, save_set) for save_set in sets]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_predicted_peak_equals_the_measured_peak(case: str, autocast: bool) -> None:
    make, batch, found = profiled(case, autocast)
    graph = build(found)
    for save_set in save_sets(found, 12):
        route = route_of(found, graph, save_set)
        peak, log, _ = measured(make, batch, route, found.static.total, autocast)
        predicted = simulate(graph, save_set).peak.live_bytes
        assert log.events == expected_log(graph, save_set)
        assert peak == predicted


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_moves_to_the_host_have_the_predicted_peaks_and_plain_gradients(case: str, autocast: bool) -> None:
    make, batch, found = profiled(case, autocast)
    graph, rng = build(found), random.Random(5)
    for share in (1.0, 0.5, 0.2, 0.7):
        save_set, moves = random_moves(graph, rng, share)
        moving = with_moves(graph, moves, ANY)
        route = route_of(found, moving, save_set, moves)
        host_memory.peak = 0
        peak, log, gradients = measured(make, batch, route, found.static.total, autocast)
        assert log.events == expected_log(moving, save_set)
        assert peak == simulate(moving, save_set).peak.live_bytes
        assert host_memory.peak == sum(graph.nbytes(w) for move in moves for w in graph.ops[move.op].writes)
        assert host_memory.used == 0
        for got, wanted in zip(gradients, plain_gradients(make, batch, autocast), strict=True):
            assert got is wanted is None or torch.equal(got, wanted)


def test_outputs_held_over_the_optimizer_step_are_in_the_predicted_peak() -> None:
    def training() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
        # `maximize` takes the memory of a gradient, and its kernels allocate nothing besides.
        return model, torch.optim.SGD(model.parameters(), maximize=True), torch.randn(4, 512)

    model, optimizer, batch = training()
    policy = plan(observe(model, (batch,), {}, optimizer=optimizer), budget_gb=1).policy()
    with AllocatorTimeline() as timeline:
        model, optimizer, batch = training()
        ac_client.apply(model, policy=policy, optimizer=optimizer)
        timeline.mark("steps")
        for _ in range(2):
            out = model(batch)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del out
    assert policy.predicted.peak_at == "optimizer step"
    assert timeline.peak_since("steps") == policy.predicted.peak_bytes


class Late(torch.autograd.Function):
    """Unpack a saved tensor twice, dropping it for other work in between."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        first = ctx.saved_tensors
        for_x = gradient * first[1]
        del first
        larger = torch.cat([for_x, for_x]).sin()
        second = ctx.saved_tensors
        return for_x + larger[: len(for_x)] * 0, gradient * second[0]


class Twice(nn.Module):
    """Unpack tensors in two steps of backward, alone and together with the tensors they are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        y = Late.apply(y.tanh(), y.exp().mul(2).add_(1))
        return Late.apply(self.after(y).sin(), y.cos() * 2)


def test_tensors_unpacked_in_two_steps_are_recomputed_as_often_as_predicted() -> None:
    batch = torch.randn(64, 16)
    found = profile(seeded(Twice), batch, loss=scalar)
    graph = build(found)
    twice = 0
    for save_set in save_sets(found, 20):
        peak, log, _ = measured(Twice, batch, route_of(found, graph, save_set), found.static.total)
        assert log.events == expected_log(graph, save_set)
        assert peak == peak_bytes(graph, save_set)
        runs = [event.op for event in schedule(graph, save_set) if isinstance(event, Recompute)]
        spent = sum(graph.ops[op].recompute_us for op in runs)
        assert recompute_us(graph, save_set) == pytest.approx(spent)
        twice += len(runs) > len(set(runs))
    assert twice
