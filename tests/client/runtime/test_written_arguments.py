"""Test custom Functions that write a small argument: they run again, and the argument is written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_each
from delayed_scaling import hand_written, next_step
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import find_minimum_peak
from autoac.profiler import profile
from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.unseen.function_calls import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, STEPS = 3, 4
RUNS: list[int] = [0]  # of the forward of a Function

Write = Callable[[Any, Tensor, Tensor], None]  # of the context, x and the state


def _count(ctx: Any, x: Tensor, state: Tensor) -> None:
    state.view(-1)[0].add_(1)


def _count_by_data(ctx: Any, x: Tensor, state: Tensor) -> None:
    state.data.add_(1)


def _largest(ctx: Any, x: Tensor, state: Tensor) -> None:
    state.copy_(torch.maximum(state, x.detach().abs().amax()))


def _unseen(ctx: Any, x: Tensor, state: Tensor) -> None:
    state.numpy()[...] += 0.5  # as a kernel that PyTorch does not dispatch: no op, no new version


def _unseen_then_seen(ctx: Any, x: Tensor, state: Tensor) -> None:
    state.numpy()[...] += 0.5
    state.mul_(1.5)


def _part(ctx: Any, x: Tensor, state: Tensor) -> None:
    state.data[:1].add_(1)


def _part_then_unseen(ctx: Any, x: Tensor, state: Tensor) -> None:
    state.data[:1].add_(1)
    state.numpy()[...] += 0.5


WRITES = [_count, _count_by_data, _largest, _unseen, _unseen_then_seen]


def _dirty(ctx: Any, x: Tensor, state: Tensor) -> None:
    state.mul_(0.5).add_(1)
    ctx.mark_dirty(state)
    ctx.mark_non_differentiable(state)


def function_of(write: Write, *, writes: int = 0, returns_state: bool = False) -> Any:
    """Return a new Function, whose kinds no step has seen. It reads its state, writes it, and reads it.

    Args:
        writes: which of its states it writes.
    """

    class Stateful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, state: Tensor, *others: Tensor) -> Any:
            RUNS[0] += 1
            before = state.flatten()[0].clone()
            write(ctx, x, (state, *others)[writes])
            y = x * (1 + 0.1 * before) + 0.01 * state.flatten()[0]
            for other in others:
                y = y + 0.1 * other.flatten()[0]
            ctx.save_for_backward(y)
            return (y, state) if returns_state else y

        @staticmethod
        def backward(ctx: Any, dy: Tensor, *_: Tensor) -> Any:
            (y,) = ctx.saved_tensors
            return dy * y.cos(), *[None] * (len(ctx.needs_input_grad) - 1)

    return Stateful


class Layer(nn.Module):
    """Call the Function with a state, and maybe with more."""

    def __init__(self, function: Any, numel: int = 4) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(16, 16)
        self.register_buffer("state", torch.zeros(numel))

    def arguments(self) -> list[Tensor]:
        return [self.state]

    def forward(self, x: Tensor) -> Tensor:
        y = self.function.apply(self.linear(x).tanh(), *self.arguments())
        return (y[0] if isinstance(y, tuple) else y).sin()  # type: ignore[no-any-return]


class ReadsLater(Layer):
    """Have ops read the state before and after the call."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * (1 + self.arguments()[0].sum()).exp().clamp(max=2))
        return y * (2 + self.arguments()[0].sum()).sin()


class ReadsBeside(Layer):
    """Have ops read parts of a state before and after a call that writes another part, as in solvers."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * (1 + self.state[8:].mean()).sin())
        return y * (2 + self.state[4:].mean()).sin()


class OneStorage(Layer):
    """Pass three tensors on one storage: what is written, what lies next to it, and an alias of both."""

    def arguments(self) -> list[Tensor]:
        (state,) = super().arguments()
        return [state[:2], state[2:], state.view(2, -1)]


class PartOfLarge(Layer):
    """Write one row of a storage that is larger than what a rerun copies."""

    def arguments(self) -> list[Tensor]:
        return [super().arguments()[0][:4]]


class MadeInForward(Layer):
    """Write what an op has made that runs again, too."""

    def arguments(self) -> list[Tensor]:
        return [super().arguments()[0] + 1.0]


class OfModule(Layer):
    """Write a buffer other than the arguments."""

    def forward(self, x: Tensor) -> Tensor:
        def write(ctx: Any, x: Tensor, state: Tensor) -> None:
            self.state.add_(1)  # type: ignore[operator]

        if self.function is None:
            self.function = function_of(write)
        return self.function.apply(self.linear(x).tanh(), torch.zeros(1)).sin()


def net_of(layer: Callable[[], nn.Module], *, shared: bool = False) -> nn.Sequential:
    """Return a net of layers; with `shared`, all write the state of the first."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer() for _ in range(LAYERS)])
    if shared:
        for i in range(1, LAYERS):
            net[i].state = net[0].state
    return net


def in_plan(model: nn.Module) -> Callable[[Tensor], Tensor]:
    ac_client.pin(model, "must_recompute")
    return ac_client.apply(model, budget_gb=1.0)


def in_region(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with save_recompute_policy("recompute_all"):
            return model(x)  # type: ignore[no-any-return]

    return run


WAYS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "plan": in_plan,
    "checkpoint": lambda model: partial(checkpoint_each, model),
    "region": in_region,
}


def steps(
    model: nn.Module, run: Callable[[Tensor], Tensor], between: Callable[[nn.Module], object] = lambda _: None
) -> tuple[list[Tensor], int]:
    """Return outputs, gradients and buffers of all steps, and how often the Function ran in the last."""
    found: list[Tensor] = []
    for step in range(STEPS):
        RUNS[0] = 0
        model.zero_grad()
        y = run(torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).requires_grad_())
        between(model)
        y.sum().backward()
        found += [y, *[p.grad for p in model.parameters() if p.grad is not None], *model.buffers()]
        found = [tensor.detach().clone() for tensor in found]
    return found, RUNS[0]


def assert_plain(
    layer: Callable[[], nn.Module],
    way: str,
    *,
    runs: int,
    shared: bool = False,
    between: Callable[[nn.Module], object] = lambda _: None,
) -> None:
    plain, once = steps(plainly := net_of(layer, shared=shared), plainly, between)
    model = net_of(layer, shared=shared)
    ours, ran = steps(model, WAYS[way](model), between)
    assert once == LAYERS
    assert all(map(torch.equal, plain, ours))
    assert ran == runs * LAYERS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("layer", "write"),
    [
        *product([Layer, ReadsLater], [*WRITES, _dirty]),
        *product([OneStorage], WRITES),  # autograd refuses views that are marked as dirty
    ],
)
def test_function_that_writes_a_small_argument_runs_again(
    layer: Callable[..., nn.Module], write: Write, way: str
) -> None:
    function = function_of(write, returns_state=write is _dirty)
    assert_plain(partial(layer, function), way, runs=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", [_count, _unseen])
def test_later_write_by_others_does_not_reach_the_rerun(write: Write, way: str) -> None:
    def move_on(model: nn.Module) -> None:
        for buffer in model.buffers():
            buffer.mul_(0.5).add_(3.0)

    assert_plain(partial(Layer, function_of(write)), way, runs=2, between=move_on)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", [_count, _unseen])
@pytest.mark.parametrize(
    "layer",
    [partial(Layer, numel=SMALL // 4 + 1), partial(PartOfLarge, numel=SMALL // 4 + 1), MadeInForward],
    ids=["large", "part of a large storage", "made in forward"],
)
def test_function_that_writes_a_large_or_recorded_argument_is_saved(
    layer: Callable[..., nn.Module], write: Write, way: str
) -> None:
    assert_plain(partial(layer, function_of(write)), way, runs=1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", [_count, _part, _unseen, _unseen_then_seen, _part_then_unseen])
def test_function_writes_a_part_of_a_storage_whose_other_parts_were_read(write: Write, way: str) -> None:
    assert_plain(partial(ReadsBeside, function_of(write), numel=SMALL), way, runs=1)


def test_parts_that_were_read_are_not_copied_when_a_function_writes_others() -> None:
    run = in_region(net_of(partial(ReadsBeside, function_of(_part), numel=SMALL)))
    with AllocatorTimeline() as timeline:
        y = run(torch.randn(8, 16))
    assert timeline.events[-1].live_bytes < SMALL, y


@pytest.mark.parametrize("way", WAYS)
def test_function_that_writes_a_buffer_of_its_module_is_saved(way: str) -> None:
    assert_plain(partial(OfModule, None), way, runs=1)


@pytest.mark.parametrize("way", WAYS)
def test_large_argument_of_a_kind_that_wrote_a_small_one_is_not_written_twice(way: str) -> None:
    function = function_of(_unseen)
    assert_plain(partial(Layer, function), way, runs=2)
    assert_plain(partial(Layer, function, numel=SMALL), way, runs=1)


@pytest.mark.parametrize("way", WAYS)
def test_kind_depends_on_which_arguments_share_a_storage(way: str) -> None:
    class Apart(OneStorage):
        def arguments(self) -> list[Tensor]:
            state, *others = super().arguments()
            return [state.clone(), *others]

    function = function_of(_unseen, writes=-1)
    assert_plain(partial(Apart, function), way, runs=2)
    assert_plain(partial(OneStorage, function), way, runs=2)


def test_two_backwards_run_the_call_again_on_the_same_state() -> None:
    def both(run: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
        y = run(torch.ones(8, 16, requires_grad=True)).sum()
        y.backward(retain_graph=True)
        y.backward()
        return [*[p.grad for p in model.parameters() if p.grad is not None], *model.buffers()]

    model, plain = (net_of(partial(Layer, function_of(_unseen))) for _ in range(2))
    assert all(map(torch.equal, both(plain, plain), both(in_region(model), model)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", [_count, _unseen])
def test_functions_that_write_one_argument_in_turn_run_again(write: Write, way: str) -> None:
    assert_plain(partial(Layer, function_of(write)), way, runs=2, shared=True)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 32, 128, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()  # type: ignore[no-any-return]


def smallest_peak(*, scaling: bool) -> int:
    x = torch.randn(8, 32, 128)
    found = profile(hand_written(scaling=scaling), x, loss=lambda out: out.square().mean())
    return find_minimum_peak(found, gap=0.05).found


def test_delayed_scaling_leaves_the_smallest_peak_within_a_tenth() -> None:
    with_scaling = smallest_peak(scaling=True)
    assert with_scaling <= 1.1 * smallest_peak(scaling=False)

    def train(model: nn.Module) -> list[Tensor]:
        found = []
        for step in range(4):
            model.zero_grad()
            value = loss_of(model, step)
            next_step(model)
            value.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found += [tensor.detach().clone() for tensor in (value, *gradients, *model.buffers())]
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
        return found

    planned = ac_client.apply(hand_written(), budget_gb=1.05 * with_scaling / 2**30)
    assert all(map(torch.equal, train(hand_written()), train(planned)))
    assert ac_client.applied(planned).report().recomputed
