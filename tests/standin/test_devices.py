"""Test which models with tensors on several devices are refused."""

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from stepping import same_gradients
from torch import Tensor, nn

import ac_client
from autoac.planner import bounds, build
from autoac.planner.units import GIB
from autoac.profiler import CannotProfile, observe, profile


class Chain(nn.Module):
    """Layers with a loss; each moves its input to its own device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.device)).tanh()
        return self.last(x.to(self.last.weight.device)).square().mean()


def spread(first: str, last: str) -> Chain:
    model = Chain()
    model.first.to(first)
    model.last.to(last)
    return model


X = torch.randn(8, 16)


@pytest.mark.parametrize(("first", "last"), [("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("cuda:1", "cpu")])
def test_parameters_on_several_devices_are_refused_at_once(gpu: ModuleType, first: str, last: str) -> None:
    model = spread(first, last)
    for refused in (
        lambda: profile(model, X),
        lambda: observe(model, (X,), {}),
        lambda: ac_client.apply(model, 1),
    ):
        with pytest.raises(CannotProfile, match=f"first.weight on {first}, last.weight on {last}") as caught:
            refused()
        assert "move model and batch to one device" in caught.value.instead
    model(X).backward()
    with pytest.raises(ac_client.NotApplied):
        ac_client.applied(model)


@pytest.mark.parametrize("place", ["cpu", "cuda:0"])
def test_batch_on_another_device_is_refused_in_the_first_forward(gpu: ModuleType, place: str) -> None:
    model, x = spread(place, place), X.to("cuda:1")
    ac_client.apply(model, 1)
    with pytest.raises(CannotProfile, match=f"first.weight on {place}, the batch on cuda:1"):
        model(x)
    model(x).backward()


class Mixed(nn.Module):
    """On the CPU: its first parameter, a scale; an index table; lengths, and a batch that forward moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh()).cuda()
        self.register_buffer("order", torch.arange(31, -1, -1))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x.to("cuda")[:, : int(lengths.max())]
        y = self.layers(self.layers(x) * self.scale)
        return (y[:, :, self.order].cumsum(-1) * self.scale).square().mean()


def test_scalars_tables_and_batches_on_the_cpu_are_planned_with_the_plain_numbers(gpu: ModuleType) -> None:
    x, lengths = torch.randn(4, 32, 32), torch.tensor([20, 30, 4, 9])
    model = Mixed()
    plain = copy.deepcopy(model)
    found = profile(model, x, lengths)
    assert found.environment.device_type == "cuda"
    assert found.static.inputs == 0
    known = bounds(build(found))
    others = found.static.total  # of the plain model, which is on the device too
    ac_client.apply(model, ((known.floor + known.ceiling) // 2 + others) / GIB)
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        gpu.reset_peak(0)
        before = gpu.live(0)
        model(x, lengths).backward()
        peak = gpu.peak(0) - before
        plain(x, lengths).backward()
    report = ac_client.applied(model).report()
    assert report.recomputed > 0
    assert report.predicted_peak_bytes == peak + found.static.total + others
    assert same_gradients(model, plain)
    assert all(parameter.grad.device == parameter.device for parameter in model.parameters())
