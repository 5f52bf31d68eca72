"""Every wrong argument of `apply` and its companions is refused where it is passed, and changes nothing."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ac_client
from ac_client import InvalidBudget, InvalidConstraints, applied
from autoac.profiler import CannotProfile, NothingToProfile, profile

GIB = 1 << 30


def model() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget_gb": 0}, InvalidBudget, "budget_gb must be a positive number of GiB, got 0"),
        ({"budget_gb": float("nan")}, InvalidBudget, "got nan"),
        ({"budget_gb": "40GB"}, InvalidBudget, "got '40GB'"),
        ({"budget_gb": torch.tensor(1.0)}, InvalidBudget, "got tensor"),
        ({"budget_gb": 40 * GIB}, InvalidBudget, r"did you pass bytes\? They are budget_gb=40$"),
        ({"budget_gb": None}, InvalidBudget, "pass budget_gb="),
        ({"budget_gb": "device"}, InvalidBudget, "model on cpu, got a budget of the device: move the model"),
        (
            {"constraints": ac_client.Constraints(budget_of="reserved")},
            InvalidBudget,
            r'got Constraints\(budget_of="reserved"\): move the model to its GPU',
        ),
        (
            {"constraints": ac_client.Constraints(headroom_bytes=GIB)},
            InvalidBudget,
            r"headroom_bytes must be below budget_gb=1\.0, got 1\.00 GiB",
        ),
        ({"host_budget_gb": -1}, InvalidBudget, "host_budget_gb must be a number of GiB from 0, got -1"),
        (
            {"host_budget_gb": 1, "budget_gb": None, "policy": "policy.json"},
            InvalidBudget,
            "must come with budget_gb",
        ),
        ({"optimizer": []}, TypeError, "optimizer must be the torch.optim.Optimizer .* got list"),
        ({"optimizer": torch.optim.SGD}, TypeError, "got the class SGD"),
        (
            {"policy": {"a": 1}},
            TypeError,
            "policy must be a Policy, a PolicySet or the path of a file, got dict",
        ),
        ({"constraints": {"pins": {}}}, TypeError, "constraints must be ac_client.Constraints.* got dict"),
        ({"constraints": "user"}, TypeError, "constraints must be .* got str"),
        (
            {"constraints": ac_client.Constraints(extra_static_bytes=1), "policy": "policy.json"},
            InvalidConstraints,
            "carried out as it is",
        ),
        ({"strict": "yes"}, TypeError, "strict must be True or False, got 'yes'"),
        ({"service": "planner:8421"}, ValueError, "service must be a URL such as"),
        ({"group": 3}, TypeError, "group must be .* got int"),
        ({"group": "all"}, ValueError, "group must be .* got 'all'"),
    ],
)
def test_wrong_argument_is_refused_and_changes_nothing(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    subject = model()
    with pytest.raises(error, match=words):
        ac_client.apply(subject, **{"budget_gb": 1.0, **arguments})
    assert not subject._forward_hooks
    assert not subject._forward_pre_hooks


@pytest.mark.parametrize("budget", [1, 1.5, np.float32(2.0), np.int64(3)])
def test_any_real_number_is_a_budget(budget: Any) -> None:
    assert applied(ac_client.apply(model(), budget)).budget_bytes == int(float(budget) * GIB)


@pytest.mark.parametrize("subject", [None, nn.Linear, lambda x: x, "cuda"])
def test_only_modules_are_planned(subject: Any) -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        ac_client.apply(subject, 1.0)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        applied(subject)


def test_optimizer_of_another_model_is_counted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ac_client"):
        subject = model()
        ac_client.apply(subject, 1.0, optimizer=torch.optim.AdamW(subject.parameters()))
        assert not caplog.messages
        ac_client.apply(model(), 1.0, optimizer=torch.optim.AdamW(model().parameters()))
    assert "none of them belongs to this Linear" in caplog.text


def test_budget_above_the_memory_of_the_machine_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ac_client.apply(model(), budget_gb=40_000)
    (message,) = caplog.messages
    assert "budget_gb=40000 is more than the" in message
    assert "this machine" in message


def test_error_for_a_frozen_model_names_requires_grad() -> None:
    frozen, x = model().requires_grad_(False), torch.ones(1, 2)
    with pytest.raises(NothingToProfile, match=r"requires_grad_\(\)"):
        profile(frozen, x)
    expected = frozen(x)
    assert torch.equal(ac_client.apply(frozen, 1.0)(x), expected), "it runs as without a plan"


def test_error_for_a_model_on_meta_names_the_device() -> None:
    with torch.device("meta"):
        subject = model()
    with pytest.raises(CannotProfile, match=r"move it to the device.*autoac.profiler.profile\(.*on="):
        ac_client.apply(subject, 1.0)(torch.ones(1, 2, device="meta"))
