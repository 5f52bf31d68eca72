"""Test two replicas of the API on one PostgreSQL: both give the same answers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from service_app import JSON, NOW, POSTGRES, Serve
from service_fakes import InProcess, Planned, chain_profile, request, save_all
from starlette.testclient import TestClient

pytestmark = POSTGRES


@pytest.fixture
def replicas(serve: Serve) -> tuple[TestClient, TestClient]:
    """Start two replicas that share only the database."""
    return serve(), serve()


def post_policy(http: TestClient, budget_gb: float = 1.0) -> Any:
    answer = http.post("/v1/policies", content=request(chain_profile(), budget_gb=budget_gb), headers=JSON)
    assert answer.status_code == 201
    return answer


def test_replicas_share_what_is_stored(replicas: tuple[TestClient, TestClient]) -> None:
    one, other = replicas
    answer = post_policy(one)
    profile = chain_profile()
    found = [http.get(answer.headers["location"]) for http in replicas]
    assert [got.content for got in found] == [answer.content] * 2
    assert [got.headers["etag"] for got in found] == [answer.headers["etag"]] * 2
    known = {"If-None-Match": answer.headers["etag"]}
    assert [http.get(answer.headers["location"], headers=known).status_code for http in replicas] == [304] * 2
    post_policy(other, 2.0)
    for path in (
        "/v1/policies",
        f"/v1/policies?fingerprint={profile.fingerprint}&budget_gb=2",
        f"/v1/policies?fingerprint={profile.fingerprint}&budget_gb=2&gap=0.01",
        f"{answer.headers['location']}/about",
        "/v1/profiles",
        f"/v1/profiles/{profile.digest}",
        "/v1/jobs",
    ):
        asked = [http.get(path) for http in replicas]
        assert [got.status_code for got in asked] == [200, 200], path
        assert asked[0].content == asked[1].content, path


def test_equal_requests_at_two_replicas_at_once_are_solved_once(serve: Serve) -> None:
    """The second request comes while the first is solved, and waits for it."""
    solved, begun, ended = [], threading.Event(), threading.Event()

    def counted(profile: Any, **options: Any) -> Planned:
        solved.append(options)
        begun.set()
        assert ended.wait(60)
        return save_all(profile, **options)

    replicas = [serve(InProcess(counted)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post_policy, replicas[0])
        assert begun.wait(60)
        second = pool.submit(post_policy, replicas[1])
        time.sleep(1.0)
        assert not second.done()
        ended.set()
        assert first.result(60).content == second.result(60).content
    assert len(solved) == 1


def test_job_is_shown_and_cancelled_by_another_replica(serve: Serve) -> None:
    one, other = (serve(runner="workers") for _ in range(2))
    answer = one.post("/v1/policies", content=request(chain_profile()), headers=NOW)
    job = answer.headers["location"]
    assert other.get(job).content == one.get(job).content
    assert other.delete(job).status_code in (200, 202, 204)
    assert [http.get(job).json()["state"] for http in (one, other)] == ["cancelled"] * 2
