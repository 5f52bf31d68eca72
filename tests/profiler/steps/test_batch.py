"""Test what a step does to its batch: a fake one nothing, a real one what the forward does."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from blocks import Body
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import build, simulate
from autoac.profiler import DATASHEETS, CannotProfile, Loop, observe, profile


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class Bag:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def in_place(batch: Any) -> Tensor:
    batch["x"].mul_(2)
    batch["x"][batch["y"] < 0] = 0
    return batch["x"]


def pops(batch: Any) -> Tensor:
    x = batch.pop("x") + 1
    batch["x and 1"] = x
    return x * batch["y"]


def sets(batch: Any) -> Tensor:
    batch.x = torch.cat([batch.x, batch.y])
    return batch.x


def through_data(batch: Any) -> Tensor:
    batch["x"].data.t().add_(1)
    return batch["x"] + batch["y"]


X, Y = torch.linspace(-1, 2, 32).view(8, 4), torch.linspace(3, -2, 32).view(8, 4)

BATCHES: list[tuple[Callable[[Any], Tensor], Any]] = [
    (in_place, {"x": X, "y": Y}),
    (through_data, {"x": X, "y": Y}),
    (pops, UserDict({"x": X, "y": Y})),
    (sets, Bag(X, Y)),
]


def model_of(body: Callable[[Any], Tensor]) -> Body:
    return Body(lambda m, batch: m.inner(body(batch)).sin().sum())


def contents(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name."""
    return dict(batch) if isinstance(batch, (dict, UserDict)) else dict(vars(batch))


@pytest.mark.parametrize(("body", "batch"), BATCHES)
def test_fake_step_leaves_the_batch_unchanged(body: Any, batch: Any) -> None:
    batch = copy.deepcopy(batch)
    before, held = copy.deepcopy(contents(batch)), contents(batch)
    profile(model_of(body), batch, on=DATASHEETS["h100"])
    after = contents(batch)
    assert after.keys() == before.keys()
    assert all(after[name] is held[name] and torch.equal(after[name], before[name]) for name in before)


def test_each_forward_of_a_step_pops_from_a_dictionary_of_its_own() -> None:
    batch = {"x": X.clone(), "y": Y}
    assert observe(model_of(pops), (batch,), {}, loop=Loop(3)).forward_ends
    assert batch.keys() == {"x", "y"}


@pytest.mark.parametrize(("body", "batch"), BATCHES)
def test_first_step_of_a_planned_model_trains_on_the_same_numbers(body: Any, batch: Any) -> None:
    def step(planned: bool) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        model, own = model_of(body), copy.deepcopy(batch)
        if planned:
            ac_client.apply(model, 1.0)
        model(own).backward()
        assert model.inner.weight.grad is not None
        return model.inner.weight.grad, contents(own)

    (plain, plain_batch), (planned, planned_batch) = step(planned=False), step(planned=True)
    assert torch.equal(plain, planned)
    assert all(torch.equal(planned_batch[name], value) for name, value in plain_batch.items())


def test_tensors_that_a_forward_adds_to_its_batch_are_held_through_the_step() -> None:
    """The 128 bytes of `batch["x and 1"]` are not needed by backward."""
    torch.manual_seed(0)
    found = profile(model_of(pops), {"x": X, "y": Y})
    graph = build(found)
    model, own = model_of(pops), {"x": X, "y": Y}
    with AllocatorTimeline(base=found.static.total) as timeline:
        model(own).backward()
    assert timeline.peak_bytes == simulate(graph, graph.everything).peak.live_bytes


@pytest.mark.parametrize("batch", [Pair(X, Y), Bag(X, Y), UserDict({"x": X, "y": Y}), [{"x": X}, (Y,)]])
def test_tensors_of_a_batch_count_at_any_depth(batch: Any) -> None:
    assert profile(Body(lambda m, _: m.inner(X).sum()), batch).static.inputs == X.nbytes + Y.nbytes


def test_tensor_passed_twice_stays_one_tensor() -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x if x is y else x + y)

    assert len(profile(Asks(4, 4), X, X).ops) == 1
    assert len(profile(Asks(4, 4), X, Y).ops) == 2


def test_output_of_another_module_may_be_written_in_place() -> None:
    head, scale = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.Parameter(torch.ones(4))
    x = (X * scale).add(0)
    found = profile(head, x, loss=torch.sum)
    assert found.gradient_nbytes == (4 * 4 + 4) * 4 + x.nbytes
    assert scale.grad is None
    x.sum().backward()  # its graph is there
    assert len(profile(head, x, loss=torch.sum, on=DATASHEETS["h100"]).ops) == len(found.ops)


def test_modules_that_forward_registers_are_removed_after_a_fake_step() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "more"):
                self.more = nn.Linear(4, 4)
                self.scale = nn.Parameter(torch.rand(4))
                self.register_buffer("shift", torch.rand(4), persistent=False)
                self.linear.add_module("inside", nn.ReLU())
                self.linear.register_forward_hook(lambda _module, _args, out: out * 2)
            return self.more(self.linear(x)) * self.scale + self.shift

    model = Grows()
    profile(model, X, loss=torch.sum, on=DATASHEETS["h100"])
    assert [name for name, _ in model.named_parameters()] == ["linear.weight", "linear.bias"]
    assert not list(model.named_buffers())
    assert list(model.modules()) == [model, model.linear]
    assert not model.linear._forward_hooks
    assert not model._non_persistent_buffers_set


def test_model_with_lazy_layers_is_refused_with_advice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    with pytest.raises(CannotProfile, match=r"1\.weight .* run one batch through the model first"):
        profile(model, X, loss=torch.sum)


class Stacked(nn.Linear):
    def forward(self, parts: Any) -> Tensor:
        return torch.stack([super(Stacked, self).forward(x) for x in parts]).sum()


def test_iterator_in_a_batch_is_read_once_by_a_real_step_and_refused_by_a_fake_one() -> None:
    model, parts = Stacked(8, 8), [torch.randn(4, 8) for _ in range(2)]
    batch = iter(parts)
    with pytest.raises(CannotProfile, match=r"list_iterator, which can be read only once.*pass a list"):
        profile(model, batch, on=DATASHEETS["h100"])
    assert len(profile(model, batch).ops) == len(profile(model, parts).ops)
    assert not list(batch)
