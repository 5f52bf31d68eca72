"""Test solves as jobs on both databases: waiting, sharing, cancelling, events, limits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import anyio
import pytest
from service_app import BOTH, JSON, NOW, URN, Serve
from service_fakes import Held, InProcess, infeasible, out_of_time, request, save_all
from starlette.testclient import TestClient
from waiting import until

from autoac.api.storage.database import Database
from autoac.api.storage.event_feed import LOOK_S
from autoac.api.storage.job_store import JobStore
from autoac.api.storage.keys import Scope, create_key
from autoac.planner import find_frontier, plan
from autoac.planner.formats.profile import Profile
from autoac.planner.minimum_peak import find_minimum_peak

pytestmark = [BOTH, pytest.mark.slow]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Gate(Held):
    """A `Held` solver that a test opens from another thread."""

    def open(self, http: TestClient) -> None:
        portal = http.portal
        portal.call(self.go.set)


def post(http: TestClient, profile: Profile, headers: dict[str, str] = JSON, **options: Any) -> Any:
    return http.post("/v1/policies", content=request(profile, **options), headers=headers)


def job_of(response: Any) -> str:
    assert response.status_code == 202, response.text
    return str(response.headers["location"])


# --- waiting --------------------------------------------------------------------------------------------


def test_long_solve_becomes_a_job_whose_result_is_the_policy(serve: Serve, profile: Profile) -> None:
    gate = Gate()
    http = serve(gate)
    accepted = post(http, profile, NOW)
    assert int(accepted.headers["retry-after"]) > 0
    assert accepted.headers["preference-applied"] == "wait=0"
    url = job_of(accepted)
    running = until(lambda: (j := http.get(url).json())["state"] == "running" and j["progress"] and j)
    assert running["progress"] == {
        "incumbent": 10.0,
        "bound": 5.0,
        "gap": 0.5,
        "seconds": 0.1,
        "point": 0,
        "points": 0,
    }
    assert http.get(running["result_url"]).status_code == 202
    gate.open(http)
    done = until(lambda: (j := http.get(url).json())["state"] == "succeeded" and j)
    wanted = save_all(profile, budget_gb=1).policy().to_json()
    assert http.get(done["result_url"]).text == wanted
    assert http.get(f"/v1/policies/{done['policy_id']}").text == wanted
    assert post(http, profile).text == wanted  # stored: not solved again
    assert gate.log == ["began", "ended"]


def test_failed_job_has_the_problem_of_the_request(serve: Serve, profile: Profile) -> None:
    http = serve(InProcess(infeasible))
    direct = post(http, profile)
    assert (direct.status_code, direct.json()["type"]) == (422, URN + "infeasible-budget")
    job = http.get("/v1/jobs").json()["items"][0]
    assert job["state"] == "failed"
    assert job["problem"] == direct.json()
    result = http.get(job["result_url"])
    assert (result.status_code, result.json()) == (422, direct.json())
    assert result.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(("fake", "jobs"), [(infeasible, 1), (out_of_time, 2)])
def test_only_repeatable_failures_are_reused(serve: Serve, profile: Profile, fake: Any, jobs: int) -> None:
    http = serve(InProcess(fake))
    assert post(http, profile).json() == post(http, profile).json()
    assert len(http.get("/v1/jobs").json()["items"]) == jobs


def test_no_cache_solves_again(serve: Serve, profile: Profile) -> None:
    http = serve()
    assert post(http, profile).text == post(http, profile, JSON | {"Cache-Control": "no-cache"}).text
    jobs = http.get("/v1/jobs", params={"state": "succeeded", "kind": "policy"}).json()["items"]
    assert len(jobs) == 2
    assert len(http.get("/v1/policies").json()["items"]) == 1  # the same text


# --- sharing and cancelling -----------------------------------------------------------------------------


def test_equal_requests_share_one_solve(serve: Serve, profile: Profile, threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    http = serve(gate, wait_s=60)
    same = [{"budget_gb": 1}, {"budget_bytes": 1 << 30}, {"budget_gb": 1, "gap": 0.01}]
    answers = [threads.submit(post, http, profile, **options) for options in same * 3]
    until(lambda: waiters(http) == 9)
    gate.open(http)
    assert {a.result().text for a in answers} == {save_all(profile, budget_gb=1).policy().to_json()}
    assert gate.log == ["began", "ended"]
    text = http.get("/metrics").text
    assert 'autoac_solve_requests_total{cache="miss",kind="policy"} 1.0' in text
    assert 'autoac_solve_requests_total{cache="shared",kind="policy"} 8.0' in text


def waiters(http: TestClient) -> int:
    """Return the number of requests that wait for the newest job."""
    from sqlalchemy import select

    from autoac.api.storage.tables import jobs

    service = http.app.state.service  # type: ignore[attr-defined]
    with service.database.read() as connection:
        return connection.scalar(select(jobs.c.waiters).order_by(jobs.c.number.desc()).limit(1)) or 0


def test_cancelling_stops_the_solve_and_answers_its_waiters(
    serve: Serve, profile: Profile, threads: ThreadPoolExecutor
) -> None:
    gate = Gate()
    http = serve(gate, wait_s=60)
    waiting: Future[Any] = threads.submit(post, http, profile)
    job = until(lambda: http.get("/v1/jobs", params={"state": "running"}).json()["items"])[0]
    assert http.delete(job["url"]).json()["state"] == "cancelled"
    until(lambda: gate.log == ["began", "killed"])
    assert (waiting.result().status_code, waiting.result().json()["type"]) == (409, URN + "job-cancelled")
    assert http.delete(job["url"]).json()["state"] == "cancelled"  # a second time is fine
    gate.open(http)
    assert post(http, profile).status_code == 201  # and the next request is solved


def test_waiter_with_another_key_gets_its_own_job_when_the_owner_cancels(
    serve: Serve, database: Database, profile: Profile, threads: ThreadPoolExecutor
) -> None:
    gate = Gate()
    http = serve(gate, wait_s=60)
    with database.write() as connection:
        secrets = [create_key(connection, name, Scope.PLAN)[1] for name in ("owner", "other")]
    owner, other = ({"Authorization": f"Bearer {secret}"} for secret in secrets)
    waiting = []
    for count, headers in enumerate((owner, other), start=1):
        waiting.append(threads.submit(post, http, profile, JSON | headers))
        until(lambda count=count: waiters(http) == count)
    until(lambda: gate.log.count("began") == 1)
    job = http.get("/v1/jobs", headers=owner).json()["items"][0]
    assert http.delete(job["url"], headers=owner).json()["state"] == "cancelled"
    until(lambda: gate.log.count("began") == 2)
    gate.open(http)
    assert [answer.result().status_code for answer in waiting] == [409, 201]
    owners = [job["owner"] for job in http.get("/v1/jobs", headers=owner).json()["items"]]
    assert len(set(owners)) == 2


def test_finished_job_cannot_be_cancelled(serve: Serve, profile: Profile) -> None:
    http = serve()
    post(http, profile)
    job = http.get("/v1/jobs").json()["items"][0]
    assert http.delete(job["url"]).json()["state"] == "succeeded"
    assert http.delete("/v1/jobs/" + "0" * 32).status_code == 404


@pytest.mark.parametrize(
    ("others", "state"), [("nobody", "cancelled"), ("waits", "running"), ("202", "running")]
)
def test_solve_is_cancelled_with_its_last_client_unless_accepted(
    serve: Serve, profile: Profile, threads: ThreadPoolExecutor, others: str, state: str
) -> None:
    gate = Gate()
    http = serve(gate, wait_s=60)
    before: list[Future[Any]] = []
    if others == "waits":
        before.append(threads.submit(post, http, profile))
        until(lambda: waiters(http) == 1)
    elif others == "202":
        post(http, profile, NOW)
    leave = threading.Event()
    gone = threads.submit(leaves, http, request(profile), leave)
    until(lambda: waiters(http) == len(before) + 1 and gate.log == ["began"])
    leave.set()
    gone.result(60)
    assert http.get("/v1/jobs").json()["items"][0]["state"] == state
    if others == "nobody":
        until(lambda: gate.log == ["began", "killed"])
    else:
        gate.open(http)
        until(lambda: gate.log == ["began", "ended"])
    assert all(answer.result().status_code == 201 for answer in before)


def leaves(http: TestClient, body: bytes, leave: threading.Event) -> None:
    """Send a request whose client disconnects at the event `leave`."""
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        while not leave.is_set():
            await anyio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/policies",
        "raw_path": b"/v1/policies",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    portal = http.portal
    portal.call(http.app, scope, receive, send)


# --- frontiers and floors -------------------------------------------------------------------------------


def test_frontiers_and_floors_are_jobs_too(serve: Serve, profile: Profile) -> None:
    http = serve(InProcess(plan))
    body = json.dumps({"profile": json.loads(profile.to_json()), "points": 4})
    made = http.post("/v1/frontiers", content=body, headers=JSON)
    assert made.status_code == 200
    wanted = find_frontier(profile, points=4)
    assert [p["peak_bytes"] for p in made.json()["plans"]] == [p.peak for p in wanted.plans]
    assert http.get(made.headers["location"]).content == made.content
    found = http.post("/v1/floors", json={"profile_digest": profile.digest})
    assert found.json()["found_bytes"] == find_minimum_peak(profile).found
    kinds = [job["kind"] for job in http.get("/v1/jobs").json()["items"]]
    assert kinds == ["floor", "frontier"]


# --- events ---------------------------------------------------------------------------------------------


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and data of each event of a stream."""
    blocks = [dict(line.split(": ", 1) for line in b.splitlines()) for b in text.split("\n\n") if "data" in b]
    return [(block["event"], json.loads(block["data"])) for block in blocks]


def test_events_stream_states_and_progress(
    serve: Serve, profile: Profile, threads: ThreadPoolExecutor
) -> None:
    gate = Gate()
    http = serve(gate)
    url = job_of(post(http, profile, NOW))
    stream = threads.submit(http.get, f"{url}/events")
    until(lambda: http.get(url).json()["progress"])
    gate.open(http)
    answer = stream.result(60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    received = events(answer.text)
    assert [data["state"] for kind, data in received if kind == "state"] == ["queued", "running", "succeeded"]
    progress = [data for kind, data in received if kind == "progress"]
    assert progress[0] == {"incumbent": 10.0, "bound": 5.0, "gap": 0.5, "seconds": 0.1}
    # a late listener receives all events, a reconnecting one the rest, and one that has all of them gets 204
    assert http.get(f"{url}/events").text == answer.text
    ids = [line.removeprefix("id: ") for line in answer.text.splitlines() if line.startswith("id: ")]
    rest = http.get(f"{url}/events", headers={"Last-Event-ID": ids[-2]})
    assert events(rest.text) == received[-1:]
    assert http.get(f"{url}/events", headers={"Last-Event-ID": ids[-1]}).status_code == 204


def test_listeners_of_a_job_share_reads(
    serve: Serve, profile: Profile, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    http = serve(gate)
    url = job_of(post(http, profile, NOW))
    until(lambda: http.get(url).json()["progress"])
    reads = []
    read = JobStore.events
    monkeypatch.setattr(
        JobStore, "events", lambda *arguments: reads.append(time.monotonic()) or read(*arguments)
    )
    streams = [threads.submit(http.get, f"{url}/events") for _ in range(8)]
    until(lambda: http.app.state.service.streams.total() == 8)  # type: ignore[attr-defined]
    until(lambda: len(reads) > 2)  # two at once at first, since the first found events
    reads.clear()
    until(lambda: len(reads) > 4)
    assert reads[4] - reads[0] >= 4 * LOOK_S  # separate reads of the listeners would come together
    gate.open(http)
    assert len({stream.result(60).text for stream in streams}) == 1
    assert events(streams[0].result().text)[-1] == ("state", {"state": "succeeded"})


def test_key_has_a_limit_of_event_streams(
    serve: Serve, profile: Profile, threads: ThreadPoolExecutor
) -> None:
    gate = Gate()
    http = serve(gate, key_streams=1)
    url = job_of(post(http, profile, NOW))
    stream = threads.submit(http.get, f"{url}/events")
    service = http.app.state.service  # type: ignore[attr-defined]
    until(lambda: service.streams.total() == 1)
    refused = http.get(f"{url}/events")
    assert (refused.status_code, refused.json()["type"]) == (429, URN + "too-many-streams")
    assert refused.json()["limit"] == 1
    assert int(refused.headers["retry-after"]) > 0
    gate.open(http)
    assert stream.result(60).status_code == 200
    until(lambda: service.streams.total() == 0)
    assert http.get(f"{url}/events").status_code == 200


# --- limits ---------------------------------------------------------------------------------------------


def test_key_has_a_limit_of_queued_jobs(serve: Serve, profile: Profile) -> None:
    http = serve(Gate(), key_queued=2, solves_at_once=1)
    urls = [job_of(post(http, profile, NOW, budget_gb=1))]
    until(lambda: http.get(urls[0]).json()["state"] == "running")
    urls += [job_of(post(http, profile, NOW, budget_gb=gb)) for gb in (2, 3)]
    refused = post(http, profile, NOW, budget_gb=4)
    assert (refused.status_code, refused.json()["type"], refused.json()["limit"]) == (
        429,
        URN + "too-many-jobs",
        2,
    )
    assert int(refused.headers["retry-after"]) > 0
    assert post(http, profile, NOW, budget_gb=3).status_code == 202  # a shared job does not count
    http.delete(urls[2])
    assert post(http, profile, NOW, budget_gb=4).status_code == 202


def test_queue_has_a_limit(serve: Serve, profile: Profile) -> None:
    http = serve(Gate(), queue_most=1, solves_at_once=1)
    url = job_of(post(http, profile, NOW, budget_gb=1))
    until(lambda: http.get(url).json()["state"] == "running")
    post(http, profile, NOW, budget_gb=2)
    assert post(http, profile, NOW, budget_gb=3).status_code == 503


def test_service_started_twice_leaves_running_jobs_to_the_first(serve: Serve, profile: Profile) -> None:
    gate = Gate()
    http = serve(gate)
    job = job_of(post(http, profile, NOW))
    until(lambda: http.get(job).json()["state"] == "running")
    again = serve(gate)
    assert again.get(job).json()["attempt"] == 1
    gate.open(http)
    until(lambda: http.get(job).json()["state"] == "succeeded")
    assert gate.log == ["began", "ended"]
