"""Test that a step without a plan holds little, and computes what the plain step computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from stepping import allocated_peak, seed
from torch import Tensor, nn

import ac_client
from ac_client import StaleError, save_recompute_policy
from autoac.tape.runtime.cuts import Cuts

ROWS, WIDTH = 512, 64

pytestmark = pytest.mark.usefixtures("one_thread")


class Layer(nn.Module):
    """A layer that makes 16 times what it passes on, in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fall(torch.tanh(self.rise(x.sigmoid())).sin().exp())
        match self.form:
            case "residual":
                return x + y
            case "residual in place":
                return x.add_(y) if not x.is_leaf else x + y
            case "relu in place":
                return torch.relu_(y)
            case "function":
                return _Doubled.apply(y)
        return y


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        doubled = 2 * x
        ctx.save_for_backward(doubled.exp())
        return doubled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return gradient * saved


def train(form: str, cuts: Cuts | None, results: list[list[Tensor]]) -> None:
    seed(0)
    model = nn.Sequential(*(Layer(form) for _ in range(16)))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with nullcontext() if cuts is None else save_recompute_policy("recompute_all", cuts=cuts):
        out = model(x)
    out.square().mean().backward()
    results.append([out.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)])


@pytest.mark.parametrize("form", ["plain", "residual", "residual in place", "relu in place", "function"])
def test_cuts_lower_the_peak_and_change_no_bit(form: str) -> None:
    results: list[list[Tensor]] = []
    plain = allocated_peak(lambda: train(form, None, results))
    observed = allocated_peak(lambda: train(form, Cuts(), results))
    saved = plain - 4 * 16 * 2 * 4 * WIDTH * WIDTH * 2  # less parameters and gradients
    assert observed < plain - 0.5 * saved
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_recomputing_all_without_cuts_saves_nothing() -> None:
    results: list[list[Tensor]] = []

    never, cuts = (partial(train, "plain", each, results) for each in (Cuts(factor=float("inf")), Cuts()))
    assert allocated_peak(cuts) < 0.7 * allocated_peak(never)


@pytest.mark.parametrize(
    ("returned", "cut"),
    [((), False), (("block.linear",), False), (("block.linear", "block"), True), (("a.b", "c"), False)],
)
def test_a_cut_needs_less_after_a_module_that_has_called_others(returned: Sequence[str], cut: bool) -> None:
    cuts = Cuts(factor=4.0)
    live, freed = torch.empty(100), torch.empty(200)
    for serial, tensor in enumerate((live, freed)):
        cuts.note_made(tensor.untyped_storage(), serial)
    del tensor, freed
    for path in returned:
        cuts.note_exit(path)
    cuts.cut()
    assert (list(cuts.due) == [0]) is cut


class Kept(Cuts):
    """Drop no cut."""

    def drop(self) -> None:
        pass


def gradients(make: Callable[[], nn.Module], depth: int, cuts: Cuts | None) -> list[Tensor]:
    """Return the gradients of a step of as many layers."""
    seed(0)
    model = nn.Sequential(*(make() for _ in range(depth)))
    with nullcontext() if cuts is None else save_recompute_policy("recompute_all", cuts=cuts):
        out = model(torch.randn(ROWS, WIDTH, requires_grad=True))
    out.square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_no_cut_is_dropped_if_gradients_need_the_memory() -> None:
    step = partial(gradients, partial(Layer, "residual"), 48)
    assert allocated_peak(partial(step, Cuts(gradients=1 << 40))) == allocated_peak(partial(step, Kept()))


class Skips(nn.Module):
    """Layers, as many that read in reverse what these have made, and layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(Layer("plain") for _ in range(16)) for _ in range(2))
        self.rest = nn.Sequential(*(Layer("residual") for _ in range(16)))

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer in self.down:
            made.append(x := layer(x))
        for layer in self.up:
            x = layer(x + made.pop())
        out: Tensor = self.rest(x)
        return out


def test_cut_stays_if_the_model_has_what_it_holds_or_later_ops_have_read_it() -> None:
    kept, dropped = (allocated_peak(partial(gradients, Skips, 1, cuts)) for cuts in (Kept(), Cuts()))
    assert dropped <= 1.1 * kept
    assert all(map(torch.equal, gradients(Skips, 1, None), gradients(Skips, 1, Cuts())))


def test_older_cuts_are_dropped() -> None:
    step = partial(gradients, partial(Layer, "residual"), 48)
    assert allocated_peak(partial(step, Cuts())) < 0.95 * allocated_peak(partial(step, Kept()))
    assert all(map(torch.equal, step(None), step(Cuts())))


class Scaled(nn.Module):
    """A layer of few parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, x.sin(), x.cos(), x.tanh()], 1).sin().exp().tanh().sigmoid()
        return x * self.scale + y.unflatten(1, (4, WIDTH)).sum(1) * 0.1


def test_layers_that_do_not_train_may_be_written_before_backward() -> None:
    numbers = []
    for planned in (False, True):
        seed(0)
        front = nn.Sequential(*(Layer("residual") for _ in range(3))).requires_grad_(False)
        model = nn.Sequential(front, *(Scaled() for _ in range(60)))
        if planned:
            ac_client.apply(model, 1.0)
        out = model(torch.randn(WIDTH, WIDTH))
        with torch.no_grad():
            for parameter in front.parameters():
                parameter.mul_(0.9)
        out.square().mean().backward()
        numbers.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *numbers))


def test_what_only_the_comparison_of_contents_holds_is_not_live() -> None:
    seen = []

    class Spy(Cuts):
        def cut(self) -> None:
            seen.append(self._live_bytes)
            super().cut()

    weight = torch.randn(WIDTH, requires_grad=True)  # a new parameter: contents are compared
    with save_recompute_policy("recompute_all", cuts=Spy(factor=float("inf"))):
        x = weight.sin()
        for _ in range(4):
            x = x.sin()
    x.sum().backward()
    assert seen == [0, *[weight.nbytes] * 4]


def test_a_write_after_forward_to_what_a_cut_holds_is_an_error() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    between = []
    with save_recompute_policy("recompute_all", cuts=Cuts(factor=0.0)):
        for layer in layers:
            x = layer(x)
            between.append(x.detach())
    for tensor in between[:-1]:
        tensor.add_(1)
    with pytest.raises(StaleError, match="modified by an inplace operation"):
        x.sum().backward()


@pytest.mark.parametrize("keeps", ["inputs", "inputs without a version counter", "outputs"])
def test_what_hooks_keep_is_not_recomputed(keeps: str) -> None:
    results: list[list[Tensor]] = []

    def step(cuts: Cuts | None) -> None:
        seed(0)
        model = nn.Sequential(*(Layer("residual") for _ in range(8)))
        kept: dict[nn.Module, Tensor] = {}

        def keep(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            tensor = output if keeps == "outputs" else inputs[0]
            kept[layer] = tensor.data if "without" in keeps else tensor.detach()

        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(keep)
        x = torch.randn(ROWS, WIDTH)
        with nullcontext() if cuts is None else save_recompute_policy("recompute_all", cuts=cuts):
            out = model(x)
        out.square().mean().backward()
        statistics = [(tensor.T @ tensor).trace() for tensor in kept.values()]
        results.append(statistics + [p.grad for p in model.parameters() if p.grad is not None])

    plain, observed = (allocated_peak(lambda cuts=cuts: step(cuts)) for cuts in (None, Cuts()))
    assert observed <= 1.02 * plain
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("writes", ["in place", "without a version counter", "by freeing it"])
def test_kept_tensor_that_a_hook_of_backward_writes_is_recomputed(writes: str) -> None:
    def gradient(cuts: Cuts | None) -> Tensor:
        weight = torch.linspace(-1, 1, WIDTH).requires_grad_()
        with nullcontext() if cuts is None else save_recompute_policy("recompute_all", cuts=cuts):
            tensor = weight + 1  # no op saves it, so plain autograd does not mind a write
            first = (tensor * 2).sin()
            second = (tensor * 3).sin()
        kept = tensor.data if "without" in writes else tensor.detach()

        def write(_: Tensor) -> None:
            if "freeing" in writes:
                kept.untyped_storage().resize_(0)
            else:
                kept.mul_(2)

        first.register_hook(write)  # runs after the backward of `second`, which has recomputed tensor * 3
        (first + second).sum().backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(gradient(None), gradient(Cuts(factor=float("inf"))))
