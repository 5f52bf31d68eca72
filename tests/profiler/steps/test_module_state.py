"""Test that state in Python objects counts each training step once, and a fake step not at all."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.profiler import DATASHEETS, CannotProfile, profile

X = torch.linspace(-1, 2, 32).view(8, 4)
H100 = DATASHEETS["h100"]


@dataclass
class Statistics:
    calls: int = 0
    average: float = 0.0
    history: list[float] = field(default_factory=list)

    def count(self) -> float:
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * self.calls
        self.history.append(self.average)
        return len(self.history) + self.average


@dataclass(frozen=True)
class Frozen:
    numbers: numpy.ndarray[Any, Any]

    def count(self) -> float:
        self.numbers[1:] += 1
        return float(self.numbers.sum())


class Plain(nn.Module):
    def __init__(self, count: Callable[[], float]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).tanh() / (1 + self.count())
        return out.square().sum()


def numbers() -> Any:
    yield from range(1, 100)


@pytest.mark.parametrize(
    "make",
    [
        lambda: partial(next, itertools.count()),
        lambda: itertools.count().__next__,
        lambda: Frozen(numpy.zeros(3)).count,
        lambda: Statistics().count,
    ],
)
def test_fake_step_leaves_what_the_model_holds(make: Callable[[], Callable[[], float]]) -> None:
    model = Plain(make())
    profile(model, X, on=H100)
    assert model.count() == make()()


class Prefetching:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def count(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("make", "what"),
    [(lambda: partial(next, numbers()), "generator"), (lambda: Prefetching().count, "lock")],
)
def test_model_that_cannot_be_copied_has_no_fake_step(make: Any, what: str) -> None:
    model = Plain(make())
    with pytest.raises(CannotProfile, match=rf"{what}.*without on=") as refused:
        profile(model, X, on=H100)
    assert refused.value.where == "Plain"
    assert model.count() == 1


class Wrapped(nn.Linear):
    """Replace `forward` by a function that closes over the module, as some wrappers do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        forward = self.forward
        self.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]


def test_function_that_refers_to_the_model_is_refused_in_a_fake_step() -> None:
    model = Wrapped()
    with pytest.raises(CannotProfile, match=r"refers to the model itself.*without on="):
        profile(model, X, on=H100)
    assert model.weight.grad is None


def test_fake_step_gives_no_gradient_to_tensors_outside_of_the_model() -> None:
    outside = torch.ones(4, requires_grad=True)
    model = nn.Linear(4, 4)
    profile(model, X, loss=lambda out: (out * outside).sum(), on=H100)
    assert outside.grad is None


STATES = [
    lambda: partial(next, numbers()),
    lambda: itertools.count(1).__next__,
    lambda: Frozen(numpy.zeros(3)).count,
    lambda: Statistics().count,
]


@pytest.mark.parametrize("make", STATES)
def test_real_step_changes_the_state_of_one_forward(make: Callable[[], Callable[[], float]]) -> None:
    model, other = Plain(make()), make()
    profile(model, X)
    other()
    assert model.count() == other()


@pytest.mark.parametrize("make", STATES)
def test_state_counts_each_planned_step_once(make: Callable[[], Callable[[], float]]) -> None:
    def trained(*, planned: bool) -> list[Any]:
        torch.manual_seed(0)
        model = Plain(make())
        if planned:
            ac_client.apply(model, 1.0)
        for _ in range(3):
            model(X).backward()
        return [*(p.grad.tolist() for p in model.parameters() if p.grad is not None), model.count()]

    assert trained(planned=True) == trained(planned=False)


def test_iterator_that_forward_does_not_read_is_accepted() -> None:
    model = Plain(lambda: 1.0)
    model.ids = itertools.count()  # type: ignore[assignment]
    profile(model, X, on=H100)
    assert next(model.ids) == 0  # type: ignore[call-overload]
