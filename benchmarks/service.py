"""Measure the load that the service carries, and print the table of docs/service.md.

    python -m benchmarks.service [--database postgresql://...]

Service and load run on this machine: requests for stored policies, large profiles posted by 32 clients at
once, and a queue of 40 plans solved by one worker and by four. The workers need a PostgreSQL in which tables
may be created; without `--database` that part is skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2

from autoac.api.storage.database import Database
from autoac.planner.formats.profile import Profile

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}
CONNECTIONS = 16
PLANS = 40
POSTERS = 32


def chain(n: int, seed: int = 0) -> Profile:
    """Return a step of `n` ops, each reading the one before, with outputs of many sizes."""
    tests = str(Path(__file__).parents[1] / "tests" / "api")
    if tests not in sys.path:
        sys.path.append(tests)
    sizes = (random.Random(seed).randrange(1, 64) * MIB for _ in range(n))
    built = import_module("service_fakes").chain_profile(*sizes, model=f"chain of {n}, {seed}")
    assert isinstance(built, Profile)
    return built


@dataclass(frozen=True)
class Running:
    """A process of the service."""

    pid: int
    log: Path

    @property
    def port(self) -> int:
        """Return the port of the service once it listens."""
        text = until(lambda: re.search(r"running on http://[^:]+:(\d+)", self.log.read_text()))
        return int(text[1])

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds of the process, without its children."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def process(folder: Path, role: str, **settings: object) -> Iterator[Running]:
    """Run a process of the service until the block ends."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAC_")}
    environment |= {f"AUTOAC_{name.upper()}": str(value) for name, value in settings.items()}
    log = folder / f"{role}-{time.monotonic_ns()}.log"
    with log.open("wb") as stream:
        running = subprocess.Popen(
            [sys.executable, "-m", "autoac.api", role], env=environment, stderr=stream, stdout=stream
        )
    try:
        yield Running(running.pid, log)
    finally:
        running.terminate()
        running.wait(60)


def until(holds: Callable[[], Any]) -> Any:
    """Return the result of `holds` once it is true, after ten minutes at most."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.05)
    raise SystemExit("the service did not do it within ten minutes")


async def hammer(port: int, path: str, headers: str, seconds: float) -> list[float]:
    """Return the seconds of each answer. Each connection sends a GET as soon as it has its answer."""
    asked = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()
    end = time.monotonic() + seconds
    times: list[float] = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < end:
            began = time.perf_counter()
            writer.write(asked)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            if not head.startswith(("http/1.1 200", "http/1.1 304")):
                raise SystemExit(head)
            length = re.search(r"content-length: (\d+)", head)
            if length:
                await reader.readexactly(int(length[1]))
            times.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(one() for _ in range(CONNECTIONS)))
    return times


def percentile(times: Sequence[float], share: float) -> float:
    """Return a percentile of times, in milliseconds."""
    return sorted(times)[int(share * (len(times) - 1))] * 1e3


def stored_policies(folder: Path, seconds: float) -> Iterator[str]:
    """Measure stored policies with one process of the service."""
    with process(folder, "serve", port=0, database_url=f"sqlite:///{folder / 'a.sqlite3'}") as service:
        port, profile = service.port, chain(1000)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            body = f'{{"budget_gb": 1000, "profile": {profile.to_json()}}}'
            made = http.post("/v1/policies", content=body, headers=JSON | {"Prefer": "wait=300"})
            path, tag = made.headers["location"], made.headers["etag"]
            size = len(made.content)
        find = f"/v1/policies?fingerprint={profile.fingerprint}&budget_gb=1000"
        look = f"{find}&device=two%20cores&gap=0.01&time_limit_s=60&constraints_digest=&limit=3"
        for what, asked, headers in (
            (f"GET a policy of {size >> 10} KiB", path, ""),
            ("the same, If-None-Match", path, f"If-None-Match: {tag}\r\n"),
            ("find one by fingerprint and budget", find, ""),
            ("find one as the client does, options too", look, ""),
        ):
            before = service.cpu_s
            times = asyncio.run(hammer(port, asked, headers, seconds))
            each = (service.cpu_s - before) / len(times) * 1e3
            yield (
                f"| {what}, {CONNECTIONS} connections | {len(times) / seconds:.0f} requests/s, "
                f"p50 {percentile(times, 0.5):.1f} ms, p99 {percentile(times, 0.99):.1f} ms; "
                f"{each:.2f} ms of the service's CPU each |"
            )


def posted_profiles(folder: Path) -> Iterator[str]:
    """Measure the upload of large profiles."""
    texts = [chain(56_000, seed).to_json().encode() for seed in range(4)]
    bodies = [texts[i % 4].replace(b'"model":"chain', b'"model":"%d chain' % i, 1) for i in range(POSTERS)]

    async def post(port: int) -> tuple[list[int], list[float], float]:
        alive: list[float] = []
        done = asyncio.Event()
        url = f"http://127.0.0.1:{port}"

        async def watch(http: httpx2.AsyncClient) -> None:
            while not done.is_set():
                began = time.perf_counter()
                assert (await http.get("/livez")).status_code == 200
                alive.append(time.perf_counter() - began)
                await asyncio.sleep(0.05)

        async with httpx2.AsyncClient(base_url=url, timeout=600) as http:
            watcher = asyncio.create_task(watch(http))
            began = time.perf_counter()
            sent = (http.post("/v1/profiles", content=body, headers=JSON) for body in bodies)
            statuses = [answer.status_code for answer in await asyncio.gather(*sent)]
            seconds = time.perf_counter() - began
            done.set()
            await watcher
        return statuses, alive, seconds

    with process(folder, "serve", port=0, database_url=f"sqlite:///{folder / 'b.sqlite3'}") as service:
        statuses, alive, seconds = asyncio.run(post(service.port))
    failed = sum(status != 201 for status in statuses)
    yield (
        f"| {POSTERS} clients post a profile of {len(bodies[0]) / 1e6:.1f} MB each, at once | {failed} fail; "
        f"all stored in {seconds:.1f} s; `/livez` meanwhile p50 {percentile(alive, 0.5):.1f} ms, "
        f"max {max(alive) * 1e3:.0f} ms |"
    )


def workers(folder: Path, url: str) -> Iterator[str]:
    """Measure workers on PostgreSQL."""
    with Database(url) as database:
        database.upgrade()
    profile = chain(300)
    seconds: dict[int, float] = {}
    answers: dict[int, set[str]] = {}
    for count, replicas in ((1, 1), (4, 2)):
        with _api(folder, url) as service, httpx2.Client(timeout=600) as http:
            base = f"http://127.0.0.1:{service.port}"
            http.post(f"{base}/v1/profiles", content=profile.to_json(), headers=JSON)
            jobs = []
            for i in range(PLANS):  # headroom: distinct requests; no-cache: solved again by the four
                asked = {"profile_digest": profile.digest, "budget_gb": 4 + i / 20}
                headers = JSON | {"Prefer": "wait=0", "Cache-Control": "no-cache"}
                answer = http.post(f"{base}/v1/policies", content=json.dumps(asked), headers=headers)
                jobs.append(base + answer.headers["location"])
            with running(folder, url, count, replicas - 1):
                _poll(http, jobs[0], lambda job: job["state"] != "queued")
                began = time.monotonic()
                ended = [_poll(http, job, lambda job: job["finished_at"]) for job in jobs]
                seconds[count] = time.monotonic() - began
                answers[count] = {str(job["policy_id"] or job["problem"]) for job in ended}
    same = "the same" if answers[1] == answers[4] else "OTHER"
    yield (
        f"| {PLANS} distinct plans: one worker, and four | {seconds[1]:.1f} s and {seconds[4]:.1f} s: "
        f"{seconds[1] / seconds[4]:.2f} times as fast; {same} answers with a second replica of the API |"
    )


@contextmanager
def running(folder: Path, url: str, count: int, replicas: int) -> Iterator[None]:
    """Run workers and further replicas of the API until the block ends."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(process(folder, "worker", database_url=url, solves_at_once=1))
        for _ in range(replicas):
            stack.enter_context(_api(folder, url))
        yield


def _api(folder: Path, url: str) -> AbstractContextManager[Running]:
    return process(folder, "serve", port=0, database_url=url)


def _poll(http: httpx2.Client, url: str, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return the job once `holds` is true of it."""
    while True:
        job: dict[str, Any] = http.get(url).json()
        if holds(job):
            return job
        time.sleep(0.05)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", help="a PostgreSQL for the workers' part")
    parts = ("stored", "posted", "workers")
    parser.add_argument("--only", choices=parts, help="one part of it")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row of stored policies")
    arguments = parser.parse_args()
    print("| what | measured |\n| --- | --- |")
    with tempfile.TemporaryDirectory(prefix="autoac-bench-") as name:
        folder = Path(name)
        rows = {"stored": stored_policies(folder, arguments.seconds), "posted": posted_profiles(folder)}
        if arguments.database:
            rows["workers"] = workers(folder, arguments.database)
        for part in rows if arguments.only is None else (arguments.only,):
            for row in rows.get(part, ()):
                print(row, flush=True)


if __name__ == "__main__":
    main()
