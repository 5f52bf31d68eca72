"""Test models that need their checkpoints for more than memory: parts write to memory that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import in_torch, ours, reentrant
from stepping import seed, seeded, smallest_found, trained
from torch import Tensor, nn

import ac_client
from ac_client import ContentsDiffer, StaleError
from autoac.planner import Policy, plan
from autoac.profiler import profile
from benchmarks.observed_profile import A_CPU

WIDTH, LAYERS = 32, 4
Call = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Layers with a frozen weight, which each layer puts into memory that all share, and a trained one."""

    def __init__(self, call: Call = in_torch) -> None:
        super().__init__()
        self.call = call
        self.frozen = [torch.randn(WIDTH, WIDTH) / 8 for _ in range(LAYERS)]
        self.memory = torch.zeros(WIDTH, WIDTH)
        self.trained = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(LAYERS):
            x = self.call(lambda x, i=i: self.layer(i, x), x)
        return x.square().mean()

    def layer(self, i: int, x: Tensor) -> Tensor:
        return (x @ self.filled(i)).sin() + self.trained[i](x)

    def filled(self, i: int) -> Tensor:
        return self.memory.copy_(self.frozen[i])


class ThroughData(Net):
    """The version counter of what autograd saves does not move."""

    def filled(self, i: int) -> Tensor:
        self.memory.data.copy_(self.frozen[i])
        return self.memory


class ThroughAlias(Net):
    """Layers have parameters of their own on the shared memory."""

    def __init__(self, call: Call = in_torch) -> None:
        super().__init__(call)
        self.base = nn.ParameterList(nn.Parameter(torch.empty(0), requires_grad=False) for _ in range(LAYERS))
        for parameter in self.base:
            parameter.data = self.memory

    def filled(self, i: int) -> Tensor:
        self.memory.copy_(self.frozen[i])
        return self.base[i]


class Swapped(Net):
    """One parameter gets the weight of each layer in turn. No op shows it."""

    def __init__(self, call: Call = in_torch) -> None:
        super().__init__(call)
        self.base = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    def filled(self, i: int) -> Tensor:
        self.base.data = self.frozen[i]
        return self.base


class Workspace(Net):
    """Layers write an activation of theirs into the shared memory."""

    def filled(self, i: int) -> Tensor:
        return self.memory.copy_(self.frozen[i]).mul_(2)


class ThroughNumpy(Net):
    """Neither an op nor a version counter shows the write."""

    def filled(self, i: int) -> Tensor:
        self.memory.numpy()[...] = self.frozen[i].numpy()
        return self.memory


@pytest.fixture(autouse=True)
def code_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which functions earlier tests have run."""
    monkeypatch.setattr("autoac.tape.unseen.checked_code._checked_sites", set())


KINDS = [Net, ThroughData, ThroughAlias, Swapped, Workspace]


def batch(step: int) -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))


def gradients(model: nn.Module, steps: int = 3) -> list[Tensor]:
    return trained(model, lambda step: batch(step).requires_grad_(), steps)


@pytest.mark.parametrize("call", [in_torch, reentrant, ours], ids=["torchs", "reentrant", "ours"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_needed_checkpoints_are_left_to_torch_with_a_warning(
    kind: type[Net], call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(map(torch.equal, gradients(ac_client.apply(seeded(kind, call), 1.0)), gradients(seeded(kind))))
    assert caplog.text.count("memory that they share") == 1


def test_needed_checkpoints_are_left_to_torch_under_a_plan_that_recomputes() -> None:
    smallest = smallest_found(lambda: gradients(ac_client.apply(seeded(ThroughAlias), 1e-6)))
    planned = gradients(ac_client.apply(seeded(ThroughAlias), 1.01 * smallest / 2**30))
    assert all(map(torch.equal, planned, gradients(seeded(ThroughAlias))))


FAKEABLE = [kind for kind in KINDS if kind is not Swapped]


def with_memory_of_its_own(function: Any, x: Tensor) -> Tensor:
    """Call a layer plainly. If the layers shared memory, backward would fail."""
    (model,) = (cell.cell_contents for cell in function.__closure__)
    model.memory = model.memories.pop()
    return function(x)  # type: ignore[no-any-return]


def policy_of_plain_calls(kind: type[Net]) -> Policy:
    plain: Any = seeded(kind, with_memory_of_its_own)
    plain.memories = [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)]
    found = profile(plain, batch(0), on=A_CPU)
    peak = plan(found, budget_bytes=1 << 40).policy().predicted.peak_bytes
    return plan(found, budget_bytes=int(peak * 0.95)).policy()


@pytest.mark.parametrize("kind", FAKEABLE, ids=lambda kind: kind.__name__)
def test_policy_that_takes_a_needed_checkpoint_over_is_an_error(kind: type[Net]) -> None:
    model = ac_client.apply(seeded(kind), policy=policy_of_plain_calls(kind))
    with pytest.raises((ContentsDiffer, StaleError), match=r"clone\(\)|take_over_checkpoints"):
        gradients(model, 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_checkpoint_of_a_part_with_shared_memory_is_an_error(kind: type[Net]) -> None:
    with pytest.raises((ContentsDiffer, StaleError)):
        gradients(seeded(kind, ours), 1)


@pytest.mark.parametrize("call", [in_torch, ours], ids=["torchs", "ours"])
def test_unseen_write_between_checkpoints_is_an_error_in_the_observed_step(call: Call) -> None:
    model = ac_client.apply(seeded(ThroughNumpy, call), 1.0)
    with pytest.raises(ContentsDiffer, match="take_over_checkpoints"):
        gradients(model, 1)


class Statistics(nn.Module):
    """Checkpoints share a batch norm, whose statistics autograd saves, each call changes, and none reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = in_torch(lambda x: self.layer(self.norm(x)).sin(), x)
        return x.square().mean()


def test_statistics_of_batch_norm_need_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    seed(0)
    smallest = smallest_found(lambda: gradients(ac_client.apply(Statistics(), 1e-6)))
    model = ac_client.apply(Statistics(), 1.01 * smallest / 2**30)
    gradients(model)
    assert "checkpoint" not in caplog.text
    assert ac_client.applied(model).report().recomputed > 0
