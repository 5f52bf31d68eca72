"""Planned models that share a device: what the others hold counts once, and at one moment."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ac_client
from autoac.planner.units import GIB

WIDTH, ROWS = 64, 256


def part(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


@pytest.mark.parametrize("planned", [False, True])
def test_state_of_an_optimizer_that_models_share_counts_once(planned: bool) -> None:
    models = [part(0), part(1)]
    optimizer = torch.optim.Adam([p for model in models for p in model.parameters()])
    for model in models:
        ac_client.apply(model, 1.0, optimizer=optimizer)
    for _ in range(4 if planned else 1):
        optimizer.zero_grad()
        models[1](models[0](torch.randn(ROWS, WIDTH))).square().mean().backward()
        optimizer.step()
    parameters = sum(p.nbytes for p in models[0].parameters())
    for model in models:
        on_device = ac_client.applied(model)._planning.watch.on_device
        forward = ROWS * WIDTH * 4 * 7
        if planned:
            assert 2 * parameters <= on_device.neighbors_nbytes() <= 2 * parameters + forward
        own = on_device.standing_nbytes() + on_device.others_standing_nbytes()
        assert own <= 2 * 4 * parameters + 4096


def test_parts_that_wait_in_turn_fit_a_budget_of_what_they_hold_together() -> None:
    """The forwards of one part wait where those of the other do not: their most bytes do not add up."""

    def step(models: list[nn.Module]) -> None:
        torch.manual_seed(2)
        for model in models:
            model.zero_grad()
            losses = [model(torch.randn(ROWS, WIDTH)).square().mean() for _ in range(3)]
            for loss in losses:
                loss.backward()

    models = [part(0), part(1)]
    for model in models:
        ac_client.apply(model, 1.0)
    for _ in range(4):
        step(models)
    peaks = []
    for model in models:
        at = ac_client.applied(model)
        with at.measure():
            step(models)
        peaks.append(at.report())
    assert all(report.predicted_peak_bytes == report.measured_peak_bytes for report in peaks[1:])
    assert GIB > peaks[0].predicted_peak_bytes > 0
