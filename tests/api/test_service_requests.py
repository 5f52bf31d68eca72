"""`ac_client.service_client` against the app itself, and against what may stand in its place."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
import pytest
from service_app import TOKEN, Transport
from service_fakes import Held, InProcess, Raising, infeasible, out_of_time, save_all
from waiting import until

import ac_client.service_client.connection
from ac_client.service_client.errors import ServiceRefused, ServiceUnavailable
from ac_client.service_client.policy_requests import request_policy
from autoac.api.errors import SolverDied
from autoac.api.requests import Kind, answer, job_body
from autoac.planner.errors import InfeasibleBudget, InvalidBudget, InvalidConstraints, SolverOutOfTime
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import LinkRates, Profile
from autoac.planner.minimum_peak import find_minimum_peak
from autoac.planner.offload import plan_with_host
from autoac.planner.plan import plan

pytestmark = pytest.mark.slow

URL = "http://localhost"
PROBLEM = {"content-type": "application/problem+json"}


def ask(profile: Profile, transport: httpx2.BaseTransport, budget: int = 1 << 30, **options: Any) -> Policy:
    return request_policy(URL, profile, budget, transport=transport, **options)


def answering(status: int, content: bytes = b"", **headers: str) -> httpx2.MockTransport:
    """Return a service that stores no policy and sends this answer to a profile."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json={"items": [], "next": None})
        return httpx2.Response(status, content=content, headers=headers)

    return httpx2.MockTransport(handle)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ac_client.service_client.connection, "FIRST_PAUSE_S", 0.0)


def test_policy_is_the_embedded_planners(in_app: Transport, profile: Profile) -> None:
    transport = in_app()
    policy = ask(profile, transport, constraints=Constraints(headroom_bytes=7), gap=0.5, time_limit_s=3)
    wanted = save_all(
        profile, budget_bytes=1 << 30, constraints=Constraints(headroom_bytes=7), gap=0.5, time_limit_s=3
    ).policy()
    assert policy == wanted
    assert policy.to_json() == wanted.to_json()
    assert transport.request.headers["content-encoding"] == "zstd"


def test_infeasible_budget_is_the_planners_own_error(in_app: Transport, profile: Profile) -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        ask(profile, in_app(InProcess(infeasible)))
    with pytest.raises(InfeasibleBudget) as embedded:
        infeasible(profile)
    assert str(caught.value) == str(embedded.value)
    assert vars(caught.value) == vars(embedded.value)


def test_host_budget_reaches_the_services_own_planner(profile: Profile) -> None:
    rates = LinkRates(out_bytes_per_us=1e9, in_bytes_per_us=1e9, latency_us=0.0)
    linked = profile.model_copy(update={"link": rates})
    budget = find_minimum_peak(linked).found
    rules = Constraints(host_budget_bytes=1 << 40)
    options = {"budget_bytes": budget, "constraints": rules.model_dump(mode="json")}
    found = answer(Kind.POLICY, job_body(linked.to_json().encode(), options), most_seconds=60)
    assert found == plan_with_host(linked, budget_bytes=budget, constraints=rules).policy().to_json()
    assert Policy.from_json(found).constraints == rules


def test_constraints_that_cannot_be_met_are_the_planners_own_errors(
    in_app: Transport, profile: Profile
) -> None:
    transport = in_app(InProcess(plan))
    with pytest.raises(InvalidConstraints, match=r"'chian' matches none .* did you mean chain"):
        ask(profile, transport, constraints=Constraints(pin_save=("chian",)))
    rules = Constraints(forward_budget_bytes=1)
    with pytest.raises(InfeasibleBudget) as caught:
        ask(profile, transport, constraints=rules)
    with pytest.raises(InfeasibleBudget) as embedded:
        plan(profile, budget_bytes=1 << 30, constraints=rules)
    assert str(caught.value) == str(embedded.value)
    assert vars(caught.value) == vars(embedded.value) | {"save_set": None}  # which a service does not send


def test_other_planner_errors_are_raised_as_such(in_app: Transport, profile: Profile) -> None:
    with pytest.raises(SolverOutOfTime) as caught:
        ask(profile, in_app(InProcess(out_of_time)), time_limit_s=3)
    assert vars(caught.value) == vars(SolverOutOfTime(1 << 30, 3.0, 1 << 29, 1 << 31))
    with pytest.raises(InvalidBudget):
        ask(profile, in_app(), budget=0)


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ({"type": "unknown-version", "format": "autoac.profile", "known": 0}, "version 0.*on the service"),
        (
            {"type": "unknown-version", "format": "autoac.profile", "known": 8},
            "version 8.*upgrade autoac here",
        ),
        ({"type": "malformed-profile", "detail": "ops.new: extra"}, "ops.new: extra.*the same release"),
    ],
)
def test_service_of_another_release_is_planned_around(
    profile: Profile, problem: dict[str, Any], says: str
) -> None:
    content = json.dumps(problem | {"type": f"urn:autoac:problem:{problem['type']}"}).encode()
    with pytest.raises(ServiceUnavailable, match=says):
        ask(profile, answering(422, content, **PROBLEM))


def test_service_refuses_a_version_that_it_does_not_read(in_app: Transport, profile: Profile) -> None:
    newer = profile.model_copy(update={"version": 8})
    with pytest.raises(
        ServiceUnavailable, match=r"reads version 7 .* writes version 8: upgrade .* on the service"
    ):
        ask(newer, in_app())


def test_job_that_somebody_cancelled_is_asked_for_again(in_app: Transport, profile: Profile) -> None:
    solver = Held()
    transport = in_app(solver)
    http = transport.client

    def cancel() -> None:
        job = until(lambda: http.get("/v1/jobs", params={"state": "running"}).json()["items"])[0]
        http.delete(job["url"])
        until(lambda: solver.log.count("began") == 2)
        http.portal.call(solver.go.set)

    with ThreadPoolExecutor() as pool:
        cancelled = pool.submit(cancel)
        assert ask(profile, transport) == save_all(profile, budget_bytes=1 << 30).policy()
        cancelled.result()
    assert transport.posts == 2


def test_job_that_is_cancelled_again_is_not_asked_for_for_ever(profile: Profile) -> None:
    with pytest.raises(ServiceUnavailable, match="cancelled twice"):
        ask(profile, answering(409, b'{"type": "urn:autoac:problem:job-cancelled"}', **PROBLEM))


@contextmanager
def raw_service(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a server that reads the head of a request, then calls `answer`. Yield its address."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                with connection, suppress(OSError):
                    connection.recv(65536)
                    answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n", b""], ids=["body", "head"]
)
def test_service_that_dribbles_is_given_up_in_time(profile: Profile, head: bytes) -> None:
    def dribble(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b"H")
            time.sleep(0.05)

    with raw_service(dribble) as url, ThreadPoolExecutor() as pool:
        asked = pool.submit(request_policy, url, profile, 1 << 30, timeout_s=0.5)
        with pytest.raises(ServiceUnavailable, match=r"did not answer within 0\.[0-5] s"):
            asked.result(60)


@pytest.mark.parametrize("coding", [b"identity", b"gzip"])
def test_answer_without_end_is_refused_at_a_cap(
    profile: Profile, coding: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ac_client.service_client.connection, "MOST_ANSWER", 1 << 20)
    content = bytes(1 << 24) if coding == b"identity" else gzip.compress(bytes(1 << 24))

    def endless(connection: socket.socket) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-encoding: %s\r\ncontent-length: 999999999\r\n\r\n"
        connection.sendall(head % coding)
        while True:
            connection.sendall(content)

    with (
        raw_service(endless) as url,
        pytest.raises(ServiceUnavailable, match=r"more than 1\.00 MiB|compressed"),
    ):
        request_policy(url, profile, 1 << 30)


@pytest.mark.parametrize("token", ["schlüssel-schlüssel", "secret1\nsecret2", "secret\x7f"])
def test_key_that_no_header_can_have_is_refused_and_not_quoted(
    profile: Profile, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOAC_TOKEN", token)
    with pytest.raises(ServiceRefused, match="environment variable AUTOAC_TOKEN must be a key of") as caught:
        ask(profile, answering(500))
    assert not any(piece in str(caught.value) for piece in token.split())


def test_token_is_the_environments(
    in_app: Transport, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ServiceRefused, match=r"401: this service needs a key.*environment variable AUTOAC_TOKEN"
    ):
        ask(profile, in_app(token=TOKEN))
    for given in (TOKEN, f"{TOKEN}\n", f" {TOKEN}\r\n"):  # as in a mounted file
        assert ask(profile, in_app(token=f"{TOKEN}\n"), token=given).model == "Chain"
    monkeypatch.setenv("AUTOAC_TOKEN", TOKEN)
    assert ask(profile, in_app(token=TOKEN)).model == "Chain"


def test_solve_that_takes_long_is_waited_for(in_app: Transport, profile: Profile) -> None:
    """The service answers 202 to everybody here, whatever they prefer."""
    transport = in_app(max_wait_s=1e-9)
    assert ask(profile, transport) == save_all(profile, budget_bytes=1 << 30).policy()
    assert transport.request.url.path.endswith("/result")
    with pytest.raises(InfeasibleBudget):
        ask(profile, in_app(InProcess(infeasible), max_wait_s=1e-9), budget=1 << 29)


@pytest.mark.usefixtures("pauses")
def test_solve_is_not_waited_for_forever(in_app: Transport, profile: Profile) -> None:
    nobody_solves = in_app(runner="workers", max_wait_s=1e-9)
    with pytest.raises(ServiceUnavailable, match=r"has not finished /v1/jobs/"):
        ask(profile, nobody_solves, timeout_s=60)


def test_body_that_the_service_does_not_take_is_a_refusal(in_app: Transport, profile: Profile) -> None:
    with pytest.raises(ServiceRefused, match="413"):
        ask(profile, in_app(max_sent_bytes=10))


@pytest.mark.usefixtures("pauses")
def test_dead_solver_and_a_busy_service_are_unavailable(in_app: Transport, profile: Profile) -> None:
    dead = Raising(error=SolverDied("the solver was ended by signal 9 (Killed)"))
    with pytest.raises(ServiceUnavailable, match="500: the solver was ended by signal 9"):
        ask(profile, in_app(dead))
    busy = in_app(reads_at_once=1, reads_waiting=0)
    busy.client.app.state.service.reader.slots["somebody else"] = 1
    with pytest.raises(ServiceUnavailable, match="503: too many requests"):
        ask(profile, busy)


@pytest.mark.parametrize(
    ("transport", "error", "says"),
    [
        (answering(502, b"<html>"), ServiceUnavailable, "502: Bad Gateway"),
        (answering(504, b"<html>"), ServiceUnavailable, "504"),
        (answering(201, b"<html>welcome to the hotel"), ServiceUnavailable, "other than a policy"),
        (answering(200, b"{}"), ServiceUnavailable, "200"),
        (answering(202, location="http://elsewhere/v1/jobs/1"), ServiceUnavailable, "did not say which"),
        (answering(302, location="http://elsewhere"), ServiceUnavailable, "302"),
        (answering(404, b"<html>"), ServiceRefused, "404: Not Found"),
        (
            answering(422, b'{"type": "urn:autoac:problem:infeasible-budget"}', **PROBLEM),
            ServiceRefused,
            "422",
        ),
        (answering(429), ServiceUnavailable, "429"),  # so that the plan is made in process
        (answering(500, b"[", **PROBLEM), ServiceUnavailable, "500"),
    ],
)
def test_other_servers_are_unavailable_or_refusing(
    profile: Profile, transport: httpx2.BaseTransport, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        ask(profile, transport)


def test_policy_for_another_profile_is_not_taken(profile: Profile) -> None:
    other = profile.model_copy(update={"model": "Another"})
    text = save_all(other, budget_gb=1).policy().to_json()
    with pytest.raises(ServiceUnavailable, match="another profile, of Another"):
        ask(profile, answering(201, text.encode()))


def test_service_that_is_away_is_unavailable(profile: Profile) -> None:
    with pytest.raises(ServiceUnavailable, match="did not answer"):
        request_policy("http://127.0.0.1:9", profile, 1 << 30)


@pytest.mark.parametrize("url", ["127.0.0.1:8421", "service", "", "ftp://service", "http://"])
def test_invalid_url_is_a_value_error(profile: Profile, url: str) -> None:
    with pytest.raises(ValueError, match="service must be a URL"):
        request_policy(url, profile, 1 << 30)


def test_service_may_live_below_a_path(profile: Profile) -> None:
    seen = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url))
        return httpx2.Response(404)

    for url in ("http://host/planner/", "http://host/planner"):
        with pytest.raises(ServiceRefused):
            request_policy(url, profile, 1, transport=httpx2.MockTransport(handle))
    assert [address.partition("?")[0] for address in seen] == ["http://host/planner/v1/policies"] * 2
