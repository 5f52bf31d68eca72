"""Test that planned models compile as unplanned ones do, and that neither's code takes the other's place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepping import outcome
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch.nn import functional

import ac_client

BACKEND = "aot_eager"
TIGHT_GB = 1.2e6 / 2**30

Middle = Callable[["Net", Tensor, float], Tensor]


class Net(nn.Module):
    """Two linear layers, with `middle` between them."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = nn.Linear(32, 128), nn.LayerNorm(128), nn.Linear(128, 32)
        self.middle = middle

    def forward(self, x: Tensor, number: float = 1.0) -> Tensor:
        return self.leave(functional.gelu(self.middle(self, self.enter(x), number))).square().mean()


class Products(nn.Module):
    """Two products, for which Inductor compiles no kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] @ self.weights[1]


class Other(nn.Module):
    """A model of another class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def plain(_model: Net, x: Tensor, _number: float) -> Tensor:
    return torch.tanh(x).exp()


def norm(model: Net, x: Tensor, _number: float) -> Tensor:
    return model.norm(x)  # its epsilon is a Python float


def constant(_model: Net, x: Tensor, number: float) -> Tensor:
    return functional.leaky_relu(x, negative_slope=number)  # its slope cannot be a tensor


def scaled(_model: Net, x: Tensor, number: float) -> Tensor:
    return torch.tanh(x * number).exp()  # the float becomes a tensor


def item(_model: Net, x: Tensor, _number: float) -> Tensor:
    return functional.leaky_relu(x, negative_slope=x.detach().abs().mean().item() * 0.01)


@pytest.mark.parametrize(
    ("middle", "dynamic", "budget_gb"),
    [
        (norm, True, TIGHT_GB),
        (constant, None, TIGHT_GB),
        (scaled, None, TIGHT_GB),
        (scaled, True, TIGHT_GB),
        (item, None, 2e6 / 2**30),
    ],
    ids=["norm", "constant", "scaled", "scaled-dynamic", "item"],
)
def test_python_floats_in_compiled_code(middle: Middle, dynamic: bool | None, budget_gb: float) -> None:
    def gradients(planned: bool) -> list[list[Tensor]]:
        torch.compiler.reset()
        model = Net(middle)
        call = torch.compile(model, backend=BACKEND, dynamic=dynamic)
        if planned:
            ac_client.apply(model, budget_gb)
        found = []
        for rows, number in ((512, 0.1), (512, 0.2), (384, 0.3), (96, 0.3)):
            x = torch.linspace(-1, 1, rows * 32).reshape(rows, 32)
            found.append(outcome(call, x, number))
            if planned and rows == 512 and middle is not item:  # a graph break keeps what crosses it
                assert ac_client.applied(model).report().recomputed > 0
        return found

    for got, want in zip(gradients(True), gradients(False), strict=True):
        assert all(map(torch.equal, got, want))


def broken(graph: Any, inputs: Any) -> Any:
    def fail(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("this backend compiles nothing")

    return aot_module_simplified(graph, inputs, fw_compiler=fail)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_suppressed_errors_of_a_backend(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(512, 32)
    with torch._dynamo.config.patch(suppress_errors=True):
        model = Net(plain)
        want = outcome(torch.compile(model, backend=broken), x)
        torch.compiler.reset()
        planned = ac_client.apply(Net(plain), TIGHT_GB)
        for _ in range(2):
            assert all(map(torch.equal, outcome(torch.compile(planned, backend=broken), x), want))
        assert ac_client.applied(planned).report().recomputed > 0
        assert "its backend cannot compile it" in caplog.text
        torch.compiler.reset()
        assert all(map(torch.equal, outcome(torch.compile(model, backend=broken), x), want))


def test_unplanned_model_compiles_as_if_nothing_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(cache: str) -> dict[str, Counter[str]]:
        torch.compiler.reset()
        counters.clear()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / cache))
        out = torch.compile(Products())(torch.ones(32, 32))
        out.backward(torch.ones_like(out))
        return {name: Counter(counters[name]) for name in ("aot_autograd", "inductor", "stats")}

    unplanned = counted("before"), counted("before")
    planned = ac_client.apply(Net(plain), TIGHT_GB)
    outcome(torch.compile(planned, backend=BACKEND), torch.ones(512, 32))
    assert (counted("after"), counted("after")) == unplanned
    assert unplanned[1]["aot_autograd"]["autograd_cache_hit"] == 1


def test_apply_keeps_the_code_of_other_models() -> None:
    torch.compiler.reset()
    bystanders = [torch.compile(model, backend=BACKEND) for model in (Other(), Net(plain))]
    x = torch.ones(512, 32)
    want = [outcome(call, x) for call in bystanders]
    counters.clear()
    for _ in range(3):
        planned = ac_client.apply(Net(plain), TIGHT_GB)
        got = outcome(torch.compile(planned, backend=BACKEND), x)
        assert ac_client.applied(planned).report().recomputed > 0
        assert all(map(torch.equal, got, want[1]))
    assert counters["stats"]["unique_graphs"] == 1  # for the three plans together
    for call, gradients in zip(bystanders, want, strict=True):
        assert all(map(torch.equal, outcome(call, x), gradients))
    assert counters["stats"]["unique_graphs"] == 1


def holding_its_inputs(graph: Any, _inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


def my_backend(graph: Any, inputs: Any) -> Any:
    return aot_module_simplified(graph, inputs, fw_compiler=holding_its_inputs)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("eager", "the backend 'eager' gave no graph"),
        (my_backend, "code of the backend 'my_backend' holds its inputs"),
        ("aot_eager", ""),
    ],
    ids=["eager", "unboxed", "aot_eager"],
)
def test_backends_that_cannot_keep_to_a_plan_are_named(
    backend: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    model = ac_client.apply(Net(plain), TIGHT_GB if backend is my_backend else 1.0)
    for _ in range(2):
        outcome(torch.compile(model, backend=backend), torch.ones(512, 32))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(words in warning for warning in warnings) if words else not warnings
