"""Run backward through a checkpoint in every way: several, partial, double and inside the function."""

from __future__ import annotations

import pytest
import torch
from checkpoints import chain, graded, leaf, replayed, same
from stepping import SeenOps
from torch import Tensor

from ac_client import checkpoint


def test_grad_inside_the_function_and_backward_through_it(x: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        y = t.exp().sin()
        (g,) = torch.autograd.grad(y.cos().sum(), t, create_graph=True)
        return (g * y).tanh()

    want = torch.autograd.grad(f(x).sum(), x)
    with SeenOps() as ops:
        loss = checkpoint(f, x).sum()
    assert ops.ran["exp"] == 2  # the pass inside forward recomputes what it needs
    got, (again,) = graded(loss, x, "exp")
    assert again >= 1
    assert same(got, want)


def test_backward_inside_the_function_without_retaining_its_graph(x: Tensor, w: Tensor) -> None:
    def f(t: Tensor) -> Tensor:
        (t.exp().sin() * w).cos().sum().backward(inputs=[w])
        return t.cos().sin()

    f(x).sum().backward()
    want, x.grad, w.grad = (x.grad, w.grad), None, None
    with SeenOps() as ops:
        loss = checkpoint(f, x).sum()
    assert ops.ran["exp"] == 2
    assert torch.equal(w.grad, want[1])
    loss.backward()
    assert torch.equal(x.grad, want[0])
    assert torch.equal(w.grad, want[1]), "the backward inside must not run a second time"


def test_each_pass_with_retain_graph_recomputes_the_ops(x: Tensor) -> None:
    want = torch.autograd.grad(chain(x).sum(), x)
    loss = checkpoint(chain, x).sum()
    for retain in (True, True, False):
        got, counts = graded(loss, x, "exp", retain_graph=retain)
        assert counts == [1]
        assert same(got, want)


def test_second_backward_without_retain_graph_raises_the_error_of_torch(x: Tensor) -> None:
    loss = checkpoint(chain, x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_partial_backward_recomputes_only_what_its_inputs_need(x: Tensor, w: Tensor) -> None:
    def f(t: Tensor, v: Tensor) -> Tensor:
        return t.exp().sin() + v.tan().cos()

    f(x, w).sum().backward()
    want, x.grad, w.grad = (x.grad, w.grad), None, None
    loss = checkpoint(f, x, w).sum()
    assert replayed(lambda: loss.backward(inputs=[w], retain_graph=True), "exp", "tan") == [0, 1]
    assert x.grad is None
    assert replayed(lambda: loss.backward(inputs=[x]), "exp", "tan") == [1, 0]
    assert same([x.grad, w.grad], want)


def test_each_pass_of_a_double_backward_recomputes_the_ops(x: Tensor) -> None:
    def second(y: Tensor) -> tuple[list[Tensor], list[int]]:
        got: list[Tensor] = []
        counts = replayed(
            lambda: got.extend(torch.autograd.grad(y.sum(), x, create_graph=True)), "exp"
        ) + replayed(lambda: got.extend(torch.autograd.grad(got[0].pow(2).sum(), x)), "exp")
        return got, counts

    want, nothing = second(chain(x))
    got, counts = second(checkpoint(chain, x))
    assert same(got, want)
    assert nothing == [0, 0]
    assert counts == [1, 1]


def test_gradcheck_and_gradgradcheck() -> None:
    x, w = leaf(3, 3, dtype=torch.double), leaf(3, 3, seed=1, dtype=torch.double)

    def f(t: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda t: checkpoint(chain, t, v).exp(), t)

    assert torch.autograd.gradcheck(f, (x, w))
    assert torch.autograd.gradgradcheck(f, (x, w))


def test_backwards_of_one_group_recompute_once(x: Tensor, w: Tensor) -> None:
    from torch.utils.checkpoint import GraphExecGroup

    def two(t: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        shared = t.detach().exp()
        return [(shared * a).sum(), (shared * b).sum()]

    weights = leaf(4, 4, seed=1), leaf(4, 4, seed=2)

    def backward(outs: list[Tensor]) -> None:
        got[:] = [torch.autograd.grad(y, v)[0] for y, v in zip(outs, weights, strict=True)]

    got: list[Tensor] = []
    backward(two(x, *weights))
    want = list(got)
    outs = checkpoint(two, x, *weights)
    with GraphExecGroup():
        assert replayed(lambda: backward(outs), "exp") == [1]
    assert same(got, want)
    del outs
    outs = checkpoint(two, x, *weights)
    assert replayed(lambda: backward(outs), "exp") == [2]
