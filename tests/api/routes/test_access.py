"""Test keys, scopes, request ids, metrics and readiness."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx2
import pytest
from service_app import BOTH, JSON, TOKEN, URN, Serve
from service_fakes import Held, Raising, request
from sqlalchemy import select
from starlette.testclient import TestClient

from autoac.api.errors import SolverDied
from autoac.api.storage import keys as keys_module
from autoac.api.storage.database import Database
from autoac.api.storage.keys import Scope, create_key, revoke_key
from autoac.api.storage.tables import keys
from autoac.planner.formats.profile import Profile


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def secrets(database: Database) -> dict[str, str]:
    """Create a key of each scope."""
    with database.write() as connection:
        return {scope.word: create_key(connection, scope.word, scope)[1] for scope in Scope}


NEEDS = [
    ("GET", "/v1/policies", "read"),
    ("GET", "/v1/profiles", "read"),
    ("GET", "/v1/jobs", "read"),
    ("GET", "/v1/policies/" + "0" * 64, "read"),
    ("GET", "/v1/differences?before=a&after=b", "read"),
    ("GET", f"/v1/jobs/{'0' * 32}/events", "read"),
    ("GET", "/metrics", "read"),
    ("GET", "/version", "read"),
    ("POST", "/v1/policies", "plan"),
    ("POST", "/v1/frontiers", "plan"),
    ("POST", "/v1/floors", "plan"),
    ("POST", "/v1/profiles", "plan"),
    ("GET", "/v1/policies/" + "0" * 64 + "/about", "read"),
    ("GET", "/v1/policies/" + "0" * 64 + "/drawing", "read"),
    ("GET", "/v1/profiles/" + "0" * 64, "read"),
    ("DELETE", "/v1/jobs/" + "0" * 32, "plan"),
    ("DELETE", "/v1/profiles/" + "0" * 64, "admin"),
    ("DELETE", "/v1/policies/" + "0" * 64, "admin"),
]


def test_each_route_needs_a_key_and_its_scope(serve: Serve, secrets: dict[str, str]) -> None:
    http = serve()
    assert http.get("/livez").status_code == http.get("/readyz").status_code == 200
    for method, path, scope in NEEDS:
        nobody = http.request(method, path)
        assert (nobody.status_code, nobody.headers["www-authenticate"]) == (401, "Bearer"), path
        for word, secret in secrets.items():
            answer = http.request(method, path, headers=bearer(secret))
            refused = answer.status_code == 403 and answer.json()["type"] == URN + "forbidden"
            assert refused == (Scope[word.upper()] < Scope[scope.upper()]), (path, word)
            assert answer.status_code != 401


def test_every_route_documents_that_it_needs_a_key(serve: Serve) -> None:
    document = serve().get("/openapi.json").json()
    free = {("get", "/livez"), ("get", "/readyz")}
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            assert ("security" in said) == ((method, path) not in free), (method, path)


@pytest.mark.parametrize("given", ["", "wrong", "autoac_" + "A" * 43, "\xff"])
def test_invalid_key_is_refused(serve: Serve, secrets: dict[str, str], given: str) -> None:
    header = {"Authorization": b"Bearer " + given.encode("latin-1")}
    assert serve().get("/v1/policies", headers=header).status_code == 401  # type: ignore[arg-type]


def test_loopback_needs_a_key_only_once_one_exists(
    serve: Serve, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "REMEMBER_S", 0.0)
    http = serve()
    assert http.get("/v1/policies").status_code == 200
    with database.write() as connection:
        key, secret = create_key(connection, "first", Scope.READ)
    assert http.get("/v1/policies").status_code == 401
    assert http.get("/v1/policies", headers=bearer(secret)).status_code == 200
    with database.write() as connection:
        revoke_key(connection, key.id)
    assert http.get("/v1/policies", headers=bearer(secret)).status_code == 401
    assert http.get("/v1/policies").status_code == 401  # no open door because the last key was revoked


def test_other_addresses_always_need_a_key(serve: Serve) -> None:
    assert serve(host="0.0.0.0").get("/v1/policies").status_code == 401


def test_token_is_a_key_with_the_scope_admin(serve: Serve) -> None:
    http = serve(token=TOKEN)
    assert http.get("/v1/policies").status_code == 401
    for path in ("//v1/policies", "/v1/policies/", "/livez/../v1/policies"):
        assert http.post(path, headers=JSON).status_code in (401, 404)
    basic = {"Authorization": f"Basic {TOKEN}"}
    assert http.get("/v1/policies", headers=basic).status_code == 401
    assert http.get("/v1/policies", headers=bearer(TOKEN)).status_code == 200


def test_database_does_not_store_secrets(database: Database, secrets: dict[str, str]) -> None:
    with database.read() as connection:
        rows = connection.execute(select(keys)).all()
    assert {row.digest for row in rows} == {hashlib.sha256(s.encode()).hexdigest() for s in secrets.values()}
    assert not any(secret in str(row) for row in rows for secret in secrets.values())


def test_key_cancels_its_own_jobs_and_admin_any_job(
    serve: Serve, database: Database, secrets: dict[str, str], profile: Profile
) -> None:
    http = serve(Held())
    with database.write() as connection:
        other = create_key(connection, "other", Scope.PLAN)[1]

    def job(gb: int) -> str:
        headers = JSON | {"Prefer": "wait=0"} | bearer(secrets["plan"])
        return http.post("/v1/policies", content=request(profile, budget_gb=gb), headers=headers).headers[
            "location"
        ]

    mine = job(1)
    assert http.delete(mine, headers=bearer(other)).status_code == 403
    assert http.delete(mine, headers=bearer(secrets["plan"])).json()["state"] == "cancelled"
    assert http.delete(job(2), headers=bearer(secrets["admin"])).json()["state"] == "cancelled"


@BOTH
def test_key_is_known_by_its_name(serve: Serve, database: Database, profile: Profile) -> None:
    with database.write() as connection:
        key, secret = create_key(connection, "vision-team", Scope.PLAN)
    http = serve()
    http.headers.update(bearer(secret))
    assert http.post("/v1/policies", content=request(profile), headers=JSON).status_code == 201
    for path in ("/v1/profiles", "/v1/policies"):
        assert http.get(path).json()["items"][0]["created_by"] == "vision-team"
    assert http.get("/v1/jobs").json()["items"][0]["owner"] == "vision-team"
    with database.write() as connection:
        revoke_key(connection, key.id)
        create_key(connection, "vision-team", Scope.PLAN)  # a new secret for the same team


IDS = {"abc-1.2:3_4": True, "a" * 64: True, "a" * 65: False, "a b": False, "<x>": False}


@pytest.mark.parametrize(("given", "kept"), IDS.items())
def test_sane_request_id_is_kept(serve: Serve, given: str, kept: bool) -> None:
    answer = serve().get("/livez", headers={"X-Request-Id": given})
    id = answer.headers["x-request-id"]
    assert (id == given) == kept
    assert id


def metric(http: TestClient, name: str) -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name + " ")]
    assert len(lines) == 1, (name, lines)
    return float(lines[0].split()[-1])


@BOTH
def test_metrics_count_solves_errors_and_the_queue(serve: Serve, profile: Profile) -> None:
    http = serve()
    for _ in range(3):
        http.post("/v1/policies", content=request(profile), headers=JSON)
    http.post("/v1/policies", content=b"{", headers=JSON)
    http.get("/v1/policies/" + "0" * 64)
    assert metric(http, 'autoac_jobs{state="succeeded"}') == 1
    assert metric(http, 'autoac_jobs{state="queued"}') == 0
    assert metric(http, "autoac_runners") == 1
    assert metric(http, 'autoac_solve_requests_total{cache="hit",kind="policy"}') == 2
    assert metric(http, 'autoac_solve_seconds_count{ended="succeeded",kind="policy"}') == 1
    assert metric(http, "autoac_plan_gap_count") == 1
    assert metric(http, 'autoac_errors_total{type="not-json"}') == 1
    assert metric(http, 'autoac_errors_total{type="not-found"}') == 1
    assert metric(http, 'autoac_http_requests_total{method="POST",route="/v1/policies",status="201"}') == 3


def test_unknown_paths_make_no_counters(serve: Serve) -> None:
    http = serve()
    for i in range(5):
        http.get(f"/made/up/{i}")
    http.request("BREW", "/livez")
    text = http.get("/metrics").text
    assert "made/up" not in text
    assert "BREW" not in text


def test_failed_solve_is_counted(serve: Serve, profile: Profile) -> None:
    http = serve(Raising(error=SolverDied("by signal 9")))
    http.post("/v1/policies", content=request(profile), headers=JSON)
    assert metric(http, 'autoac_solve_seconds_count{ended="failed",kind="policy"}') == 1


@BOTH
def test_service_whose_workers_are_missing_is_not_ready(serve: Serve) -> None:
    answer = serve(runner="workers").get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not ready", "database": "ok", "migrations": "ok", "runners": "failed"}


def test_version_matches_that_of_policies(serve: Serve) -> None:
    answer: dict[str, Any] = serve().get("/version").json()
    assert answer["tools"]["highspy"]
    assert answer["autoac"] == answer["tools"]["autoac"]


def test_request_with_two_hosts_is_not_answered_without_a_key(serve: Serve) -> None:
    hosts = [("Host", "localhost"), ("Host", "evil.example")]
    assert serve().get("/v1/policies", headers=httpx2.Headers(hosts)).status_code == 421


@pytest.mark.parametrize(
    "path", ["/version", "/livez", "/v1/policies", "/v1/policies/none", "/none", "/jobs"]
)
def test_every_answer_forbids_guessing_its_type(serve: Serve, path: str) -> None:
    assert serve().get(path).headers.get_list("x-content-type-options") == ["nosniff"]


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        ("localhost", True),
        ("LOCALHOST:8421", True),
        ("127.0.0.1:8421", True),
        ("127.8.9.1", True),
        ("[::1]:8421", True),
        ("planner.example:8421", True),  # by the setting
        ("evil.example", False),
        ("evil.example:8421", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example:127.0.0.1", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_without_a_key_only_names_of_this_machine_are_answered(serve: Serve, host: str, taken: bool) -> None:
    """A web page whose name resolves to 127.0.0.1 cannot read the service's answers."""
    http = serve(allowed_hosts="planner.example, other.example")
    answer = http.get("/v1/policies", headers={"Host": host})
    assert answer.status_code == (200 if taken else 421)
    if not taken:
        assert answer.json()["type"] == URN + "other-host"
        assert "AUTOAC_ALLOWED_HOSTS" in answer.json()["detail"]
        assert http.post("/v1/policies", headers={"Host": host} | JSON, content=b"{}").status_code == 421


def test_with_a_key_any_host_name_is_answered(serve: Serve, secrets: dict[str, str]) -> None:
    http = serve()
    answer = http.get("/v1/policies", headers={"Host": "planner.example"} | bearer(secrets["read"]))
    assert answer.status_code == 200


def test_one_key_gets_at_most_half_of_the_body_slots(serve: Serve, database: Database) -> None:
    http = serve(token=TOKEN, reads_at_once=1, reads_waiting=3)
    with database.write() as connection:
        key = create_key(connection, "other", Scope.PLAN)[1]
    http.app.state.service.reader.slots["token"] = 2  # type: ignore[attr-defined]
    answers = {
        secret: http.post("/v1/floors", json={}, headers={"Authorization": f"Bearer {secret}"}).status_code
        for secret in (TOKEN, key)
    }
    assert answers == {TOKEN: 503, key: 422}
