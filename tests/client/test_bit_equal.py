"""Train models, with dropout, autocast, shards and checkpoints of their own, plainly and under a budget.

Under every torch: the same numbers, within the budget, and some op is recomputed, else nothing is proven.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import scalar, seed, seeded
from torch import Tensor, nn

import ac_client
from autoac.planner import bounds, build, find_minimum_peak
from autoac.planner.units import GIB
from autoac.profiler import profile
from benchmarks.models.tiny import IRREGULAR, ZOO, ZooModel
from benchmarks.observed_step import same

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[], nn.Module]
Batch = Callable[[], dict[str, Any]]
Casts = Callable[[], contextlib.AbstractContextManager[Any]]

CASTS: dict[str, Casts] = {
    "fp32": contextlib.nullcontext,
    "bf16": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}
STEPS = 3


def budget_between(make: Make, batch: Batch, casts: Casts = contextlib.nullcontext) -> int:
    """Return a budget halfway between the plain peak and a peak near the smallest."""
    with casts():
        found = profile(seeded(make), **batch())
    smallest, plain = find_minimum_peak(found, gap=0.3, work_limit=0.3).found, bounds(build(found)).ceiling
    assert smallest < plain
    return (smallest + plain) // 2


def trained(
    make: Make, batch: Batch, budget: int | None = None, casts: Casts = contextlib.nullcontext
) -> list[Tensor | None]:
    """Train a new model, under a budget if one is passed.

    Returns:
        The loss, the gradients, the buffers and the state of the generator of each step.
    """
    model = seeded(make)
    numbers: list[Tensor | None] = []
    if budget is not None:
        ac_client.apply(model, budget / GIB)
    for number in range(STEPS):
        model.zero_grad()
        seed(number)
        measures = budget is not None and number == STEPS - 1
        with ac_client.applied(model).measure() if measures else contextlib.nullcontext():
            with casts():
                loss = scalar(model(**batch()))
            loss.backward()
        numbers += [loss.detach(), *(getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters())]
        numbers += [*map(torch.clone, model.buffers()), torch.get_rng_state()]
    if budget is not None:
        report = ac_client.applied(model).report()
        assert report.recomputed
        assert report.measured_peak_bytes <= budget
    return numbers


def assert_same(planned: list[Tensor | None], plain: list[Tensor | None]) -> None:
    for a, b in zip(planned, plain, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            assert same(a, b)


@pytest.mark.parametrize(
    ("entry", "casts"),
    [*((entry, "fp32") for entry in (*ZOO, *IRREGULAR)), *((entry, "bf16") for entry in ZOO[:3])],
    ids=lambda value: getattr(value, "name", value),
)
def test_model_has_the_plain_numbers_within_the_budget(entry: ZooModel, casts: str) -> None:
    def make() -> nn.Module:
        return entry.make().train()

    budget = budget_between(make, entry.batch, CASTS[casts])
    planned = trained(make, entry.batch, budget, CASTS[casts])
    assert_same(planned, trained(make, entry.batch, casts=CASTS[casts]))
