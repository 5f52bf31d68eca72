"""`apply` with a planning service: a real one, which listens on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from serving import serving
from stepping import gradients, seeded
from torch import nn

import ac_client
import ac_client.service_client.connection
from ac_client import ServiceRefused
from autoac.api import Settings, create_app
from autoac.planner import Constraints, Policy
from autoac.planner.units import GIB
from benchmarks.models.modules import Transformer

BATCH = torch.randn(4, 64, 64)
NOBODY = "http://127.0.0.1:9"


def new_model() -> Transformer:
    return seeded(Transformer, layers=2, width=64)


def policy_of(model: nn.Module) -> Policy:
    policy = ac_client.applied(model).policy
    assert policy is not None
    return policy


@pytest.fixture(scope="module")
def budget_gb() -> float:
    """Under which something is recomputed."""
    model = ac_client.apply(new_model(), 1.0)
    gradients(model, BATCH)
    plan = ac_client.applied(model).plan
    return (plan.ceiling - 1) / GIB


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the service is."""
    path: Path = tmp_path_factory.mktemp("service") / "service.sqlite3"
    app = create_app(Settings(database_url=f"sqlite:///{path}"))
    with serving(app) as address:
        yield address


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOAC_TOKEN", raising=False)
    monkeypatch.setattr(ac_client.service_client.connection, "TRIES", 1)


def profiles(url: str) -> int:
    return len(httpx2.get(f"{url}/v1/profiles").json()["items"])


def test_second_training_gets_the_stored_policy_and_sends_no_profile(url: str, budget_gb: float) -> None:
    plain = gradients(new_model(), BATCH)
    first = ac_client.apply(new_model(), budget_gb, service=url)
    for _ in range(2):
        assert all(map(torch.equal, gradients(first, BATCH), plain))
    assert (profiles(url), set(policy_of(first).decisions.values()) > {"save"}) == (1, True)

    # Its run times are others, so that its profile, were it sent, would be a second one.
    second = ac_client.apply(new_model(), budget_gb, service=url)
    for _ in range(2):
        assert all(map(torch.equal, gradients(second, BATCH), plain))
    assert policy_of(second).decisions == policy_of(first).decisions
    assert profiles(url) == 1


class Waves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().tanh().cos().tanh().sin()


def test_pinned_module_recomputes_under_the_policy_of_a_service(url: str) -> None:
    def chain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), Waves(), nn.Linear(64, 64))

    plain = gradients(chain(), BATCH)
    rules = Constraints(pin_recompute=("1/*",))
    model = ac_client.apply(chain(), 1, service=url, constraints=rules)
    assert all(map(torch.equal, gradients(model, BATCH), plain))
    plan = ac_client.applied(model).plan
    assert plan.peak == policy_of(model).predicted.peak_bytes
    assert "recompute" in policy_of(model).decisions.values()


def test_service_that_is_away_is_planned_for_here(budget_gb: float, caplog: pytest.LogCaptureFixture) -> None:
    model = ac_client.apply(new_model(), budget_gb, service=NOBODY)
    gradients(model, BATCH)
    with caplog.at_level(logging.WARNING):
        found = gradients(model, BATCH)
    assert "planning in-process, because" in caplog.text
    assert ac_client.applied(model).plan is not None  # made here
    assert all(map(torch.equal, found, gradients(new_model(), BATCH)))


def test_wrong_key_fails_the_second_step_and_restores_the_model(
    budget_gb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is the operator's to mend: a plan from this process would hide it."""
    monkeypatch.setenv("AUTOAC_TOKEN", "k\u00e9y")
    model = ac_client.apply(new_model(), budget_gb, service=NOBODY)
    gradients(model, BATCH)
    with pytest.raises(ServiceRefused, match="must be a key of printable ASCII characters"):
        gradients(model, BATCH)
    assert all(map(torch.equal, gradients(model, BATCH), gradients(new_model(), BATCH)))
