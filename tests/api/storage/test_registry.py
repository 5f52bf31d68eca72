"""Test profiles, policies and aliases over HTTP, on both databases."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zstandard
from service_app import BOTH, Serve
from service_fakes import InProcess, chain_profile, request, save_all
from starlette.testclient import TestClient

from autoac.api import Settings
from autoac.api.storage.database import Database
from autoac.api.storage.retention import prune
from autoac.planner import plan
from autoac.planner.formats.profile import Profile

pytestmark = BOTH

JSON = {"Content-Type": "application/json"}
URN = "urn:autoac:problem:"


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


def test_name_with_nul_is_refused(http: TestClient, profile: Profile) -> None:
    odd = profile.model_copy(update={"model": "a\0b"})
    response = http.post("/v1/profiles", content=odd.to_json(), headers=JSON)
    assert (response.status_code, response.json()["type"]) == (422, URN + "malformed-profile")
    assert http.get("/v1/profiles", params={"model": "a\0b"}).status_code == 422


def test_longest_names_of_a_profile_are_stored(http: TestClient, profile: Profile) -> None:
    long = profile.model_copy(update={"model": "ü" * 4096})
    solved(http, long)
    assert http.get("/v1/policies").json()["items"][0]["model"] == "ü" * 4096


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


def test_new_solve_of_the_same_budget_is_a_new_version(http: TestClient, profile: Profile) -> None:
    first = solved(http, profile, gap=0.01)
    second = solved(http, profile, gap=0.02)
    assert first != second
    about = [http.get(f"/v1/policies/{id}/about").json() for id in (first, second)]
    assert [a["version"] for a in about] == [1, 2]
    assert [p["id"] for p in http.get("/v1/policies").json()["items"]] == [second, first]


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


@pytest.mark.parametrize("cursor", ["!", "AAAA", "LTE", "4pyT", "MTAwMDAwMDAwMDAwMDAwMDAwMDAwMA"])
def test_foreign_cursor_is_refused(http: TestClient, cursor: str) -> None:
    assert http.get("/v1/policies", params={"cursor": cursor}).status_code == 422


def test_difference_of_two_policies_names_the_ops(serve: Serve) -> None:
    http = serve(InProcess(plan))
    mib = 1 << 20
    profile = chain_profile(1 * mib, 8 * mib, 1 * mib, 8 * mib, 1 * mib, 8 * mib, 1 * mib)
    roomy, tight = solved(http, profile, budget_gb=1), solved(http, profile, budget_bytes=27 * mib)
    found = http.get("/v1/differences", params={"before": roomy, "after": tight}).json()
    assert not found["same"]
    assert found["changes"][0]["name"] == "chain"
    assert found["changes"][0]["lost"]
    assert found["after"]["recompute_us"] > found["before"]["recompute_us"] == 0
    assert "only" in found["words"]
    assert http.get("/v1/differences", params={"before": roomy, "after": roomy}).json()["same"]


# --- aliases --------------------------------------------------------------------------------------------

NAME = "llama-8b@h100/production"
NEW = {"If-None-Match": "*"}


def move(http: TestClient, policy: str, headers: dict[str, str], name: str = NAME) -> Any:
    return http.put(f"/v1/aliases/{name}", json={"policy_id": policy}, headers=headers)


def test_alias_moves_only_from_the_expected_revision(http: TestClient, profile: Profile) -> None:
    one, two = solved(http, profile, budget_gb=1), solved(http, profile, budget_gb=2)
    assert move(http, one, {}).status_code == 428
    made = move(http, one, NEW)
    assert (made.status_code, made.headers["etag"]) == (201, '"1"')
    assert move(http, two, NEW).status_code == 412
    moved = move(http, two, {"If-Match": '"1"'})
    assert (moved.status_code, moved.headers["etag"], moved.json()["policy_id"]) == (200, '"2"', two)
    lost = move(http, one, {"If-Match": '"1"'})
    assert (lost.status_code, lost.json()["type"]) == (412, URN + "precondition-failed")
    assert http.get(f"/v1/aliases/{NAME}").json()["policy_id"] == two


def test_one_of_many_concurrent_moves_wins(http: TestClient, profile: Profile) -> None:
    policies = [solved(http, profile, budget_gb=gb) for gb in range(1, 7)]
    move(http, policies[0], NEW)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda id: move(http, id, {"If-Match": '"1"'}), policies))
    assert sorted(a.status_code for a in answers) == [200] + [412] * 5
    winner = next(a for a in answers if a.status_code == 200)
    assert http.get(f"/v1/aliases/{NAME}").json() == winner.json()


def test_alias_returns_its_policy_and_its_history(http: TestClient, profile: Profile) -> None:
    one, two = solved(http, profile, budget_gb=1), solved(http, profile, budget_gb=2)
    move(http, one, NEW)
    move(http, two, {"If-Match": '"1"'})
    named = http.get(f"/v1/named-policies/{NAME}")
    assert named.content == http.get(f"/v1/policies/{two}").content
    assert named.headers["content-location"] == f"/v1/policies/{two}"
    same = http.get(f"/v1/named-policies/{NAME}", headers={"If-None-Match": f'"{two}"'})
    assert same.status_code == 304
    history = http.get(f"/v1/alias-history/{NAME}").json()["items"]
    assert [(m["revision"], m["policy_id"], m["moved_by"]) for m in history] == [
        (2, two, "loopback"),
        (1, one, "loopback"),
    ]


def test_revisions_continue_after_an_alias_is_deleted(http: TestClient, profile: Profile) -> None:
    one = solved(http, profile)
    move(http, one, NEW)
    assert http.delete(f"/v1/aliases/{NAME}", headers={"If-Match": '"7"'}).status_code == 412
    assert http.delete(f"/v1/aliases/{NAME}").status_code == 204
    assert http.get(f"/v1/aliases/{NAME}").status_code == 404
    assert move(http, one, NEW).headers["etag"] == '"3"'
    items = http.get(f"/v1/alias-history/{NAME}").json()["items"]
    assert [m["policy_id"] for m in items] == [one, None, one]


BAD_NAMES = ["../etc/passwd", "a//b", "a/%2e%2e/b", "%00", ".hidden", "a b", "a" * 201, "a/b/c/d/e"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_invalid_alias_name_is_refused(http: TestClient, profile: Profile, name: str) -> None:
    assert move(http, solved(http, profile), NEW, name).status_code in (404, 405, 422)
    assert http.get("/v1/aliases").json()["items"] == []


def test_alias_of_a_missing_policy_is_refused(http: TestClient) -> None:
    assert move(http, "0" * 64, NEW).status_code == 404


def test_policy_named_by_an_alias_cannot_be_deleted(http: TestClient, profile: Profile) -> None:
    policy = solved(http, profile)
    move(http, policy, NEW)
    kept = http.delete(f"/v1/policies/{policy}")
    assert (kept.status_code, kept.json()["type"]) == (409, URN + "in-use")
    http.delete(f"/v1/aliases/{NAME}")
    assert http.delete(f"/v1/policies/{policy}").status_code == 204
    # and is planned again when somebody asks for it, not answered from a job that lost its result
    assert solved(http, profile) == policy


# --- retention ------------------------------------------------------------------------------------------


def test_retention_deletes_by_age_and_count_but_never_aliased_policies(
    http: TestClient, database: Database, profile: Profile
) -> None:
    versions = [solved(http, profile, gap=gap) for gap in (0.1, 0.2, 0.3, 0.4)]
    move(http, versions[0], NEW)

    def kept(**settings: Any) -> set[str]:
        with database.write() as connection:
            prune(connection, Settings(**settings))
        return {p["id"] for p in http.get("/v1/policies").json()["items"]}

    assert kept() == set(versions)
    assert kept(keep_policies_days=1) == set(versions)
    assert kept(keep_policies_count=2) == {versions[0], *versions[2:]}
    assert kept(keep_policies_days=1e-9) == {versions[0]}
    assert http.get(f"/v1/named-policies/{NAME}").status_code == 200
