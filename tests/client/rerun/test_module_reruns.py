"""Test that calls recorded as one op give plain's gradients at the simulator's peak."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from programs import COLUMNS, ROWS, Program
from stepping import nothing_left, scalar, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.rerun.recorded_call import CallSite
from ac_client.runtime.write_guard import StaleError
from autoac.planner import Profile
from autoac.planner.memory.module_reruns import Candidates
from autoac.planner.memory.schedule import Span
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph, OpId, SaveSet
from autoac.planner.problem.save_sets import with_forced_saves
from autoac.profiler import profile
from autoac.profiler.unseen.fingerprints import Comparison
from benchmarks.apply_plan import apply_save_set
from benchmarks.models.modules import ConvNet, Transformer

Make = Callable[[], nn.Module]


class Gate(nn.Module):
    """Elementwise ops with temporaries, and an in-place op on a tensor of its own."""

    def forward(self, x: Tensor, by: Tensor | None = None) -> Tensor:
        h = 0.5 * x * (1 + torch.tanh(x + 0.044 * x.pow(3)))
        if by is not None:
            h = h * (by + 1).mul_(2)
        return nn.functional.dropout(h, 0.2, self.training) + x


class Gated(nn.Module):
    """Modules with several arguments and outputs, nested modules, and a saved tensor between two calls."""

    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 3 * width), "gate": Gate(), "norm": nn.LayerNorm(width)})
            for _ in range(layers)
        )
        self.mix = Mix()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            a, b, c = layer["up"](layer["norm"](x)).chunk(3, -1)
            a, b = self.mix(layer["gate"](a, by=b.sigmoid()), layer["gate"](c))
            x = x + a * b.sin()
        return x


class Mix(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([a, b], -1).softmax(-1)
        first, second = both.chunk(2, -1)
        return first.cos() * a, second.exp() + b


class Checkpointed(nn.Module):
    """A module that checkpoints itself, which it does not while it runs again as a whole."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            lambda x: nn.functional.dropout(self.up(x).tanh().exp().sin(), 0.1, self.training),
            x,
            use_reentrant=False,
        )
        return out + x


CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "transformer": (lambda: Transformer(layers=3, width=64), (4, 64, 64)),
    "convolutions": (ConvNet, (16, 3, 8, 8)),
    "gates": (Gated, (64, 32)),
    "checkpoints": (lambda: nn.Sequential(nn.Linear(32, 32), *(Checkpointed() for _ in range(3))), (64, 32)),
}


def random_save_set(graph: Graph, chance: random.Random) -> SaveSet:
    """Return a save set under which whole modules are recomputed, besides some single ops."""
    modules = sorted({op.name.split("/")[0] for op in graph.ops})
    recomputed = {module for module in modules if chance.random() < 0.8}
    saved = frozenset(
        op.id
        for op in graph.ops
        if not any(f"{op.name.split('/')[0]}.".startswith(f"{module}.") for module in recomputed)
        or chance.random() < 0.03
    )
    return with_forced_saves(graph, saved)


def planned(make: Make, found: Profile, save_set: SaveSet, reruns: Sequence[Span]) -> nn.Module:
    """Return the model under a plan with this save set, which runs these calls again as a whole."""
    model = apply_save_set(seeded(make), found, save_set)
    bucket = ac_client.applied(model)._store.single_policy
    assert bucket is not None
    with mock.patch("ac_client.planning.loaded_policy.module_reruns", return_value=reruns):
        assert len(bucket.loaded.forwards) == 1
    return model


def steps(model: nn.Module, batch: Tensor, static: int, n: int = 3) -> list[tuple[list[Tensor], int]]:
    """Return gradients, buffers and the generator's state after each step, and its peak."""
    results = []
    for i in range(n):
        model.zero_grad()
        torch.manual_seed(i)
        with AllocatorTimeline(base=static) as timeline:
            out = model(batch)
            scalar(out).backward()
        tensors = [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())
        results.append(([t.clone() for t in tensors] + [torch.get_rng_state()], timeline.peak_bytes))
        del out
    return results


def identical(a: Tensor, b: Tensor) -> bool:
    """Return True if the tensors are equal, NaN included."""
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


def sites_of(model: nn.Module) -> dict[int, CallSite | None]:
    bucket = ac_client.applied(model)._store.single_policy
    assert bucket is not None
    return bucket.loaded.forwards[0].call_sites


@pytest.fixture
def every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the planner choose calls that save no time."""
    monkeypatch.setattr("autoac.planner.memory.module_reruns.LEAST_OPS", 1)
    monkeypatch.setattr("autoac.planner.memory.module_reruns.MOST_EXTRA", 1e9)


def compare(make: Make, batch: Tensor, seed: int, rounds: int, *, peaks: bool = True) -> tuple[int, int]:
    """Compare three steps with plain's, and their peaks with the simulator's, under random save sets.

    Return how many calls ran as one op, and for how many save sets that changed the peak.

    Args:
        peaks: False if tensors are so small that the state of the CPU's generator is the peak.
    """
    found = profile(seeded(make), batch, loss=scalar)
    graph, chance = build(found), random.Random(seed)
    plain = [tensors for tensors, _ in steps(seeded(make), batch, 0)]
    calls, moved = 0, 0
    for _ in range(rounds):
        save_set = random_save_set(graph, chance)
        model = planned(make, found, save_set, sorted(Candidates(graph, save_set).outermost()))
        with mock.patch.object(Comparison, "enabled", False):  # it takes memory in the first step
            results = steps(model, batch, found.static.total)
        assert all(all(map(identical, a, b)) for a, (b, _) in zip(plain, results, strict=True))
        reruns = [(OpId(b), OpId(site.end)) for b, site in sites_of(model).items() if site is not None]
        lazy, whole = peak_bytes(graph, save_set), peak_bytes(graph, save_set, reruns)
        assert not peaks or [peak for _, peak in results] == [lazy, whole, whole]
        calls += len(reruns)
        moved += lazy != whole
    return calls, moved


@pytest.mark.usefixtures("every_candidate")
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_plain_and_peaks_are_those_predicted(case: str) -> None:
    make, shape = CASES[case]
    calls, moved = compare(make, torch.randn(shape), 3, 8)
    assert calls > 8
    assert moved or case != "gates"


class Programs(nn.Module):
    """Blocks that run random programs, with views, in-place writes and random numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RandomBlock(Program(3 * seed + i, 8)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * 0.5
        return x


class RandomBlock(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        results = self.program.run([x, self.weight, x.detach() + 1])
        return sum(((r * r).mean() for r in results), x * self.weight)


@pytest.mark.usefixtures("every_candidate")
def test_random_programs_in_modules_run_again_as_in_forward() -> None:
    assert fuzz(range(10)) > 10


def fuzz(seeds: Sequence[int]) -> int:
    """Compare random programs with autograd; return how many calls ran as one op."""
    calls = 0
    for seed in seeds:
        make, batch = partial(Programs, seed), torch.randn(ROWS, COLUMNS)
        try:
            steps(seeded(make), batch, 0, 1)
        except RuntimeError:  # autograd refuses the program
            continue
        calls += compare(make, batch, seed, 2, peaks=False)[0]
    return calls


class Body(nn.Module):
    """A module whose ops are all recomputed, around code of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.weight).tanh() * self.scale
        self.extra(h)
        return nn.functional.dropout(h.exp() * x, 0.3) + h.sin()

    def extra(self, h: Tensor) -> None:
        pass


class Around(nn.Module):
    def __init__(self, body: type[Body] = Body) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(64, 64), body()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.first(x)).square()


def around(body: type[Body] = Body) -> nn.Module:
    """Return a planned model after the step in which its body is audited."""
    batch = torch.ones(32, 64)
    found = profile(seeded(partial(Around, body)), batch, loss=scalar)
    graph = build(found)
    save_set = with_forced_saves(
        graph, frozenset(op.id for op in graph.ops if not op.name.startswith("body/"))
    )
    spans = sorted(Candidates(graph, save_set).outermost())
    assert [graph.ops[begin].name.split("/")[0] for begin, _ in spans] == ["body"]
    model = planned(partial(Around, body), found, save_set, spans)
    torch.manual_seed(0)
    model(batch).sum().backward()
    return model


def grads(model: nn.Module, backward: Callable[[nn.Module], None]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    backward(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def retained(model: nn.Module) -> None:
    loss = model(torch.ones(32, 64)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model: nn.Module) -> None:
    outs = [model(torch.full((32, 64), scale)).sum() for scale in (0.5, 2.0)]
    sum(outs).backward()


def in_autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(32, 64)).sum()
    loss.backward()


def attribute_set_after_forward(model: nn.Module) -> None:
    loss = model(torch.ones(32, 64)).sum()
    model.body.scale = 5.0
    model.body.eval()
    loss.backward()
    assert (model.body.scale, model.body.training) == (5.0, False)
    model.body.scale = 1.0
    model.body.train()


def one_part(model: nn.Module) -> None:
    loss = model(torch.ones(32, 64)).sum()
    weight = model.body.weight
    weight.grad = torch.autograd.grad(loss, weight)[0]


@pytest.mark.parametrize(
    "backward", [retained, two_forwards, in_autocast, attribute_set_after_forward, one_part]
)
def test_call_runs_again_as_in_forward_whatever_is_around_backward(
    backward: Callable[[nn.Module], None],
) -> None:
    model = around()
    assert all(sites_of(model).values())
    assert all(map(torch.equal, grads(model, backward), grads(seeded(Around), backward)))


def test_forwards_of_a_recorded_call_leave_nothing_alive() -> None:
    model = around()
    with nothing_left():
        model(torch.ones(32, 64)).sum().backward()
        dropped = model(torch.ones(32, 64))
        del dropped


def test_parameter_written_after_forward_is_an_error() -> None:
    model = around()
    loss = model(torch.ones(32, 64)).sum()
    with torch.no_grad():
        model.body.weight.mul_(2)
    with pytest.raises(StaleError, match="modified by an inplace operation"):
        loss.backward()


def test_module_that_does_something_else_in_backward_is_an_error() -> None:
    model = around()
    loss = model(torch.ones(32, 64)).sum()
    with (
        mock.patch.object(Body, "extra", lambda self, h: h * h),
        pytest.raises(RuntimeError, match="must do in backward what it did in forward"),
    ):
        loss.backward()


def test_forward_that_raises_inside_of_a_recorded_call_leaves_the_model_usable() -> None:
    model = around()

    def fail(self: Body, h: Tensor) -> None:
        raise KeyError("inside")

    with mock.patch.object(Body, "extra", fail), pytest.raises(KeyError, match="inside"):
        model(torch.ones(32, 64))
    assert all(map(torch.equal, grads(model, retained), grads(seeded(Around), retained)))


seen: list[Tensor] = []


class Counts(Body):
    def extra(self, h: Tensor) -> None:
        self.scale += 1.0


class Draws(Body):
    def extra(self, h: Tensor) -> None:
        random.random()


class Keeps(Body):
    def extra(self, h: Tensor) -> None:
        seen[:] = [h]


class ReadsOthers(Body):
    def extra(self, h: Tensor) -> None:
        h.mul_(FOREIGN)


FOREIGN = torch.full((64,), 2.0)


class Hooked(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, out: None)


@pytest.mark.parametrize("body", [Counts, Draws, Keeps, ReadsOthers, Hooked])
def test_module_with_a_side_effect_is_recorded_op_by_op(body: type[Body]) -> None:
    model = around(body)
    assert not any(sites_of(model).values())
    seen.clear()
