"""Test that changes to modules are counted, and that a planned step looks at no structure again."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import ac_client
from ac_client.planning.facts.model_structure import device_of, module_changes


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))


@pytest.mark.parametrize("change", ["module", "inside a new module", "parameter", "move", "compile"])
def test_changes_count(change: str) -> None:
    watched = model()
    module_changes(watched)
    watched.add_module("new", nn.Sequential(nn.Tanh()))
    before = module_changes(watched)
    if change == "move":
        watched[1].double()
    elif change == "compile":
        watched[2].compile(backend="eager")
    elif change == "parameter":
        watched[0].weight = nn.Parameter(torch.ones(4, 4))
    else:
        watched[1 if change == "module" else 3].append(nn.Tanh())  # type: ignore[operator]
    assert module_changes(watched) > before


def test_slices_and_other_models_do_not_count() -> None:
    watched = nn.ModuleList(model())
    before = module_changes(watched)
    _ = watched[:2], model().double()
    assert module_changes(watched) == before
    assert device_of(watched) == torch.device("cpu") != device_of(watched.to("meta"))


def test_a_planned_step_walks_over_no_modules() -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    ac_client.apply(trained, budget_gb=1, optimizer=optimizer)

    def step() -> None:
        trained(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with mock.patch.object(nn.Module, "named_modules", side_effect=AssertionError):
        step()
