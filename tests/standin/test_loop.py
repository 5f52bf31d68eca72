"""Test the correction of plans by the peak counter, on an allocator that counts."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import ac_client
from ac_client.planning.plan_batch import BatchPlanner
from ac_client.planning.trigger import WATCHED_STEPS
from autoac.planner import Bounds, bounds, build
from autoac.planner.units import GIB
from standin.tasks import bounds_of, task_of
from standin.training import Task, Training, step

EXTRA = 256 << 10  # bytes on the device that are in no profile


def between(known: Bounds, part: float) -> int:
    return int(known.floor + part * (known.ceiling - known.floor))


def train(
    gpu: ModuleType,
    task: Task,
    budget: int,
    *,
    steps: int,
    before: int = 0,
    later: int = 0,
    inside: int = 0,
    since: int = 2,
    reset: bool = True,
) -> tuple[list[int], list[int], ac_client.Report]:
    """Train under a budget; returns the counter after each step, what was corrected by then, and the report.

    Args:
        before: bytes that are on the device before `apply`.
        later: and more of them from the second planned step on.
        inside: bytes that are made in each forward from step `since` on, and freed after the step.
        reset: reset the counter at the head of each step, as many loops do.
    """
    model, optimizer, batch = task.made()
    held = [torch.empty(before, dtype=torch.uint8, device=task.device)]
    made: list[Tensor] = []
    ac_client.apply(model, budget / GIB, optimizer=optimizer)
    at = ac_client.applied(model)
    peaks, corrected = [], []
    for i in range(steps):
        if i == since and inside:  # the first step is observed, and the second one also compares contents
            model.register_forward_pre_hook(
                lambda *_: made.append(torch.empty(inside, dtype=torch.uint8, device=task.device))
            )
        if reset:
            torch.cuda.reset_peak_memory_stats(task.device)
        step(task, model, optimizer, batch, Training(None))
        made.clear()
        peaks.append(gpu.peak(task.index))
        corrected.append(at.report().corrected_by_bytes)
        if i == 1:
            held.append(torch.empty(later, dtype=torch.uint8, device=task.device))
    del held
    return peaks, corrected, at.report()


@pytest.mark.parametrize("since", [2, 9])
def test_step_over_its_budget_is_corrected_if_the_counter_is_reset_each_step(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture, since: int
) -> None:
    budget = between(bounds_of("cuda:1"), 0.7)
    with caplog.at_level(logging.WARNING):
        steps = {"inside": EXTRA, "since": since, "steps": since + 4}
        peaks, _, report = train(gpu, task_of("cuda:1"), budget, **steps)
    assert peaks[since] > budget, "the first such step is over"
    # The first step of a plan also compares contents.
    assert all(peak <= budget for peak in (*peaks[2:since], *peaks[since + 2 :]))
    assert report.predicted_peak_bytes == peaks[-1]
    assert (report.corrections, report.corrected_by_bytes) == (1, EXTRA)
    assert sum("planned again" in message for message in caplog.messages) == 1


def train_with_more(
    gpu: ModuleType, budget: int, more: dict[int, int]
) -> tuple[list[int], list[int], ac_client.Report]:
    """Train eight steps that make `more` bytes before backward; return peaks, ops run again, the report."""
    task, peaks, recomputed = task_of("cuda:1"), [], []
    model, optimizer, batch = task.made()
    at = ac_client.applied(ac_client.apply(model, budget / GIB, optimizer=optimizer))
    for i in range(8):
        torch.cuda.reset_peak_memory_stats(task.device)
        loss = model(**batch)["loss"]
        torch.empty(more.get(i, 0), dtype=torch.uint8, device=task.device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(gpu.peak(task.index))
        recomputed.append(at.report().recomputed)
    return peaks, recomputed, at.report()


def test_step_is_observed_if_corrected_plans_do_not_keep_the_limit(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """From the third step on the loop makes more between forward and backward, where a plan can hold less."""
    known = bounds_of("cuda:1")
    budget, more = between(known, 0.6), known.ceiling - known.floor
    peaks, _, report = train_with_more(gpu, budget, dict.fromkeys(range(2, 8), more))
    assert peaks[2] > budget >= peaks[-1]
    outputs = 4 * 4 * 32 * 64 + 512  # logits and loss count to the end of what the loop makes
    assert 0 <= report.predicted_peak_bytes - peaks[-1] <= outputs
    assert report.corrected_by_bytes == 0
    assert "until backward began, over the limit" in caplog.text
    assert "and the next step is observed" in caplog.text
    assert "cannot be kept" not in caplog.text


def test_plan_stays_if_an_observed_step_does_not_show_what_it_is_corrected_for(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Planned steps take more than predicted, as compiled ones do; step 3, which is observed, does not."""
    known = bounds_of("cuda:1")
    budget, more = between(known, 0.6), known.ceiling - known.floor
    _, recomputed, report = train_with_more(gpu, budget, {i: more for i in range(2, 8) if i != 3})
    assert "and the next step is observed" in caplog.text
    assert recomputed[1] < recomputed[4] == recomputed[7], recomputed
    assert report.corrections == 1
    assert report.corrected_by_bytes > 0
    assert "(steps take more than predicted, and an observed one does not show why)" in caplog.text


@pytest.mark.parametrize("meets", [True, False])
def test_observed_step_that_takes_more_in_backward_is_planned_if_it_meets_the_constraints(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture, meets: bool
) -> None:
    """It has the ops of the first step. If it does not meet them, the plan stays, and training goes on."""
    task, known = task_of("cuda:1"), bounds_of("cuda:1")
    model, optimizer, batch = task.made()
    rules = ac_client.Constraints(gradients="absent")
    ac_client.apply(model, between(known, 0.6) / GIB, optimizer=optimizer, constraints=rules)

    def make_more(_gradient: Tensor) -> None:
        torch.empty(known.ceiling - known.floor, dtype=torch.uint8, device=task.device)

    for i in range(6):
        if i == 2:
            model.head.weight.register_hook(make_more)
        torch.cuda.reset_peak_memory_stats(task.device)
        model(**batch)["loss"].backward()
        optimizer.step()
        if meets or i != 2:
            optimizer.zero_grad()
    assert "and the next step is observed" in caplog.text
    assert (ac_client.applied(model).report().corrected_by_bytes == 0) == meets
    assert ("no plan could be made for that (gradients must be" in caplog.text) != meets


def test_no_warning_says_that_a_budget_cannot_be_kept_which_the_plan_keeps(
    gpu: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of a peak is below the budget if that is for reserved bytes."""
    known = bounds_of("cuda:1")
    limit, more = between(known, 0.6), known.ceiling - known.floor
    monkeypatch.setattr(BatchPlanner, "limit_of", lambda *_: limit)
    _, _, report = train_with_more(gpu, 2 * limit, {i: more for i in range(2, 8) if i != 3})
    assert "and the next step is observed" in caplog.text
    assert limit < report.predicted_peak_bytes < 2 * limit
    assert "cannot be kept" not in caplog.text


def test_counter_that_stays_equal_over_a_step_does_not_loosen_the_plan(gpu: ModuleType) -> None:
    """The optimizer's state is more than all that profiling took, so the counter only rises."""
    task = replace(task_of("cuda:1"), batch=lambda: {"ids": torch.arange(32)[None]})
    known = bounds(build(task.observed()))
    budget = between(known, 0.6)
    peaks, _, report = train(gpu, task, budget, steps=WATCHED_STEPS + 5)
    assert report.recomputed > 0
    assert report.corrections == 0
    assert report.predicted_peak_bytes == peaks[-1] <= budget


@pytest.mark.parametrize(("when", "workspace"), [("before", 4 * EXTRA), ("later", 0), ("later", 4 * EXTRA)])
def test_what_else_is_on_the_device_counts_in_the_next_plan(
    gpu: ModuleType, when: str, workspace: int
) -> None:
    """A teacher that is there before, a copy of the weights that comes later: no plan is corrected."""
    budget = between(bounds_of("cuda:1"), 0.7) + 2 * workspace  # of forward's thread, and of backward's
    gpu.set_workspace(workspace)
    extra = {when: EXTRA}
    peaks, corrected, report = train(gpu, task_of("cuda:1"), budget, steps=WATCHED_STEPS + 2, **extra)
    # The first step of a plan also compares contents, and what comes later has another plan made.
    assert max(peaks[3 if when == "later" else 2 :]) <= budget, peaks
    assert report.predicted_peak_bytes == peaks[-1]
    assert corrected == [0] * (WATCHED_STEPS + 2)


def test_what_is_on_the_device_counts_in_full_before_planned_steps_have_workspaces(gpu: ModuleType) -> None:
    """No plan keeps the budget here, so another one is made if the first planned step counts less."""
    gpu.set_workspace(4 * EXTRA)
    held = torch.empty(64 * EXTRA, dtype=torch.uint8, device="cuda:1")
    task, predicted = task_of("cuda:1"), []
    model, optimizer, batch = task.made()
    budget = between(bounds_of("cuda:1"), 0.7) + 8 * EXTRA
    at = ac_client.applied(ac_client.apply(model, budget / GIB, optimizer=optimizer))
    for _ in range(4):
        gpu.reset_peak(1)
        step(task, model, optimizer, batch, Training(None))
        predicted.append(at.report().predicted_peak_bytes)
    assert predicted[1:] == [gpu.peak(1)] * 3
    assert gpu.peak(1) > budget > gpu.peak(1) - held.nbytes


def test_what_has_left_the_device_counts_no_longer(gpu: ModuleType) -> None:
    """Not even as much of it as cuBLAS's workspaces take, which the profile counts."""
    gpu.set_workspace(4 * EXTRA)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to("cuda")
    held = [torch.empty(2 * EXTRA, dtype=torch.uint8, device="cuda")]
    on_device = ac_client.applied(ac_client.apply(model, 1.0))._planning.watch.on_device
    for _ in range(3):
        model(torch.ones(512, 64, device="cuda")).square().sum().backward()
        model.zero_grad()
        held.clear()
    assert on_device.others_nbytes() < 4096


def test_outputs_that_names_of_the_observed_step_hold_are_not_counted_as_other_tensors(
    gpu: ModuleType,
) -> None:
    """A loop at the top of a script: `out` lives until the next forward has returned."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1024)).to("cuda")
    x = torch.ones(512, 64, device="cuda")
    at = ac_client.applied(ac_client.apply(model, 1.0))
    peaks = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        out = model(x)
        out.square().mean().backward()
        model.zero_grad()
        peaks.append(gpu.peak(0))
    bucket = at._planning.store.current
    assert bucket.planned_for.present.others_nbytes == at._planning.watch.on_device.others_nbytes() == 0
    assert at.report().predicted_peak_bytes == peaks[-1]


def test_workspaces_count_for_a_neighbor_without_products(gpu: ModuleType) -> None:
    """They are in the profile of the other model, so they are none of its other tensors."""
    gpu.set_workspace(EXTRA)
    models = [nn.Sequential(nn.Linear(64, 64), nn.GELU()).to("cuda"), nn.LayerNorm(64).to("cuda")]
    found = [ac_client.applied(ac_client.apply(model, 1.0)) for model in models]
    for _ in range(3):
        for model in models:
            model(torch.ones(512, 64, device="cuda")).square().sum().backward()
            model.zero_grad()
    others = [at._planning.watch.on_device.others_nbytes() for at in found]
    norm, linear = 2 * 64 * 4, 65 * 64 * 4  # of parameters
    assert others == pytest.approx([2 * norm, 2 * EXTRA + linear], abs=2048)


def test_planned_model_that_trained_before_counts_from_the_first_step_on(gpu: ModuleType) -> None:
    """It may never train again, but it is on the device; once it trains, all that it holds counts."""
    task, budget = task_of("cuda:1"), between(bounds_of("cuda:1"), 0.7)
    first, optimizer, batch = task.made()
    ac_client.apply(first, budget / GIB, optimizer=optimizer)
    for _ in range(3):
        step(task, first, optimizer, batch, Training(None))
    budget += torch.cuda.memory_allocated(task.device)
    peaks, corrected, report = train(gpu, task, budget, steps=WATCHED_STEPS + 1)
    assert max(peaks[2:]) <= budget, peaks
    assert report.predicted_peak_bytes == peaks[-1]
    assert corrected == [0] * (WATCHED_STEPS + 1)


class Slope(nn.Module):
    """Returns a loss, and the derivative by its input, which becomes a leaf with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layers(x.requires_grad_()).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out, slope


def test_what_the_last_graph_holds_is_not_counted_as_other_tensors(gpu: ModuleType) -> None:
    """Its input, the input's gradient and the outputs are let go of when forward returns."""
    model = Slope().to("cuda")
    at = ac_client.applied(ac_client.apply(model, 1.0))
    for _ in range(4):
        out, slope = model(torch.ones(512, 64, device="cuda"))
        (out + slope.square().sum()).backward()
        model.zero_grad()
    bucket = at._planning.store.current
    assert bucket.planned_for.present.others_nbytes == at._planning.watch.on_device.others_nbytes() == 0
    assert bucket.planned_for.present.kept_nbytes == pytest.approx(3 * 512 * 64 * 4, abs=1024)


def test_state_of_a_second_optimizer_is_counted_once(gpu: ModuleType) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to("cuda")
    first, second = (torch.optim.SGD(part.parameters(), 0.1, 0.9) for part in (model[0], model[2]))
    at = ac_client.applied(ac_client.apply(model, 1.0, optimizer=first))
    for _ in range(3):
        model(torch.ones(64, 256, device="cuda")).square().sum().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    assert at._planning.watch.on_device.others_nbytes() < 1024


def test_state_that_is_shared_with_an_idle_model_is_counted_once(gpu: ModuleType) -> None:
    trained, idle = nn.Linear(256, 256, device="cuda"), nn.Linear(256, 256, device="cuda")
    optimizer = torch.optim.SGD([*trained.parameters(), *idle.parameters()], 0.1, 0.9)
    ac_client.apply(idle, 1.0, optimizer=optimizer)
    at = ac_client.applied(ac_client.apply(trained, 1.0, optimizer=optimizer))
    for parameter in idle.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        trained(torch.ones(64, 256, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert at._planning.watch.on_device.others_nbytes() == sum(p.nbytes for p in idle.parameters())


def test_plan_is_not_corrected_before_the_optimizer_has_its_state(gpu: ModuleType) -> None:
    """The step lacks it, so that the correction would be too small, and there are only two."""
    budget = between(bounds_of("cuda:1"), 0.7)
    peaks, corrected, report = train(gpu, task_of("cuda:1"), budget, inside=EXTRA, steps=WATCHED_STEPS + 2)
    assert corrected == [0, 0, 0, EXTRA, EXTRA], corrected
    assert report.corrections == 1
    assert peaks[-1] == report.predicted_peak_bytes <= budget
