"""Test profiles and policies over HTTP, on both databases."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zstandard
from service_app import BOTH, JSON, URN, Serve
from service_fakes import InProcess, chain_profile, request, save_all
from starlette.testclient import TestClient

from autoac.planner import plan
from autoac.planner.formats.profile import Profile

pytestmark = BOTH


@pytest.fixture
def http(serve: Serve) -> TestClient:
    return serve()


def solved(http: TestClient, profile: Profile, **options: Any) -> str:
    """Plan a profile and return the id of its policy."""
    response = http.post("/v1/policies", content=request(profile, **options), headers=JSON)
    assert response.status_code == 201, response.text
    return response.headers["location"].removeprefix("/v1/policies/")


# --- profiles -------------------------------------------------------------------------------------------


def test_equal_profiles_have_one_digest(http: TestClient, profile: Profile) -> None:
    first = http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    assert (first.status_code, first.json()["digest"]) == (201, profile.digest)
    shuffled = json.dumps(dict(reversed(json.loads(profile.to_json()).items())), indent=3)
    second = http.post(
        "/v1/profiles",
        content=zstandard.compress(shuffled.encode()),
        headers=JSON | {"Content-Encoding": "zstd"},
    )
    assert second.status_code == 200
    assert second.json() == first.json()
    assert [p["digest"] for p in http.get("/v1/profiles").json()["items"]] == [profile.digest]


def test_stored_profile_is_returned_unchanged(http: TestClient, profile: Profile) -> None:
    url = f"/v1/profiles/{profile.digest}"
    assert http.get(url).status_code == http.head(url).status_code == 404
    http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    answer = http.get(url)
    assert answer.text == profile.to_json()
    assert http.head(url).status_code == 200
    assert http.get(url, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_deleting_a_profile_keeps_its_policies(http: TestClient, profile: Profile) -> None:
    policy = solved(http, profile)
    url = f"/v1/profiles/{profile.digest}"
    assert http.delete(url).status_code == 204
    assert http.get(url).status_code == http.delete(url).status_code == 404
    assert http.get(f"/v1/policies/{policy}").status_code == 200


def test_solve_may_name_a_stored_profile(http: TestClient, profile: Profile) -> None:
    body = json.dumps({"profile_digest": profile.digest, "budget_gb": 1})
    missing = http.post("/v1/policies", content=body, headers=JSON)
    assert (missing.status_code, missing.json()["type"]) == (404, URN + "not-found")
    http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    made = http.post("/v1/policies", content=body, headers=JSON)
    assert made.status_code == 201
    assert made.text == save_all(profile, budget_gb=1).policy().to_json()


def test_nul_in_the_name_of_a_model_is_escaped(http: TestClient, profile: Profile) -> None:
    odd = profile.model_copy(update={"model": "a\0b"})
    assert http.post("/v1/profiles", content=odd.to_json(), headers=JSON).status_code == 201
    solved(http, odd)
    for path in ("/v1/profiles", "/v1/policies"):
        assert [item["model"] for item in http.get(path).json()["items"]] == [r"a\x00b"]
        assert len(http.get(path, params={"model": r"a\x00b"}).json()["items"]) == 1
        assert http.get(path, params={"model": "a\0b"}).status_code == 422


def test_nul_in_the_name_of_a_device_is_refused(http: TestClient, profile: Profile) -> None:
    environment = profile.environment.model_copy(update={"device_name": "a\0b"})
    odd = profile.model_copy(update={"environment": environment})
    for path, body in (("/v1/profiles", odd.to_json().encode()), ("/v1/policies", request(odd))):
        response = http.post(path, content=body, headers=JSON)
        assert (response.status_code, response.json()["type"]) == (422, URN + "malformed-profile")
        assert http.get(path, params={"device": "a\0b"}).status_code == 422


def test_concurrent_uploads_store_one_profile(http: TestClient, profile: Profile) -> None:
    def store(_: int) -> int:
        return http.post("/v1/profiles", content=profile.to_json(), headers=JSON).status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = sorted(pool.map(store, range(8)))
    assert statuses == [200] * 7 + [201]


# --- policies -------------------------------------------------------------------------------------------


def test_stored_policy_is_the_text_of_the_answer(http: TestClient, profile: Profile) -> None:
    answer = http.post("/v1/policies", content=request(profile), headers=JSON)
    stored = http.get(answer.headers["location"])
    assert stored.content == answer.content
    assert stored.headers["etag"] == answer.headers["etag"]
    assert hashlib.sha256(stored.content).hexdigest() == stored.headers["etag"].strip('"')
    again = http.get(answer.headers["location"], headers={"If-None-Match": stored.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_policies_are_found_by_each_of_four_filters(http: TestClient, profile: Profile) -> None:
    other = profile.model_copy(update={"model": "Other"})
    wanted = solved(http, profile, budget_gb=2)
    solved(http, profile, budget_gb=3)
    solved(http, other, budget_gb=2)

    def ids(**params: Any) -> list[str]:
        return [p["id"] for p in http.get("/v1/policies", params=params).json()["items"]]

    assert len(ids()) == 3
    assert len(ids(device="two cores")) == 3
    assert ids(device="elsewhere") == []
    assert ids(model="Chain", budget_gb=2) == [wanted]
    assert ids(fingerprint=profile.fingerprint, budget_bytes=2 << 30) == [wanted]
    both = http.get("/v1/policies", params={"budget_gb": 1, "budget_bytes": 1})
    assert both.status_code == 422


def test_pages_list_every_policy_once(http: TestClient, profile: Profile) -> None:
    made = [solved(http, profile, budget_gb=gb) for gb in range(1, 6)]
    seen, cursor = [], None
    while True:
        params = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = http.get("/v1/policies", params=params).json()
        seen += [p["id"] for p in page["items"]]
        solved(http, profile, budget_gb=100 + len(seen))  # what comes in between moves no page
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == made[::-1]


@pytest.mark.parametrize("cursor", ["!", "AAAA", "-1", "1.0", "٣", "1" * 19])
def test_foreign_cursor_is_refused(http: TestClient, cursor: str) -> None:
    assert http.get("/v1/policies", params={"cursor": cursor}).status_code == 422


def test_difference_of_two_policies_names_the_ops(serve: Serve) -> None:
    http = serve(InProcess(plan))
    mib = 1 << 20
    profile = chain_profile(1 * mib, 8 * mib, 1 * mib, 8 * mib, 1 * mib, 8 * mib, 1 * mib)
    roomy, tight = solved(http, profile, budget_gb=1), solved(http, profile, budget_bytes=27 * mib)
    found = http.get("/v1/differences", params={"before": roomy, "after": tight}).json()
    assert found["held"]
    assert {(row["before"], row["after"]) for row in found["rows"]} == {("saved", "recomputed")}
    assert {row["module"] for row in found["rows"]} == {"chain"}
    assert sum(row["held_bytes"] for row in found["rows"]) <= -8 * mib
    spent = [http.get(f"/v1/policies/{id}/about").json()["recompute_us"] for id in (roomy, tight)]
    assert sum(row["recompute_us"] for row in found["rows"]) == spent[1] - spent[0] > 0
    assert http.get("/v1/differences", params={"before": roomy, "after": roomy}).json()["rows"] == []
    missing = http.get("/v1/differences", params={"before": roomy, "after": "0" * 64})
    assert (missing.status_code, missing.json()["type"]) == (404, URN + "not-found")


def test_difference_without_a_profile_compares_the_decisions(serve: Serve) -> None:
    http = serve(InProcess(plan))
    small, other = chain_profile(1 << 20, 1 << 20), chain_profile(1 << 20, model="Other")
    ids = {"before": solved(http, small), "after": solved(http, other)}
    assert http.get("/v1/differences", params=ids).json()["held"]
    assert http.delete(f"/v1/profiles/{other.digest}").status_code == 204
    found = http.get("/v1/differences", params=ids).json()
    assert not found["held"]
    assert [(row["op"], row["after"], row["held_bytes"]) for row in found["rows"]] == [
        ("mm.default#1", "absent", 0)
    ]


def test_drawing_is_made_when_it_is_asked_for(serve: Serve, profile: Profile) -> None:
    http = serve(InProcess(plan))
    id = solved(http, profile, budget_bytes=plan(profile, budget_bytes=1 << 40).peak)
    url = f"/v1/policies/{id}/drawing"
    drawn = http.get(url).json()
    track, policy = drawn["tracks"][0], http.get(f"/v1/policies/{id}").json()
    assert track["live_bytes"][track["peak"]] == policy["predicted"]["peak_bytes"]
    assert drawn["budget_bytes"] == policy["budget_bytes"]
    assert http.get(url, headers={"Accept-Encoding": "identity"}).json() == drawn
    http.delete(f"/v1/profiles/{profile.digest}")
    assert http.get(url).status_code == 404


def test_profile_and_policy_have_facts(http: TestClient, profile: Profile) -> None:
    policy = http.get(f"/v1/policies/{solved(http, profile)}/about").json()
    found = http.get(f"/v1/profiles/{policy['profile_digest']}/about").json()
    assert found == http.get("/v1/profiles").json()["items"][0]
    assert (found["digest"], found["inputs"]) == (profile.digest, list(profile.inputs))
    assert http.get("/v1/policies", params={"profile": profile.digest}).json()["items"] == [policy]
    assert http.get("/v1/policies", params={"profile": "0" * 64}).json()["items"] == []
    assert policy["created_by"] == found["created_by"] == "loopback"


def test_deleted_policy_is_planned_again(http: TestClient, profile: Profile) -> None:
    """A request is not answered from a job that lost its result."""
    policy = solved(http, profile)
    url = f"/v1/policies/{policy}"
    assert http.get(url).status_code == 200
    assert http.delete(url).status_code == 204
    assert http.get(url).status_code == http.delete(url).status_code == 404
    assert solved(http, profile) == policy
