"""`ac_client.remote` against the app itself, and against what may stand in its place."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx2
import pytest
from conftest import Transport
from service_fakes import InProcess, Raising, infeasible, out_of_time, save_all

import ac_client.remote
from ac_client.remote import ServiceRefused, ServiceUnavailable, request_policy
from autoac.api.errors import SolverDied
from autoac.planner.constraints import Constraints
from autoac.planner.errors import (
    InfeasibleBudget,
    InfeasibleConstraints,
    InvalidBudget,
    InvalidConstraints,
    SolverOutOfTime,
    UnknownVersion,
)
from autoac.planner.plan import plan
from autoac.planner.policy import Policy
from autoac.planner.profile import Profile

URL = "http://localhost"
TOKEN = "a token of more than sixteen"


def ask(profile: Profile, transport: httpx2.BaseTransport, budget: int = 1 << 30, **options: Any) -> Policy:
    return request_policy(URL, profile, budget, transport=transport, **options)


def answering(status: int, content: bytes = b"", **headers: str) -> httpx2.MockTransport:
    """A service that has no policy, and this for a profile."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json={"items": [], "next": None})
        return httpx2.Response(status, content=content, headers=headers)

    return httpx2.MockTransport(handle)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ac_client.remote, "PAUSES_S", (0.0,))


def test_the_policy_is_the_embedded_planners(in_app: Transport, profile: Profile) -> None:
    transport = in_app()
    policy = ask(profile, transport, headroom_bytes=7, gap=0.5, time_limit_s=3)
    wanted = save_all(profile, budget_bytes=1 << 30, headroom_bytes=7, gap=0.5, time_limit_s=3).policy()
    assert policy == wanted
    assert policy.to_json() == wanted.to_json()
    assert transport.request.headers["content-encoding"] == "zstd"


def test_an_infeasible_budget_is_the_planners_own_error(in_app: Transport, profile: Profile) -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        ask(profile, in_app(InProcess(infeasible)))
    with pytest.raises(InfeasibleBudget) as embedded:
        infeasible(profile)
    assert str(caught.value) == str(embedded.value)
    assert vars(caught.value) == vars(embedded.value)


def test_constraints_reach_the_planner_and_come_back_in_the_policy(
    in_app: Transport, profile: Profile
) -> None:
    transport = in_app(InProcess(plan))
    rules = Constraints(pin_save=("*/aten.mm",), forward_budget_bytes=1 << 29)
    policy = ask(profile, transport, constraints=rules)
    assert policy == plan(profile, budget_bytes=1 << 30, constraints=rules).policy()
    assert policy.constraints == rules


def test_constraints_that_cannot_be_met_are_the_planners_own_errors(
    in_app: Transport, profile: Profile
) -> None:
    transport = in_app(InProcess(plan))
    with pytest.raises(InvalidConstraints, match=r"'chian' stands for nothing .* did you mean chain"):
        ask(profile, transport, constraints=Constraints(pin_save=("chian",)))
    rules = Constraints(forward_budget_bytes=1)
    with pytest.raises(InfeasibleConstraints) as caught:
        ask(profile, transport, constraints=rules)
    with pytest.raises(InfeasibleConstraints) as embedded:
        plan(profile, budget_bytes=1 << 30, constraints=rules)
    assert str(caught.value) == str(embedded.value)
    assert vars(caught.value) == vars(embedded.value)


def test_so_are_the_others(in_app: Transport, profile: Profile) -> None:
    with pytest.raises(SolverOutOfTime, match=r"within 1\.00 GiB was found in 3 s"):
        ask(profile, in_app(InProcess(out_of_time)), time_limit_s=3)
    with pytest.raises(InvalidBudget):
        ask(profile, in_app(), budget=0)
    newer = profile.model_copy(update={"version": 2})
    with pytest.raises(UnknownVersion, match="version 2 is not known here; this release reads version 1"):
        ask(newer, in_app())


def test_the_token_is_the_environments(
    in_app: Transport, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ServiceRefused, match=r"401: this service wants a key.*environment variable AUTOAC_TOKEN"
    ):
        ask(profile, in_app(token=TOKEN))
    assert ask(profile, in_app(token=TOKEN), token=TOKEN).model == "Chain"
    monkeypatch.setenv("AUTOAC_TOKEN", TOKEN)
    assert ask(profile, in_app(token=TOKEN)).model == "Chain"


def test_a_solve_that_takes_long_is_waited_for(in_app: Transport, profile: Profile) -> None:
    """The service answers 202 to everybody here, whatever they prefer."""
    transport = in_app(max_wait_s=1e-9)
    assert ask(profile, transport) == save_all(profile, budget_bytes=1 << 30).policy()
    assert transport.request.url.path.endswith("/result")


def test_so_is_one_that_fails(in_app: Transport, profile: Profile) -> None:
    with pytest.raises(InfeasibleBudget):
        ask(profile, in_app(InProcess(infeasible), max_wait_s=1e-9))


def test_but_not_for_ever(in_app: Transport, profile: Profile) -> None:
    nobody_solves = in_app(runner="workers", max_wait_s=1e-9)
    with pytest.raises(ServiceUnavailable, match=r"has not finished /v1/jobs/"):
        ask(profile, nobody_solves, timeout_s=0.6)


def test_a_body_that_the_service_does_not_take_is_a_refusal(in_app: Transport, profile: Profile) -> None:
    with pytest.raises(ServiceRefused, match="413"):
        ask(profile, in_app(max_sent_bytes=10))


def test_a_dead_solver_and_a_busy_service_are_unavailable(in_app: Transport, profile: Profile) -> None:
    dead = Raising(error=SolverDied("the solver was ended by signal 9 (Killed)"))
    with pytest.raises(ServiceUnavailable, match="500: the solver was ended by signal 9"):
        ask(profile, in_app(dead))
    busy = in_app(reads_at_once=1, reads_waiting=0)
    busy.client.app.state.service.inside["somebody else"] = 1
    with pytest.raises(ServiceUnavailable, match="503: as many requests"):
        ask(profile, busy)


@pytest.mark.parametrize(
    ("transport", "error", "says"),
    [
        (answering(502, b"<html>"), ServiceUnavailable, "502: Bad Gateway"),
        (answering(504, b"<html>"), ServiceUnavailable, "504"),
        (answering(201, b"<html>welcome to the hotel"), ServiceUnavailable, "no policy"),
        (answering(200, b"{}"), ServiceUnavailable, "200"),
        (answering(202, location="http://elsewhere/v1/jobs/1"), ServiceUnavailable, "did not say which"),
        (answering(302, location="http://elsewhere"), ServiceUnavailable, "302"),
        (answering(404, b"<html>"), ServiceRefused, "404: Not Found"),
        (
            answering(
                422,
                b'{"type": "urn:autoac:problem:infeasible-budget"}',
                **{"content-type": "application/problem+json"},
            ),
            ServiceRefused,
            "422",
        ),
        (answering(500, b"[", **{"content-type": "application/problem+json"}), ServiceUnavailable, "500"),
    ],
)
def test_what_is_not_our_service(
    profile: Profile, transport: httpx2.BaseTransport, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        ask(profile, transport)


def test_a_policy_for_another_profile_is_not_taken(profile: Profile) -> None:
    other = profile.model_copy(update={"model": "Another"})
    text = save_all(other, budget_gb=1).policy().to_json()
    with pytest.raises(ServiceUnavailable, match="another profile, of Another"):
        ask(profile, answering(201, text.encode()))


def test_a_service_that_is_away_is_unavailable(profile: Profile) -> None:
    with pytest.raises(ServiceUnavailable, match="did not answer"):
        request_policy("http://127.0.0.1:9", profile, 1 << 30)


@pytest.mark.parametrize("url", ["127.0.0.1:8421", "service", "", "ftp://service", "http://"])
def test_a_url_that_is_none_is_an_error_and_not_a_service_that_is_away(profile: Profile, url: str) -> None:
    with pytest.raises(ValueError, match="service must be a URL"):
        request_policy(url, profile, 1 << 30)


def test_a_service_may_live_below_a_path(profile: Profile) -> None:
    seen = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url))
        return httpx2.Response(404)

    for url in ("http://host/planner/", "http://host/planner"):
        with pytest.raises(ServiceRefused):
            request_policy(url, profile, 1, transport=httpx2.MockTransport(handle))
    assert [address.partition("?")[0] for address in seen] == ["http://host/planner/v1/policies"] * 2


def test_asking_needs_no_torch() -> None:
    # By its file: what the package around it imports is the package's own affair.
    code = (
        "import importlib.util as u, sys;"
        f"spec = u.spec_from_file_location('remote', {ac_client.remote.__file__!r});"
        "module = sys.modules['remote'] = u.module_from_spec(spec); spec.loader.exec_module(module);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
