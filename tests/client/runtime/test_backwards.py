"""Test several, partial and nested backward passes over one graph, and reads of the graph from outside."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.runtime.replay import EventLog
from autoac.tape.runtime.write_guard import StaleError


def chain(x: Tensor) -> Tensor:
    y = (x * 2).exp()
    return (y.sin() * y.tanh()).exp()


def test_reading_a_saved_tensor_outside_of_backward_consumes_no_use() -> None:
    x = torch.randn(5, requires_grad=True)
    log = EventLog()
    with save_recompute_policy("recompute_all", log=log):
        y = x.exp().sin()
    want = x.detach().exp()
    for _ in range(3):
        assert torch.equal(y.grad_fn._saved_self, want)
    y.sum().backward()
    assert torch.equal(x.grad, want.cos() * want)


def test_backward_on_another_thread() -> None:
    x = torch.randn(5, requires_grad=True)
    (want,) = torch.autograd.grad(chain(x).sum(), x)
    with save_recompute_policy("recompute_all"):
        loss = chain(x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("written", ["parameter", "input", "view of input", "saved value"])
def test_write_after_forward_is_an_error_as_in_autograd(written: str) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 5))
    given = torch.randn(5, 5, requires_grad=True)
    with save_recompute_policy([torch.ops.aten.mm]):
        kept = given.t() @ parameter
        z = kept.exp().sin()
    with torch.no_grad():
        {"parameter": parameter, "input": given, "view of input": given[0], "saved value": kept}[
            written
        ].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        z.sum().backward()
    assert isinstance(raised.value, StaleError)
