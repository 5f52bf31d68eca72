"""Test that a profile costs little: no garbage collection of the heap, and no needless forwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoac.profiler import observe
from autoac.profiler import static_memory as static
from autoac.profiler.static_memory import optimizer_bytes
from autoac.tape.capture import garbage_collection
from autoac.tape.capture.allocations import AllocationRecord
from autoac.tape.capture.garbage_collection import frozen_heap, no_garbage_collection

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def heap_of_a_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unfreeze what tests/conftest.py has frozen."""
    monkeypatch.setattr(garbage_collection, "_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()


def test_heap_is_frozen_while_a_step_is_profiled_and_unfrozen_afterwards() -> None:
    frozen: list[int] = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            frozen.append(gc.get_freeze_count())
            return super().forward(x)

    observe(Looking(4, 4), (torch.ones(4),), {})
    assert frozen[0] > 0
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_heap_is_frozen_while_allocations_are_recorded_and_unfrozen_afterwards() -> None:
    """The first step of a planned model is such a record."""
    with AllocationRecord(CPU):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_heap_frozen_by_the_user_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with frozen_heap():
            pass
        assert 0 < gc.get_freeze_count() <= before  # a frozen object may be freed
    finally:
        gc.unfreeze()


def test_heap_is_frozen_again_after_records_that_overlap() -> None:
    first, second = frozen_heap(), frozen_heap()
    for record in (first, second):
        record.__enter__()
    for record in (first, second):
        record.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0
    with frozen_heap():
        assert gc.get_freeze_count() > 0


def test_garbage_collection_switched_off_by_the_user_stays_off() -> None:
    gc.disable()
    try:
        with frozen_heap(), no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        torch.optim.Adafactor,
    ],
    ids=["SGD", "Adam", "Adafactor"],
)
def test_optimizer_of_many_equal_parameters_runs_on_a_few_of_them(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = 0
    dispatch = static._Workspace.__torch_dispatch__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        ran += 1
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(static._Workspace, "__torch_dispatch__", counted)
    shapes = [(3, 5)] * 9 + [(7,)] + [(5, 3)] * 2 + [(7,)] * 4

    def bytes_of() -> tuple[Any, int]:
        nonlocal ran
        ran = 0
        optimizer = make([nn.Parameter(torch.ones(shape)) for shape in shapes])
        return optimizer_bytes(optimizer, CPU), ran

    few, ran_few = bytes_of()
    monkeypatch.setattr(static, "MOST_EQUAL", len(shapes))
    each, ran_each = bytes_of()
    assert few == each
    assert few.state > 0
    assert ran_few < ran_each / 2
