"""Test a split backward: input gradients first, weight gradients later, in one backward pass."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from checkpoints import same
from stepping import EventLog, nothing_left, recomputed, replays
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from ac_client import save_recompute_policy, split_backward


class Attention(nn.Module):
    """A pre-norm attention and MLP block, without views of a fused projection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))
        x = x + self.o(y)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def linears() -> nn.Module:
    """Return 8 linear layers, each followed by a function that saves its output."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Tanh())))


def attention() -> nn.Module:
    return nn.Sequential(Attention(), nn.Dropout(0.5), Attention())


MODELS = {"linears": (linears, (3, 4)), "attention": (attention, (2, 3, 8))}
LINEAR = "aten.addmm"


def model_and_input(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    return model, torch.randn(shape).requires_grad_()


def forward(model: nn.Module, x: Tensor, log: EventLog, policy: Any = "recompute_all") -> Tensor:
    torch.manual_seed(1)
    with save_recompute_policy(policy, log=log):
        out: Tensor = model(x)
    return out


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    found = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    for p in model.parameters():
        p.grad = None
    return found


def plainly(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(1)
    out = model(x)
    out.backward(torch.ones_like(out))
    return gradients(model, x)


@pytest.mark.parametrize("name", MODELS)
def test_halves_of_a_stage_leave_nothing_in_between(name: str) -> None:
    model, x = model_and_input(name)
    want = plainly(model, x)
    log = EventLog()
    out = forward(model, x, log)
    with replays() as made_again:
        _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
        assert made_again.most > made_again.alive == 0
        halfway = recomputed(log)
        stage_backward_weight(model.parameters(), groups)
    assert same(gradients(model, x), want)
    if name == "linears":
        assert sum(LINEAR in op for op in halfway) == 8
        assert sum(LINEAR in op for op in recomputed(log)) == 8 + sum(range(8)), "those before each"


def test_halves_of_two_microbatches_may_interleave() -> None:
    model, x = model_and_input("linears")
    other = torch.randn(3, 4, requires_grad=True)
    want = plainly(model, x), plainly(model, other)
    outs = [forward(model, t, EventLog()) for t in (x, other)]
    groups = [
        stage_backward_input([out], [torch.ones_like(out)], [t], model.parameters())[1]
        for out, t in zip(outs, (x, other), strict=True)
    ]
    for t, group, wanted in zip((x, other), groups, want, strict=True):
        stage_backward_weight(model.parameters(), group)
        assert same(gradients(model, t), wanted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["recompute_all", [torch.ops.aten.addmm]], ids=["all", "some"])
def test_second_half_frees_everything(name: str, policy: Any) -> None:
    model, x = model_and_input(name)
    for p in [x, *model.parameters()]:
        p.grad = torch.zeros_like(p)

    def both() -> None:
        out = forward(model, x, EventLog(), policy)
        _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], model.parameters())
        del out
        stage_backward_weight(model.parameters(), groups)

    both()
    forward(model, x, EventLog(), policy).sum().backward()
    with nothing_left():
        both()
        gc.collect()  # torch's functions leave reference cycles through their hooks


def test_end_of_the_block_frees_cached_tensors() -> None:
    model, x = model_and_input("linears")
    loss = forward(model, x, EventLog()).sum()
    with replays() as made_again:
        with split_backward():
            torch.autograd.grad(loss, x, retain_graph=True)
            assert made_again.alive == 7, "what the weights of all linears but the first wait for"
        assert made_again.alive == 0


def test_input_half_that_raises_caches_nothing() -> None:
    model, x = model_and_input("linears")
    loss = forward(model, x, EventLog()).sum()

    def boom(_: Tensor) -> None:
        raise ValueError("boom")

    x.register_hook(boom)
    with replays() as made_again, split_backward():
        with pytest.raises(ValueError, match="boom"):
            torch.autograd.grad(loss, x, retain_graph=True)
        assert made_again.most > 0
        assert made_again.alive == 0


def test_graph_tasks_in_a_block_are_one_pass() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    want = torch.autograd.grad((x.exp() @ w).sin().sum(), (x, w))
    log = EventLog()
    with save_recompute_policy("recompute_all", log=log):
        hidden = x.exp() @ w
        loss = hidden.sin().sum()
    with split_backward():
        dx, dhidden = torch.autograd.grad(loss, (x, hidden), retain_graph=True)
        assert recomputed(log) == ["aten.exp.default", "aten.mm.default"]
        (dw,) = torch.autograd.grad(hidden, w, dhidden)
        assert recomputed(log) == ["aten.exp.default", "aten.mm.default"]
    assert same([dx, dw], list(want))


def test_second_part_that_unpacks_everything_again_is_a_separate_pass() -> None:
    model, x = model_and_input("linears")
    want = plainly(model, x)
    log = EventLog()
    loss = forward(model, x, log).sum()
    with split_backward():
        (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
        dw = torch.autograd.grad(loss, list(model.parameters()))
    assert same([dx, *dw], want)
    assert len(recomputed(log)) <= 2 * 16


def test_second_whole_backward_in_a_block_is_a_separate_pass() -> None:
    model, x = model_and_input("attention")
    want = plainly(model, x)
    log = EventLog()
    out = forward(model, x, log).sum()
    with split_backward():
        out.backward(retain_graph=True)
        first = len(recomputed(log))
        assert same(gradients(model, x), want)
        out.backward()
    assert same(gradients(model, x), want)
    assert len(recomputed(log)) == 2 * first
