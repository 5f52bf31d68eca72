"""Test that an observed step that raises leaves nothing in the process, and that backwards may be batched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.profiler.observed_step import ObservedStep
from autoac.tape.capture import garbage_collection
from autoac.tape.capture.allocations import AllocationRecord
from autoac.tape.capture.op_recorder import OpRecorder
from autoac.tape.capture.step_tape import StepTape
from autoac.tape.runtime.policy_context import active
from autoac.tape.runtime.saved_tensor_hooks import RegionHooks
from autoac.tape.runtime.tracked_storages import TrackedStorages
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.torch_trace import profiler_is_running
from autoac.tape.unseen.held_storages import recorded

PARTS = [
    (AllocationRecord, "__enter__"),
    (RegionHooks, "enter"),
    (OpRecorder, "begin"),
    (OpRecorder, "end"),
    (RegionHooks, "pack"),
    (OpRecorder, "end_forward"),
    (TrackedStorages, "close"),
    (ObservedStep, "begin_backward"),
    (ObservedStep, "note_backward"),
    (StepTape, "unpack"),
    (StepTape, "note_replay"),
    (ObservedStep, "end_backward"),
    (ObservedStep, "end"),
    (ObservedStep, "profile"),
]


class Broken(Exception):
    pass


def make() -> nn.Sequential:
    blocks = ((nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(3))
    return nn.Sequential(*[nn.Sequential(*block) for block in blocks])


def train(model: nn.Module, steps: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(64, 16)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the freeze of tests/conftest.py, inside of which a step freezes nothing."""
    monkeypatch.setattr(garbage_collection, "_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize(("owner", "name"), PARTS, ids=lambda part: getattr(part, "__name__", part))
def test_part_that_raises_leaves_nothing(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make()
    want = train(other)
    model = make()
    ac_client.apply(model, budget_gb=1.0)

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises(Broken):
            train(model)
    assert torch.autograd.Variable._execution_engine is private.execution_engine
    assert not profiler_is_running()
    assert gc.get_freeze_count() == 0
    assert recorded.held is None
    assert active.region is None
    assert private.len_dispatch_stack() == 0
    assert private.top_saved_tensors_default_hooks(True) is None
    assert all(map(torch.equal, train(other), want))


def of_batch(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, parameters, torch.eye(4), is_grads_batched=True)


def of_vmap(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    return torch.func.vmap(lambda grad: torch.autograd.grad(loss, parameters, grad))(torch.eye(4))


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin() * torch.rand_like(x)
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Noise.apply(x.cos())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("backward", [of_batch, of_vmap])
def test_backward_may_be_batched(backward: Callable[..., tuple[Tensor, ...]]) -> None:
    def jacobians(budget_mib: float | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(make(), Noisy(), make(), nn.Linear(16, 4))
        if budget_mib is not None:
            ac_client.apply(model, budget_gb=budget_mib / 1024)
        found: list[Tensor] = []
        for _ in range(3):
            loss = model(torch.randn(256, 16)).square().mean(0)
            found += backward(loss, list(model.parameters()))
        return found

    assert all(map(torch.equal, jacobians(1.6), jacobians(None)))
