"""Test backward under compiled autograd, which traces the unpack hooks; they must stay lazy and opaque."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stepping import EventLog, Replays, recomputed, replays
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from autoac.tape.runtime.policy_context import save_recompute_policy


class Compiled:
    """Enable compiled autograd with a backend, and record what it compiles."""

    def __init__(self, backend: str) -> None:
        self.counter = CompileCounterWithBackend(backend)
        self._compiler = torch.compile(backend=self.counter)
        self.graphs = 0  # traced by compiled autograd

    def __call__(self, graph: Any) -> Any:
        self.graphs += 1
        return self._compiler(graph)


@pytest.fixture(params=["aot_eager"])
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    torch._dynamo.reset()
    counters.clear()
    yield Compiled(request.param)
    torch._dynamo.reset()


def chain(x: Tensor) -> Tensor:
    """Run 32 ops, of which `EVERY_8TH` saves every 8th."""
    for _ in range(4):
        for _ in range(7):
            x = x.sin()
        x = x.tanh()
    return x


EVERY_8TH = [torch.ops.aten.tanh]


def step(
    run: Callable[[], Tensor], policy: Any, around: contextlib.AbstractContextManager[Any]
) -> tuple[EventLog, Replays]:
    """Run one step, with only its backward under `around`."""
    log = EventLog()
    torch.manual_seed(1)
    with save_recompute_policy(policy, log=log):
        loss = run()
    with replays() as made_again, around:
        loss.backward()
    return log, made_again


@pytest.mark.parametrize("policy", ["recompute_all", EVERY_8TH], ids=["all", "every 8th saved"])
def test_as_many_tensors_are_alive_as_under_the_engine(compiled: Compiled, policy: Any) -> None:
    x = torch.randn(8, requires_grad=True)
    log, engine = step(lambda: chain(x).sum(), policy, contextlib.nullcontext())
    want, x.grad = x.grad, None
    assert engine.most == (28 if policy == "recompute_all" else 6)
    for _ in range(3):
        again, traced = step(lambda: chain(x).sum(), policy, compiled_autograd._enable(compiled))
        assert compiled.graphs > 0
        assert compiled.counter.frame_count > 0
        assert torch.equal(x.grad, want)
        assert recomputed(again) == recomputed(log), "lazily, once each, in the same order"
        assert traced.most <= engine.most
        assert traced.alive == 0
        x.grad = None
    assert not counters["graph_break"]


def test_further_steps_compile_nothing(compiled: Compiled) -> None:
    x = torch.randn(8, requires_grad=True)
    frames = []
    for _ in range(5):
        step(lambda: chain(x).sum(), EVERY_8TH, compiled_autograd._enable(compiled))
        frames.append(compiled.counter.frame_count)
        x.grad = None
    assert frames[1:] == [frames[1]] * 4, "the first sees each key as a constant, the second as a symbol"


def test_dropout_views_and_writes_in_place(compiled: Compiled) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 12), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            left, right = self.a(x).chunk(2, -1)
            y = nn.functional.dropout(left.sigmoid() * right.tanh(), 0.5)
            y = y.clone().mul_(2)
            return (self.b(y).t() * y.t()).exp().sum()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 6)
    step(lambda: model(x), "must_save_all", contextlib.nullcontext())
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        step(lambda: model(x), "recompute_all", compiled_autograd._enable(compiled))
        for p, w in zip(model.parameters(), want, strict=True):
            assert torch.equal(p.grad, w)
        model.zero_grad()


def test_pass_ends_with_its_graph_task_although_its_callback_is_not_called(compiled: Compiled) -> None:
    x = torch.randn(8, requires_grad=True)
    (want,) = torch.autograd.grad(chain(x).sum(), x)
    with save_recompute_policy("recompute_all"):
        loss = chain(x).sum()
    with compiled_autograd._enable(compiled), replays() as made_again:
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert made_again.alive == 0
        (second,) = torch.autograd.grad(loss, x)
        assert made_again.alive == 0
    assert made_again.made == 2 * 32
    assert torch.equal(first, want)
    assert torch.equal(second, want)


def linears() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(3, 4, requires_grad=True)


def test_split_backward_has_the_same_gradients_and_recomputes_in_both_halves(compiled: Compiled) -> None:
    model, x = linears()
    model(x).sum().backward()
    want = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    log = EventLog()
    with save_recompute_policy("recompute_all", log=log):
        out = model(x)
    with compiled_autograd._enable(compiled), replays() as made_again:
        _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
        assert made_again.alive == 0, "the halves are separate passes here"
        halfway = len(recomputed(log))
        stage_backward_weight(model.parameters(), groups)
        assert made_again.alive == 0
    assert compiled.graphs > 1
    assert halfway == 2 * 3
    assert len(recomputed(log)) > halfway
    for found, wanted in zip([x.grad, *(p.grad for p in model.parameters())], want, strict=True):
        assert torch.equal(found, wanted)
