"""Planned models that share a device: what the others hold counts once, and at one moment."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ac_client

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
    assert second.neighbors_nbytes() == standing + 2 * loaded.waiting_nbytes // len(loaded.forwards)
    assert loaded.waiting_nbytes > standing
