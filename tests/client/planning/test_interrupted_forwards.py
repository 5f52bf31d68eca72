"""A forward that raises teaches the plan nothing: later steps peak where they did before."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from stepping import binding_budget, peak_of
from torch import Tensor, nn

import ac_client
from autoac.planner import build, simulate
from autoac.planner.units import GIB
from autoac.profiler import observe
from benchmarks.models.modules import Transformer

pytestmark = pytest.mark.usefixtures("no_comparison")

X = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Transformer blocks and their loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Transformer(layers=2, width=64)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)["logits"]
        return logits.square().mean()


@cache
def budget_gb() -> float:
    """Near the smallest feasible peak, so that some modules are saved and others recomputed."""
    return binding_budget(observe(Model(), (X,), {}), 0.4) / GIB


def step(model: nn.Module) -> None:
    model.zero_grad()
    torch.manual_seed(1)
    model(X).backward()


def peak(model: nn.Module) -> int:
    return peak_of(model, X)


def interrupt(model: nn.Module, module: nn.Module, place: str, error: type[BaseException]) -> None:
    """Run a forward that raises `error` at `place` in the call of `module`."""

    def spoil(*_: object, **__: object) -> None:
        raise error("a bad batch")

    if place == "forward":
        module.forward = spoil
    else:
        register: Callable[..., torch.utils.hooks.RemovableHandle] = (
            module.register_forward_hook if place == "hook" else module.register_forward_pre_hook
        )
        handle = register(spoil, prepend=place == "first pre-hook")
    try:
        with pytest.raises(error, match="a bad batch"):
            step(model)
    finally:
        if place == "forward":
            del module.forward
        else:
            handle.remove()


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("pre-hook", ValueError),
        ("first pre-hook", KeyboardInterrupt),
        ("forward", ValueError),
        ("forward", KeyboardInterrupt),
        ("hook", KeyboardInterrupt),
    ],
)
def test_steps_after_a_forward_that_raised_peak_where_they_did(
    place: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    model = ac_client.apply(Model(), budget_gb())
    step(model)
    want = peak(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            continue  # is never called
        interrupt(model, module, place, error)
        assert peak(model) == want, name
    assert not caplog.messages
    assert ac_client.applied(model).report().off_path == ""


def test_exception_that_forward_catches_itself_teaches_nothing() -> None:
    class Catching(Model):
        """Goes on without the rest of a block that raised."""

        spoiled = False

        def forward(self, x: Tensor) -> Tensor:
            for block in self.body.blocks:
                try:
                    x = block(x)
                except ValueError:
                    x = x * 2
            return x.square().mean()

    model = Catching()
    graph = build(observe(model, (X,), {}))
    model = ac_client.apply(model, 0.8 * simulate(graph, graph.everything).peak.live_bytes / GIB)
    step(model)
    want = peak(model)

    def spoil(*_: object) -> None:
        raise ValueError

    for module in list(model.body.blocks.modules())[1:]:
        with module.register_forward_pre_hook(spoil):
            step(model)
        assert peak(model) == want


def test_step_inside_an_exception_handler_is_a_whole_step() -> None:
    model = ac_client.apply(Model(), budget_gb())
    step(model)
    want = peak(model)
    try:
        raise ValueError
    except ValueError:
        assert peak(model) == want
        interrupt(model, model.body.blocks[0], "forward", KeyError)
        assert peak(model) == want
