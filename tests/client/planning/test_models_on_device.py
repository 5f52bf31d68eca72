"""Planned models that share a device: what the others hold counts once, and at one moment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.planning.device_share import with_share
from autoac.planner import build, plan
from autoac.planner.memory.simulate import waiting_bytes
from autoac.planner.units import GIB
from autoac.profiler import observe
from benchmarks.loops.random_loops import keep_on_host

WIDTH, ROWS = 64, 256


def part(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def sharing(models: list[nn.Module]) -> torch.optim.Optimizer:
    """Apply a budget to models that one optimizer trains; return it."""
    optimizer = torch.optim.Adam([p for model in models for p in model.parameters()])
    for model in models:
        ac_client.apply(model, 1.0, optimizer=optimizer)
    return optimizer


@pytest.mark.parametrize(("rounds", "steps"), [(1, True), (4, True), (3, False)])
def test_state_of_an_optimizer_that_models_share_counts_once(rounds: int, steps: bool) -> None:
    optimizer = sharing(models := [part(0), part(1)])
    for _ in range(rounds):
        optimizer.zero_grad()
        models[1](models[0](torch.randn(ROWS, WIDTH))).square().mean().backward()
        if steps:  # else the state does not exist yet
            optimizer.step()
    parameters = sum(p.nbytes for p in models[0].parameters())
    for model in models:
        on_device = ac_client.applied(model)._planning.watch.on_device
        forward = ROWS * WIDTH * 4 * 7
        if rounds > 1:
            assert 2 * parameters <= on_device.neighbors_nbytes() <= 2 * parameters + forward
        own = on_device.standing_nbytes() + on_device.others_standing_nbytes()
        assert own <= 2 * 4 * parameters + 4096


def test_forwards_of_another_model_count_where_they_wait() -> None:
    """Two forwards of the first part wait while the second works, and none the other way."""

    def step() -> None:
        waiting = [models[0](torch.randn(ROWS, WIDTH)).square().mean() for _ in range(2)]
        models[1](torch.randn(ROWS, WIDTH)).square().mean().backward()
        for loss in waiting:
            loss.backward()

    models = [part(0), part(1)]
    for model in models:
        ac_client.apply(model, 1.0)
    for _ in range(4):
        step()
    first, second = (ac_client.applied(model)._planning.watch.on_device for model in models)
    standing = 2 * sum(p.nbytes for p in models[0].parameters())  # with gradients
    assert first.neighbors_nbytes() == standing
    loaded = ac_client.applied(models[0])._planning.store.current.loaded
    batches = 2 * 4 * ROWS * WIDTH  # which only autograd holds
    assert second.neighbors_nbytes() == standing + batches + 2 * loaded.waiting_nbytes // len(loaded.forwards)
    assert loaded.waiting_nbytes > standing


def test_forwards_of_another_model_are_gone_when_the_optimizer_steps() -> None:
    models = [nn.Sequential(nn.Linear(WIDTH, 2048), nn.GELU(), nn.Linear(2048, WIDTH)) for _ in range(2)]
    optimizer = torch.optim.Adam([p for model in models for p in model.parameters()])
    keep_on_host(optimizer)  # so the peak is where it steps
    for model in models:
        ac_client.apply(model, 1.0, optimizer=optimizer)
    at = ac_client.applied(models[1])
    for number in range(5):
        with at.measure() if number == 4 else nullcontext():
            models[1](models[0](torch.randn(ROWS // 4, WIDTH))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert at.report().predicted_peak_bytes == pytest.approx(at.report().measured_peak_bytes, abs=4096)


def test_input_its_gradient_and_freed_gradients_are_gone_when_the_optimizer_steps() -> None:
    """Train the second part of a pipeline, and zero gradients after its forward, from an observed step on."""
    model = nn.Sequential(nn.Linear(WIDTH, 2048), nn.GELU(), nn.Linear(2048, WIDTH))
    optimizer = torch.optim.Adam(model.parameters())
    keep_on_host(optimizer)  # so the peak is where it steps
    model(torch.randn(1, WIDTH)).sum().backward()
    at = ac_client.applied(ac_client.apply(model, 1.0, optimizer=optimizer))

    def backward() -> None:
        received = torch.randn(ROWS // 4, WIDTH, requires_grad=True)
        loss = model(received).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert received.grad is not None

    for number in range(4):
        with at.measure() if number == 3 else nullcontext():
            backward()
            optimizer.step()
    assert at.report().predicted_peak_bytes == pytest.approx(at.report().measured_peak_bytes, abs=4096)


def test_needs_of_optimizers_do_not_take_turns_where_a_model_runs_alone_too() -> None:
    models, found = [part(0), part(1)], []
    optimizer = sharing(models)
    second = ac_client.applied(models[1])._planning.watch.on_device
    for number in range(7):
        models[1](batch() if number % 3 else models[0](batch())).square().mean().backward()
        optimizer.step()
        found.append(second.optimizers_need(0).workspace)
    assert found[5] == found[6]


def one_after_the_other(parts: list[nn.Module]) -> None:
    """Run the second part while the first one waits."""
    parts[1](parts[0](batch())).square().mean().backward()


def stages(parts: list[nn.Module]) -> None:
    """Run three microbatches, whose backwards go through one part at a time."""
    waiting = []
    for _ in range(3):
        sent = parts[0](batch())
        received = sent.detach().requires_grad_()
        waiting.append((sent, received, parts[1](received).square().mean()))
    while waiting:
        sent, received, loss = waiting.pop(0)
        loss.backward()
        sent.backward(received.grad)


def batch() -> Tensor:
    return torch.ones(16 * ROWS, WIDTH)


def peak_of(step: Callable[[list[nn.Module]], None], parts: list[nn.Module]) -> int:
    standing = sum(p.nbytes for model in parts for p in model.parameters())
    with AllocatorTimeline(base=standing) as timeline:
        step(parts)
    gradients(parts)
    return timeline.peak_bytes


def gradients(parts: list[nn.Module]) -> list[Tensor]:
    """Return the gradients, and free them."""
    made = [p.grad for model in parts for p in model.parameters() if p.grad is not None]
    for model in parts:
        model.zero_grad()
    return made


@pytest.mark.parametrize(("step", "tightness"), [(one_after_the_other, 0.6), (stages, 0.5)])
def test_models_that_wait_for_each_other_keep_a_budget_of_their_device(
    step: Callable[[list[nn.Module]], None], tightness: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The first model alone fits with little to recompute, and leaves the second no room."""
    plain, parts = [part(0), part(1)], [part(0), part(1)]
    budget = int(tightness * peak_of(step, plain))
    for model in parts:
        ac_client.apply(model, budget / GIB)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):  # one model is observed at a time
            step(parts)
            found = gradients(parts)
    step(plain)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(plain), strict=True))
    assert peak_of(step, parts) <= budget
    assert not [message for message in caplog.messages if "cannot be kept" in message]
    reports = [ac_client.applied(model).report() for model in parts]
    assert all(report.predicted_peak_bytes <= budget for report in reports)


def test_share_of_the_device_limits_what_waits_and_is_not_predicted() -> None:
    model = part(0)
    profile = observe(model, (batch(),), {})
    graph = build(profile)
    least, most = waiting_bytes(graph, frozenset()), waiting_bytes(graph, graph.everything)
    budget = 2 * plan(graph, budget_gb=1).peak
    for share in (0.25, 0.5):
        limited = plan(with_share(profile, share, budget), budget_bytes=budget)
        assert waiting_bytes(graph, limited.save_set) <= least + share * (most - least)
    assert plan(profile, budget_bytes=budget).recompute_us == 0
