"""Test rules for GPUs that need no device. Tests that need one are in tests/standin."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.compiled_autograd

from autoac.tape.torch_facts import libraries
from autoac.tape.torch_facts.op_facts import facts_of


def test_call_in_backward_runs_once_inside_the_engine() -> None:
    tasks: list[int] = []
    with torch.no_grad():
        libraries.call_in_backward(
            lambda: tasks.append(torch._C._current_graph_task_id()), torch.device("cpu")
        )
    assert len(tasks) == 1
    assert tasks[0] >= 0


def test_call_in_backward_runs_inside_of_a_batched_pass() -> None:
    calls: list[int] = []
    x = torch.ones(2, requires_grad=True)
    y = x.clone()
    y.register_hook(lambda _: libraries.call_in_backward(lambda: calls.append(1), torch.device("cpu")))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert calls == [1]


def test_call_in_backward_is_never_compiled() -> None:
    def refuse(graph: object) -> None:
        raise AssertionError("it was compiled")

    calls: list[int] = []
    with torch._dynamo.compiled_autograd._enable(refuse):
        libraries.call_in_backward(lambda: calls.append(1), torch.device("cpu"))
    assert calls == [1]


@pytest.mark.parametrize("name", ["_cudnn_rnn", "miopen_rnn", "_cudnn_init_dropout_state"])
def test_recurrent_layers_of_a_gpu_are_never_recomputed(name: str) -> None:
    """Their dropout draws from a state of cuDNN that each call advances, so a second call would differ."""
    facts = facts_of(getattr(torch.ops.aten, name).default)
    assert facts.never_recomputed
    assert facts.must_save == "it draws from a state that its library keeps"
    assert facts.draws((), {}), "torch's generator too, for what it says of itself"
