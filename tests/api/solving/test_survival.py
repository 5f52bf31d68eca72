"""Kill processes and restart the database: no accepted job is lost, and none is finished twice.

The service and the workers are separate processes. Their solves are children that wait for a file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from postgres import Server
from service_app import BOTH, NOW, POSTGRES
from service_fakes import request, save_all, waits_for_a_file
from sqlalchemy import make_url
from waiting import is_running, listening, until

from autoac.api.cli.health_check import answers
from autoac.planner.formats.profile import Profile

pytestmark = pytest.mark.slow

FAKES = str(Path(__file__).parents[1] / "service_fakes.py")


@dataclass
class Machines:
    """The processes of a service."""

    folder: Path
    database_url: str
    embedded: bool
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    clients: list[httpx2.Client] = field(default_factory=list)

    @property
    def database_name(self) -> str:
        return str(make_url(self.database_url).database)

    @property
    def gate(self) -> Path:
        """Return the file that lets solves end."""
        return self.folder / "gate"

    @property
    def began(self) -> int:
        """Return the number of solves that have begun."""
        file = self.gate.with_suffix(".began")
        return len(file.read_text().splitlines()) if file.exists() else 0

    def start(self, role: str, **settings: str) -> subprocess.Popen[bytes]:
        """Start a process, serve or worker, with settings of its own."""
        environment = os.environ | {
            "AUTOAC_DATABASE_URL": self.database_url,
            "AUTOAC_RUNNER": "embedded" if self.embedded else "workers",
            "AUTOAC_PORT": "0",
            "AUTOAC_LEASE_S": "2",
            "AUTOAC_ATTEMPTS": "5",
            "AUTOAC_SHUTDOWN_S": "1",
            "GATE_FILE": str(self.gate),
        }
        environment |= {f"AUTOAC_{name.upper()}": value for name, value in settings.items()}
        log = self.folder / f"log-{len(self.running)}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, FAKES, role, waits_for_a_file.__name__],
                env=environment,
                stdout=stream,
                stderr=stream,
            )
        self.running.append(process)
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        """Return the output of a process so far."""
        return (self.folder / f"log-{self.running.index(process)}").read_text()

    def serve(self, **settings: str) -> tuple[subprocess.Popen[bytes], httpx2.Client]:
        """Start a service and return it with a client."""
        process = self.start("serve", **settings)
        log = self.folder / f"log-{self.running.index(process)}"
        http = httpx2.Client(base_url=listening(process, log), timeout=60)
        self.clients.append(http)
        return process, http

    def solve(self) -> subprocess.Popen[bytes] | None:
        """Start a worker unless the service runs jobs itself."""
        return None if self.embedded else self.start("worker")

    def worker_with_probe(self, **settings: str) -> tuple[subprocess.Popen[bytes], httpx2.Client]:
        """Start a worker for one job at a time and return it with a client of its probe."""
        process = self.start("worker", worker_port="0", solves_at_once="1", **settings)
        found = until(lambda: re.search(r'"port": (\d+), "event": "metrics"', self.log(process)))
        http = httpx2.Client(base_url=f"http://127.0.0.1:{found[1]}", timeout=60)
        self.clients.append(http)
        until(lambda: '"event": "working"' in self.log(process))
        return process, http

    def end(self) -> None:
        """Kill the remaining processes."""
        for http in self.clients:
            http.close()
        for process in self.running:
            process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path: Path, database_url: str, size: str) -> Iterator[Machines]:
    """Return a service without processes; kill all of its processes afterwards."""
    made = Machines(tmp_path, database_url, embedded=size == "sqlite")
    yield made
    made.end()


@pytest.fixture
def server(postgres: Server, database_url: str) -> Iterator[Server]:
    """Return the server of the test's database; end its outages afterwards, since other tests use it too."""
    yield postgres
    if postgres.process is None:
        postgres.start()
    postgres.set_read_only(False)


def state(http: httpx2.Client, url: str) -> str:
    try:
        return str(http.get(url).json().get("state", "?"))
    except httpx2.TransportError:
        return "away"


def accepted(http: httpx2.Client, profile: Profile, **options: Any) -> str:
    response = http.post("/v1/policies", content=request(profile, **options), headers=NOW)
    assert response.status_code == 202, response.text
    return str(response.headers["location"])


def assert_finished_once(http: httpx2.Client, url: str, text: str) -> None:
    """Assert that a job succeeded exactly once with this policy, and that every stored policy can be read."""
    job = http.get(url).json()
    assert job["state"] == "succeeded"
    assert http.get(f"/v1/policies/{job['policy_id']}").text == text
    lines = [line for line in http.get(f"{url}/events").text.splitlines() if line.startswith("data: ")]
    states = [json.loads(line.removeprefix("data: ")).get("state") for line in lines]
    assert states.count("succeeded") == 1
    assert states[-1] == "succeeded"
    for policy in http.get("/v1/policies").json()["items"]:
        assert http.get(policy["url"]).status_code == 200


def wanted(profile: Profile, gb: int) -> str:
    return save_all(profile, budget_gb=gb).policy().to_json()


@BOTH
def test_service_killed_in_mid_solve_loses_no_job(machines: Machines, profile: Profile) -> None:
    machines.solve()
    process, http = machines.serve()
    urls = {gb: accepted(http, profile, budget_gb=gb) for gb in (1, 2, 3)}
    until(lambda: machines.began >= 1)
    process.kill()
    process.wait()
    before = machines.began
    _, http = machines.serve()
    assert http.get("/readyz").json()["database"] == "ok"
    if machines.embedded:  # the solves died with the service; they begin again
        until(lambda: machines.began > before)
    machines.gate.touch()
    for gb, url in urls.items():
        until(lambda url=url: state(http, url) == "succeeded")
        assert_finished_once(http, url, wanted(profile, gb))


@POSTGRES
def test_worker_killed_in_mid_solve_loses_no_job(machines: Machines, profile: Profile) -> None:
    first = machines.start("worker")
    _, http = machines.serve()
    url = accepted(http, profile, budget_gb=1)
    until(lambda: machines.began == 1)
    child = int(machines.gate.with_suffix(".began").read_text())
    first.kill()
    first.wait()
    until(lambda: not is_running(child))  # the children end with their worker
    second = machines.start("worker")
    until(lambda: machines.began == 2)
    # a worker that is stopped gives its job back at once
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == 0
    assert state(http, url) == "queued"
    machines.start("worker")
    machines.gate.touch()
    until(lambda: state(http, url) == "succeeded")
    assert_finished_once(http, url, wanted(profile, 1))


@POSTGRES
@pytest.mark.parametrize("embedded", [True, False], ids=["embedded", "workers"])
def test_database_crash_in_mid_solve_loses_no_job(
    server: Server, machines: Machines, profile: Profile, embedded: bool
) -> None:
    machines.embedded = embedded
    machines.solve()
    _, http = machines.serve()
    urls = {gb: accepted(http, profile, budget_gb=gb) for gb in (1, 2)}
    until(lambda: machines.began >= 1)
    server.stop()
    away = http.get("/readyz")
    assert (away.status_code, away.json()["database"]) == (503, "failed")
    assert http.get("/livez").status_code == 200
    refused = http.get("/v1/policies")
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:autoac:problem:database-away")
    machines.gate.touch()  # a solve ends while its result cannot be stored
    server.start()
    for gb, url in urls.items():
        until(lambda url=url: state(http, url) == "succeeded")
        assert_finished_once(http, url, wanted(profile, gb))
    urls[3] = accepted(http, profile, budget_gb=3)
    until(lambda: state(http, urls[3]) == "succeeded")  # later jobs run too
    assert all(p.poll() is None for p in machines.running)
    for one in machines.running:  # the lines of libraries, too
        for line in machines.log(one).splitlines():
            assert {"event", "level", "timestamp"} <= json.loads(line).keys()


@POSTGRES
def test_each_worker_solves_again_after_a_failover(
    server: Server, machines: Machines, profile: Profile
) -> None:
    """The gate holds each solve, and a worker runs one at a time: two that began are of two workers."""
    workers = [machines.worker_with_probe() for _ in range(2)]
    _, http = machines.serve()

    def read_only() -> None:
        """Refuse writes until each process has noticed; an outage restarts no worker."""
        server.set_read_only(True)
        until(lambda: http.get("/readyz").json()["database"] == "failed")
        refused = http.post("/v1/policies", content=request(profile), headers=NOW)
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:autoac:problem:database-away")
        assert int(refused.headers["retry-after"]) > 0
        for worker, _ in workers:
            until(lambda worker=worker: "in a read-only transaction" in machines.log(worker))
        assert [probe.get("/livez").status_code for _, probe in workers] == [200, 200]
        server.set_read_only(False)

    def restart() -> None:
        server.stop()
        assert http.get("/readyz").status_code == 503
        server.start()

    outages = (read_only, restart, lambda: server.disconnect(machines.database_name))
    for number, outage in enumerate(outages):
        outage()
        machines.gate.unlink(missing_ok=True)
        before = machines.began
        until(lambda: http.get("/readyz").status_code == 200, seconds=30)
        urls = [accepted(http, profile, budget_gb=1 + 2 * number + part) for part in range(2)]
        until(lambda before=before: machines.began == before + 2, seconds=30)
        machines.gate.touch()
        for url in urls:
            until(lambda url=url: state(http, url) == "succeeded", seconds=30)
    assert [probe.get("/livez").json() for _, probe in workers] == [{"status": "alive"}] * 2
    assert [process.poll() for process, _ in workers] == [None, None]


@POSTGRES
def test_probe_restarts_a_worker_that_no_job_can_reach(server: Server, machines: Machines) -> None:
    """The server's processes stop answering on the open connections; new connections work."""
    machines.embedded = True
    worker, probe = machines.worker_with_probe(lease_s="1")
    service, http = machines.serve(lease_s="1")
    until(lambda: http.get("/readyz").status_code == 200)
    assert http.get("/livez").json() == probe.get("/livez").json() == {"status": "alive"}
    stopped = server.backends(machines.database_name)
    try:
        for backend in stopped:
            os.kill(backend, signal.SIGSTOP)
        for one in (http, probe):
            until(lambda one=one: one.get("/livez").status_code == 503, seconds=30)
            assert one.get("/livez").json() == {"status": "runner deaf"}
            assert not answers(f"{one.base_url}/livez")
        assert b"autoac_solve_seconds" in probe.get("/metrics").content
        worker.kill()
        service.kill()
        _, probe = machines.worker_with_probe(lease_s="1")
        assert probe.get("/livez").status_code == 200
    finally:
        for backend in stopped:
            os.kill(backend, signal.SIGCONT)


def test_stopped_service_gives_its_jobs_back(machines: Machines, profile: Profile) -> None:
    process, http = machines.serve()
    url = accepted(http, profile, budget_gb=1)
    until(lambda: machines.began == 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM)
    _, http = machines.serve()
    machines.gate.touch()
    until(lambda: state(http, url) == "succeeded")
    assert http.get(url).json()["attempt"] == 1
    assert_finished_once(http, url, wanted(profile, 1))
