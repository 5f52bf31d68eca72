"""Test that state in Python objects counts each training step once, and a fake step not at all."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
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


@dataclass(slots=True)
class WithSlots:
    calls: int = 0
    inner: Statistics | None = None

    def count(self) -> float:
        self.calls += 1
        self.inner = self.inner or Statistics()
        return self.calls + self.inner.count()


@dataclass(frozen=True)
class Frozen:
    numbers: numpy.ndarray[Any, Any]

    def count(self) -> float:
        self.numbers[1:] += 1
        return float(self.numbers.sum())


class Bounded(list[int]):
    """A subclass with methods that must not be called."""

    def clear(self) -> None:
        raise AssertionError

    def count_up(self) -> float:
        self.append(len(self))
        return float(sum(self))


class Shared:
    calls = 0

    def count(self) -> float:
        type(self).calls += 1
        return self.calls


class Unregistered:
    """Hide a module from its parent, in an object with a cycle."""

    def __init__(self) -> None:
        self.of = [Plain(Statistics().count)]
        self.itself = self

    def count(self) -> float:
        return self.of[0].count()


class Locked:
    def __init__(self) -> None:
        self.lock, self.calls = threading.Lock(), 0

    def count(self) -> float:
        with self.lock:
            self.calls += 1
        return self.calls


def closure() -> Callable[[], float]:
    calls = 0

    def count() -> float:
        nonlocal calls
        calls += 1
        return calls

    return count


def by_default(made: dict[int, int] = {}) -> float:  # noqa: B006 - this is the point
    made[len(made)] = 1
    return len(made)


def with_attribute() -> float:
    with_attribute.calls += 1  # type: ignore[attr-defined]
    return float(with_attribute.calls)  # type: ignore[attr-defined]


with_attribute.calls = 0  # type: ignore[attr-defined]


def in_a_table(table: Any) -> float:
    table["calls"] = table.get("calls", 0) + 1
    if isinstance(table, OrderedDict):
        table.move_to_end("calls", last=False)
    return float(next(iter(table.values())) + table["calls"])


def at_the_end(numbers: Any) -> float:
    numbers.append(numbers[-1] + 1)
    return float(numbers[-1])


KEPT: dict[str, Callable[[], Callable[[], float]]] = {
    "dataclass": lambda: Statistics().count,
    "slots": lambda: WithSlots().count,
    "frozen, with an array": lambda: Frozen(numpy.zeros(3)).count,
    "array of objects": lambda: numpy.array([Statistics()])[0].count,
    "subclass of a list": lambda: Bounded().count_up,
    "nested": lambda: SimpleNamespace(of=({"deep": deque([Statistics()])},)).of[0]["deep"][0].count,
    "attribute of a class": lambda: Shared().count,
    "hidden module": lambda: Unregistered().count,
    "lock": lambda: Locked().count,
    "closure": closure,
    "default argument": lambda: by_default,
    "attribute of a function": lambda: with_attribute,
    "counter": lambda: partial(in_a_table, Counter()),
    "ordered": lambda: partial(in_a_table, OrderedDict(first=1)),
    "user's dictionary": lambda: partial(in_a_table, UserDict()),
    "array": lambda: partial(at_the_end, array("d", [1.0])),
    "bytes": lambda: partial(at_the_end, bytearray(b"1")),
}


class Plain(nn.Module):
    def __init__(self, count: Callable[[], float]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).tanh() / (1 + self.count())
        return out.square().sum()


def counted_and_trained(make: Callable[[], Callable[[], float]], *, planned: bool) -> list[Any]:
    Shared.calls = 0
    with_attribute.calls = 0  # type: ignore[attr-defined]
    by_default.__defaults__[0].clear()  # type: ignore[index]
    torch.manual_seed(0)
    model = Plain(make())
    if planned:
        ac_client.apply(model, 1.0)
    results: list[Any] = []
    for _ in range(3):
        model.zero_grad()
        model(X).backward()
        results += [p.grad.tolist() for p in model.parameters() if p.grad is not None]
    return [*results, model.count()]


@pytest.mark.parametrize("name", KEPT)
def test_state_in_objects_counts_each_step_once(name: str) -> None:
    make = KEPT[name]
    assert counted_and_trained(make, planned=True) == counted_and_trained(make, planned=False)


def test_forward_hook_that_fills_a_list_sees_each_step_once() -> None:
    seen: list[float] = []
    model = Plain(lambda: 0.0)
    model.register_forward_hook(lambda _module, _args, out: seen.append(out.item()))
    ac_client.apply(model, 1.0)
    model(X).backward()
    model(X).backward()
    assert len(seen) == 2


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: partial(next, numbers()),
        lambda: itertools.count(1).__next__,
        lambda: Frozen(numpy.zeros(3)).count,
        lambda: Statistics().count,
    ],
)
def test_real_step_changes_the_state_of_one_forward(make: Callable[[], Callable[[], float]]) -> None:
    model, other = Plain(make()), make()
    profile(model, X)
    other()
    assert model.count() == other()


def test_iterator_that_forward_does_not_read_is_accepted() -> None:
    model = Plain(lambda: 1.0)
    model.ids = itertools.count()  # type: ignore[assignment]
    profile(model, X, on=H100)
    assert next(model.ids) == 0  # type: ignore[call-overload]
