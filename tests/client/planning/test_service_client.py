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
from ac_client import ServiceRefused, ServiceUnavailable
from autoac.api import Settings, create_app
from autoac.planner import Constraints, InfeasibleBudget, Policy
from autoac.planner.units import GIB
from benchmarks.models.modules import Transformer

BATCH = torch.randn(4, 64, 64)
NAME = "transformer@cpu/production"
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
    assert plan is not None
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


def test_second_training_gets_the_stored_policy_also_by_alias(url: str, budget_gb: float) -> None:
    plain = gradients(new_model(), BATCH)
    first = ac_client.apply(new_model(), budget_gb, service=url, require_service=True)
    for _ in range(2):
        assert all(map(torch.equal, gradients(first, BATCH), plain))
    assert (profiles(url), set(policy_of(first).decisions.values()) > {"save"}) == (1, True)

    # Its run times are others, so that its profile, were it sent, would be a second one.
    second = ac_client.apply(new_model(), budget_gb, service=url)
    for _ in range(2):
        assert all(map(torch.equal, gradients(second, BATCH), plain))
    assert policy_of(second).decisions == policy_of(first).decisions
    assert profiles(url) == 1

    id = httpx2.get(f"{url}/v1/policies").json()["items"][0]["id"]
    put = httpx2.put(f"{url}/v1/aliases/{NAME}", json={"policy_id": id}, headers={"If-None-Match": "*"})
    assert put.status_code == 201
    named = ac_client.apply(new_model(), alias=NAME, service=url)
    assert policy_of(named) == policy_of(first)
    assert all(map(torch.equal, gradients(named, BATCH), plain))
    with pytest.raises(ServiceRefused, match="no alias transformer@cpu/canary"):
        ac_client.apply(new_model(), budget_gb, alias="transformer@cpu/canary", service=url)
    with pytest.raises(InfeasibleBudget):
        ac_client.apply(new_model(), budget_gb / 2, alias=NAME, service=url)


class Waves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().tanh().cos().tanh().sin()


def test_pinned_module_recomputes_under_the_policy_of_a_service(url: str) -> None:
    def chain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), Waves(), nn.Linear(64, 64))

    plain = gradients(chain(), BATCH)
    rules = Constraints(pin_recompute=("1/*",))
    model = ac_client.apply(chain(), 1, service=url, require_service=True, constraints=rules)
    assert all(map(torch.equal, gradients(model, BATCH), plain))
    plan = ac_client.applied(model).plan
    assert plan is not None
    assert plan.peak == policy_of(model).predicted.peak_bytes
    assert "recompute" in policy_of(model).decisions.values()


def test_required_service_that_is_away_fails_the_second_step_and_restores_the_model(
    budget_gb: float,
) -> None:
    model = ac_client.apply(new_model(), budget_gb, service=NOBODY, require_service=True)
    gradients(model, BATCH)
    with pytest.raises(ServiceUnavailable, match="require_service=True forbids planning in this process"):
        gradients(model, BATCH)
    assert all(map(torch.equal, gradients(model, BATCH), gradients(new_model(), BATCH)))


def test_alias_of_a_service_that_is_away_is_planned_here_unless_required(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = ac_client.apply(new_model(), budget_gb, alias=NAME, service=NOBODY)
    assert f"in place of {NAME}" in caplog.text
    gradients(model, BATCH)
    assert ac_client.applied(model).plan is not None  # made here
    for given in ({"require_service": True, "budget_gb": budget_gb}, {}):
        with pytest.raises(ServiceUnavailable, match="did not answer"):
            ac_client.apply(new_model(), alias=NAME, service=NOBODY, **given)


def test_arguments_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="alias needs a service"):
        ac_client.apply(new_model(), 1, alias=NAME)
    with pytest.raises(ValueError, match="require_service needs a service"):
        ac_client.apply(new_model(), 1, require_service=True)
    with pytest.raises(ValueError, match="not both"):
        ac_client.apply(new_model(), 1, alias=NAME, policy="policy.json", service=NOBODY)
    with pytest.raises(ValueError, match="alias must be a name"):
        ac_client.apply(new_model(), 1, alias="not a name", service=NOBODY)
