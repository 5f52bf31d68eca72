"""Test Inductor's code inside regions and planned models, and as the backend of compiled autograd.

The results of its kernels differ in the last bits from those of the plain ops. So each test compares with the
same compiled code without a region.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from stepping import EventLog, policy_for, recomputed, replays
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import ac_client
from ac_client import StaleError, save_recompute_policy

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler", "nothing_is_open"),
    pytest.mark.skipif(
        not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))),
        reason="Inductor's code for the CPU needs a C++ compiler",
    ),
    # Warnings of torch itself when Inductor is loaded, and of Dynamo about an input that is not a leaf.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def greatest(x: Tensor) -> Tensor:
    """Run cummax, which Inductor dispatches, and exp, whose kernel overwrites the result of cummax."""
    return torch.cummax(x, 0).values.exp()


def doubled(t: Tensor) -> Tensor:
    t.mul_(2)
    return t.sin()


def outcome(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def test_ops_that_compiled_code_calls_are_not_recomputed() -> None:
    compiled = torch.compile(greatest, backend="inductor")
    x = torch.randn(4, 4, requires_grad=True)

    def run(policy: str | None, log: EventLog | None = None) -> list[Tensor]:
        with save_recompute_policy(policy, log=log) if policy else nullcontext():
            loss = compiled(x.sin()).sin().exp().sum()
        return outcome(loss, x)

    want, log = run(None), EventLog()
    assert all(map(torch.equal, run("recompute_all", log), want))
    again = recomputed(log)
    assert "aten.exp.default" in again
    assert not any("cummax" in name for _, name in log.events)


@pytest.mark.parametrize("written", ["a value", "an input", "a buffer of a module"])
def test_tensor_written_by_compiled_code_may_be_read_before_and_after(written: str) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("own", torch.full((4,), 3.0))

        def forward(self) -> Tensor:
            return doubled(self.own)

    def run(policy: str | None) -> list[Tensor]:
        def read(t: Tensor) -> Tensor:
            return t if policy else t.clone()  # else autograd raises

        module = Doubles()
        compiled: Callable[..., Tensor] = torch.compile(
            module if written == "a buffer of a module" else doubled, backend="inductor"
        )
        x, given = torch.linspace(0.1, 1, 4).requires_grad_(), torch.full((4,), 3.0)
        with save_recompute_policy(policy) if policy else nullcontext():
            if written == "a value":
                given = x.detach().exp()
            elif written == "a buffer of a module":
                given = module.own
            before = (x.exp() * read(given) * 1).sin()
            z = compiled() if written == "a buffer of a module" else compiled(given)
            loss = (before * z + (x.sin() * read(given) * 1).exp()).sum()
        return [*outcome(loss, x), given]

    try:
        found = run("recompute_all")
    except StaleError:
        # Autograd itself holds tensors from outside, and detects that they were overwritten.
        assert written != "a value"
    else:
        assert all(map(torch.equal, found, run(None)))


def test_input_that_only_recomputes_read_is_copied_before_compiled_code_writes_it() -> None:
    compiled = torch.compile(doubled, backend="inductor")
    x, given = torch.randn(4, requires_grad=True), torch.ones(4)
    with save_recompute_policy("recompute_all"):
        y = (x + given).sin()
        compiled(given)
        z = (x + given).sin()
    (found,) = torch.autograd.grad((y + z).sum(), x)
    assert torch.equal(found, (x + 1).cos().detach() + (x + 2).cos().detach())


def test_first_compilation_inside_a_region_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(greatest, backend="inductor")
    region = save_recompute_policy("recompute_all")
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "torch._dynamo")
        region.__enter__()
    compiled(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="run the step again"):
        region.__exit__(None, None, None)


def test_compiled_autograd_of_a_planned_model() -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 4), nn.GELU(), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh())
    model, x = nn.Sequential(*layers), torch.randn(3, 4)

    def run() -> list[Tensor | None]:
        model.zero_grad()
        loss = model(x).sum()
        with compiled_autograd._enable(torch.compile(backend="inductor")):
            loss.backward()
        return [p.grad for p in model.parameters()]

    want = run()
    ac_client.apply(model, policy=policy_for(model, x))
    with replays() as made_again:
        assert all(map(torch.equal, run(), want))
    assert made_again.made > 0
    assert made_again.alive == 0
