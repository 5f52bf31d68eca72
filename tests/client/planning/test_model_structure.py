"""Test that changes to modules are counted, and that a planned step looks at no structure again."""

from __future__ import annotations

import cProfile
from unittest import mock

import pytest
import torch
from torch import nn

import ac_client
from ac_client.planning.facts import models_on_device
from ac_client.planning.facts.model_structure import device_of, module_changes
from ac_client.planning.facts.optimizer_steps import STEPS_THAT_MAKE_STATE
from autoac.planner import plan
from autoac.profiler import profile


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


@pytest.mark.parametrize(("neighbor", "calls"), [(None, 430), ("planned", 500), ("given", 570)])
def test_a_planned_step_walks_over_no_modules(neighbor: str | None, calls: int) -> None:
    """Nor over those of another planned model, of which this process may have no profile.

    Forward makes at most so many `calls`, of Python or C functions. A loaded machine makes no more.
    """
    models_on_device._all.clear()  # models of other tests, which the garbage collector may have left
    models = [model() for _ in range(1 if neighbor is None else 2)]
    optimizer = torch.optim.Adam([p for one in models for p in one.parameters()])
    for one in models:
        given = plan(profile(one, torch.ones(2, 4)), budget_gb=1).policy()
        policy = given if neighbor == "given" and one is not models[0] else None
        ac_client.apply(one, budget_gb=1, optimizer=optimizer, policy=policy)

    def step() -> None:
        for one in reversed(models):
            one(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS_THAT_MAKE_STATE + 1):
        step()
    walk = mock.patch.object(nn.Module, "named_modules", side_effect=AssertionError)
    with walk, mock.patch.object(models_on_device, "optimizer_state_nbytes", side_effect=AssertionError):
        step()
    with cProfile.Profile() as profiled:
        models[0](torch.ones(2, 4))
    assert sum(entry.callcount for entry in profiled.getstats()) <= calls
