"""Test which backward hooks a profiled step calls, and that anomaly mode checks real steps alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import (
    register_module_full_backward_pre_hook,
)

from autoac.planner import build, simulate
from autoac.profiler import DATASHEETS, CannotFake, profile

X = torch.linspace(-1, 2, 32).view(8, 4)
CALLS: list[Tensor] = []
"""Gradients that hooks received."""


class Steep(nn.Module):
    """Compute finite gradients on true activations, and infinite ones if activations are ones."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(1 - x) + torch.atanh(x)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Steep(), nn.Linear(4, 1))


def check(gradient: Tensor) -> None:
    CALLS.append(gradient.clone())
    if not torch.isfinite(gradient).all():
        raise FloatingPointError


def on_output(model: nn.Sequential, register: Callable[[Tensor], Any]) -> None:
    model[1].register_forward_hook(lambda _module, _args, out: register(out) and None)


def scales(_module: nn.Module, outgoing: Any) -> Any:
    check(outgoing[0])
    return (outgoing[0] * 1.5,)


HOOKS: dict[str, Callable[[nn.Sequential], Any]] = {
    "tensor": lambda m: on_output(m, lambda out: out.register_hook(check)),
    "node, before": lambda m: on_output(m, lambda out: out.grad_fn.register_prehook(lambda g: check(g[0]))),
    "several tensors": lambda m: on_output(
        m, lambda out: register_multi_grad_hook([out, out * 1], lambda gs: check(gs[0]))
    ),
    "module": lambda m: m[1].register_full_backward_hook(lambda _m, _in, out: check(out[0])),
    "module, before": lambda m: m[1].register_full_backward_pre_hook(scales),
    "module, old": lambda m: m[1].register_backward_hook(lambda _m, given, _out: check(given[0])),
    "all modules, before": lambda _: register_module_full_backward_pre_hook(scales),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_modules_are_called_by_a_real_step_and_not_by_a_fake_one(name: str) -> None:
    """Other hooks are a part of the step. Those here look at numbers, which a fake step does not have."""
    model, x = new_model(), X.clone().requires_grad_()
    handle = HOOKS[name](model)
    CALLS.clear()
    try:
        if name.startswith("module"):
            profile(model, x, on=DATASHEETS["h100"])
            assert not CALLS
        else:
            with pytest.raises(CannotFake):
                profile(model, x, on=DATASHEETS["h100"])
        CALLS.clear()
        profile(model, x)
        assert CALLS
    finally:
        if handle is not None:
            handle.remove()


def test_tensors_held_by_a_hook_are_held_in_the_profile_too() -> None:
    def peak(*, held: bool) -> int:
        model = nn.Sequential(nn.Linear(4, 64), nn.Identity(), nn.Linear(64, 1))

        def hold(_module: nn.Module, _args: Any, out: Tensor) -> None:
            extra = out.detach() + 1
            if held:
                out.register_hook(lambda _: extra.sum() and None)

        model[0].register_forward_hook(hold)
        graph = build(profile(model, X))
        assert not held or graph.storages[1].released == len(graph.ops) + len(graph.steps)
        return simulate(graph, graph.everything).peak.live_bytes

    assert peak(held=True) == peak(held=False) + 8 * 64 * 4


def test_anomaly_mode_does_not_look_at_a_fake_step() -> None:
    """Its gradients have no numbers."""
    with torch.autograd.set_detect_anomaly(True):
        profile(new_model(), X, on=DATASHEETS["h100"])
        assert torch.is_anomaly_enabled()
