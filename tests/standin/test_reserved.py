"""Test budgets for the memory that the allocator takes from the device, fragments included."""

from __future__ import annotations

import functools
import gc
import re
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import Constraints
from autoac.planner.units import GIB
from standin.training import Task, Training, step

MIB = 1 << 20
STEPS = 5


class Layers(nn.Module):
    """Layers whose activations take 8 MiB each, a few of them of odd sizes."""

    def __init__(self, n: int = 8, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(n))
        self.odd = nn.Linear(width, 19)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        parts = []
        for layer in self.layers:
            x = x + layer(x).sin()
            parts.append(self.odd(x).sigmoid().square().mean())
        return {"loss": torch.stack(parts).sum()}


class Distilled(nn.Module):
    """Layers that do not train, before a few that do."""

    def __init__(self, teacher: Layers, student: Layers, grad: bool) -> None:
        super().__init__()
        self.teacher, self.student, self.grad = teacher, student, grad

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.grad):
            for layer in self.teacher.layers:
                x = x + layer(x).sin()
        with torch.enable_grad():
            return self.student(x)["loss"]


TASK = Task(Layers, lambda: {"x": torch.randn(65536, 32, generator=torch.Generator().manual_seed(0))})


def train(gpu: ModuleType, steps: int, limit: int = 1 << 50, **options: object) -> tuple[Training, list[int]]:
    """Train in `steps` steps on a device of `limit` bytes; return results and reserved bytes of each step."""
    gc.collect()
    torch.cuda.empty_cache()
    gpu.set_limit(0, limit)
    gpu.reset_peak(0)
    model, optimizer, batch = TASK.made()
    if options:
        ac_client.apply(model, optimizer=optimizer, **options)
    done, reserved = Training(ac_client.applied(model) if options else None), []
    for i in range(steps):
        torch.manual_seed(i)
        step(TASK, model, optimizer, batch, done)
        reserved.append(torch.cuda.memory_reserved())
    done.peaks.append(gpu.peak(0))
    return done, reserved


@functools.cache
def plain(gpu: ModuleType) -> tuple[Training, int]:
    """Return the results of plain training, and the bytes that its last step has reserved."""
    done, reserved = train(gpu, STEPS)
    return done, reserved[-1]


def test_budget_of_the_device_trains_where_plain_runs_out_of_memory(gpu: ModuleType) -> None:
    limit = int(0.95 * plain(gpu)[1])
    with pytest.raises(torch.OutOfMemoryError):
        train(gpu, 2, limit)
    planned, reserved = train(gpu, STEPS, limit, budget_gb="device")
    assert planned.same_numbers(plain(gpu)[0])
    report = planned.applied.report()
    assert report.budget_bytes == limit
    assert max(reserved) <= limit
    assert report.predicted_reserved_bytes == pytest.approx(reserved[-1], rel=0.05)


def test_first_step_on_a_full_device_drops_its_oldest_cuts(gpu: ModuleType) -> None:
    deep = Task(partial(Layers, 40), lambda: {"x": torch.randn(16384, 32)})
    gpu.set_limit(0, 72 * MIB)  # plain training takes 342, and with all cuts 82
    model, optimizer, batch = deep.made()
    ac_client.apply(model, "device", optimizer=optimizer)
    for _ in range(3):
        step(deep, model, optimizer, batch, Training(None))
    assert ac_client.applied(model).policy is not None


@pytest.mark.parametrize("grad", [True, False], ids=["frozen", "without gradients"])
def test_first_step_holds_nothing_of_what_backward_does_not_need(gpu: ModuleType, grad: bool) -> None:
    def peak(**options: Any) -> int:
        torch.manual_seed(0)
        teacher, student = Layers(40).requires_grad_(False).cuda(), Layers(2).cuda()
        model = Distilled(teacher, student, grad)
        if options:
            ac_client.apply(model, **options)
        batch = torch.randn(16384, 32, device="cuda")
        gpu.reset_peak(0)
        model(batch).backward()
        return gpu.peak(0)

    plain = peak()
    gc.collect()
    assert peak(budget_gb=1) <= 1.02 * plain


def test_first_step_that_runs_out_of_memory_says_what_it_needs(gpu: ModuleType) -> None:
    deep = Task(partial(Layers, 40), lambda: {"x": torch.randn(16384, 32)})
    gpu.set_limit(0, 52 * MIB)
    model, optimizer, batch = deep.made()
    ac_client.apply(model, "device", optimizer=optimizer)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step(deep, model, optimizer, batch, Training(None))
    needs = re.search(r"without a plan, and needs over ([\d.]+) MiB", raised.value.__notes__[0])
    assert needs is not None
    assert 30 < float(needs[1]) < 52


def test_reserved_bytes_after_an_observed_step_are_those_of_its_plan(gpu: ModuleType) -> None:
    budget = plain(gpu)[0].peaks[-1] // 2
    planned, reserved = train(
        gpu, STEPS, budget_gb=budget / GIB, constraints=Constraints(budget_of="reserved"), group=None
    )
    assert planned.same_numbers(plain(gpu)[0])
    report = planned.applied.report()
    assert reserved[-1] <= budget
    assert report.predicted_reserved_bytes == pytest.approx(reserved[-1], abs=2 * MIB)
    assert report.corrections == 0


def test_second_model_on_a_full_device_gets_room(gpu: ModuleType) -> None:
    """The first plan has its fragments in the budget, so it does not fit together with the second model."""
    limit = int(0.75 * plain(gpu)[1])
    first, second = TASK.made(), TASK.made()
    gc.collect()
    torch.cuda.empty_cache()
    gpu.set_limit(0, limit)
    batch = first[2]
    for model, optimizer, _ in (first, second):
        ac_client.apply(model, "device", optimizer=optimizer)
        for _ in range(3):
            for one, its_optimizer, _ in (first, second)[: 1 + (model is second[0])]:
                step(TASK, one, its_optimizer, batch, Training(None))
    assert torch.cuda.memory_reserved() <= limit


@pytest.mark.parametrize("mib", [4, 10, 40])
def test_budget_of_about_a_segment_is_planned_for(gpu: ModuleType, mib: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to("cuda")
    at = ac_client.applied(ac_client.apply(model, mib / 1024, constraints=Constraints(budget_of="reserved")))
    for _ in range(3):
        model(torch.ones(512, 64, device="cuda")).square().sum().backward()
    assert at.report().predicted_peak_bytes <= mib * MIB


def test_memory_that_an_evaluation_has_reserved_is_not_blamed_on_the_plan(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, batch = TASK.made()
    at = ac_client.applied(ac_client.apply(model, 0.35, optimizer=optimizer))
    at.plan_for(**{name: value.cuda() for name, value in batch.items()})
    torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")  # freed at once; the allocator keeps it
    for _ in range(4):
        step(TASK, model, optimizer, batch, Training(None))
    assert torch.cuda.memory_reserved() > 400 * MIB
    assert not [r for r in caplog.records if "has reserved" in r.getMessage()]
    torch.cuda.empty_cache()


def test_memory_that_was_freed_before_the_first_step_is_given_back(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, batch = TASK.made()
    torch.empty(1000 * MIB, dtype=torch.uint8, device="cuda")  # freed at once; the allocator keeps it
    ac_client.apply(model, 0.5, optimizer=optimizer)
    for _ in range(3):
        step(TASK, model, optimizer, batch, Training(None))
    assert torch.cuda.memory_reserved() < 1000 * MIB
    assert not [r for r in caplog.records if "has reserved" in r.getMessage()]


def test_budget_of_the_device_is_what_the_process_may_have_of_it(gpu: ModuleType) -> None:
    limit = int(0.95 * plain(gpu)[1])
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    planned, reserved = train(gpu, 3, budget_gb="device")
    assert planned.applied.report().budget_bytes == pytest.approx(limit, abs=1)
    assert max(reserved) <= limit


def test_reserved_bytes_over_the_budget_are_planned_for(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ac_client.planning.plan_batch.fragments_of", lambda _: 0)
    monkeypatch.setattr("ac_client.planning.plan_batch.spare_bytes", lambda _: 0)
    budget = int(0.7 * plain(gpu)[0].peaks[-1])
    _, without = train(gpu, STEPS, budget_gb=budget / GIB)
    assert max(without) > budget
    warned = [r.getMessage() for r in caplog.records if "has reserved" in r.getMessage()]
    assert len(warned) == 1
    assert 'Constraints(budget_of="reserved")' in warned[0]
    assert "expandable_segments" in warned[0]
    caplog.clear()
    planned, reserved = train(gpu, 6, budget_gb=budget / GIB, constraints=Constraints(budget_of="reserved"))
    assert reserved[-1] <= budget
    assert 1 <= planned.applied.report().corrections <= 2


def test_budget_above_what_is_free_is_warned_of(gpu: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    gpu.set_limit(0, 100 * MIB)
    model = Layers(1).to("cuda")
    ac_client.apply(model, 0.2)
    assert "more than the 100.00 MiB that this process can have" in caplog.text


def test_fit_ends_at_the_sizes_that_run_on_the_device(gpu: ModuleType) -> None:
    """A size that the device has no room for does not fit, and nothing is proven of it."""

    def sized(size: int) -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        return Layers(2).to("cuda"), {"x": torch.randn(size * 16384, 32, device="cuda")}

    roomy = ac_client.fit(sized, 24 * MIB / GIB, most=12)
    assert roomy.proven_from is not None
    gpu.set_limit(0, 24 * MIB)
    found = ac_client.fit(sized, 1.0, most=12)
    gpu.set_limit(0, 1 << 50)
    assert 0 < found.largest < 12
    assert found.proven_from is None
    assert found.rows[0].measured is None  # steps in turns had no room
    gc.collect()
    sized(found.largest)  # nothing of what ran out of memory is left
