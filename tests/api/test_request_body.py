"""Test the limits of bodies, and the memory that bodies use."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import anyio
import httpx2
import pytest
import zstandard
from anyio.abc import TaskGroup
from fastapi import FastAPI, Request, Response
from service_app import JSON, ZSTD, Serve
from service_fakes import InProcess, chain_profile, request, save_all

from autoac.api import Settings, create_app
from autoac.api.error_mapping import problem_of, problem_response
from autoac.api.errors import ServiceError
from autoac.api.request_body import SMALL, EncodedBody, decode_body, receive_body
from autoac.api.requests import Kind, ParsedRequest
from autoac.api.solving.child_process import SpawnedSolver
from autoac.api.storage.database import Database
from autoac.api.storage.keys import Scope, create_key

MIB = 1 << 20


async def post(
    content: bytes | AsyncIterator[bytes], headers: dict[str, str], settings: Settings
) -> httpx2.Response:
    """Return the answer of a small service that reports the length of the decoded body."""
    app = FastAPI()
    app.add_exception_handler(ServiceError, explained)

    @app.post("/length")
    async def length(request: Request) -> Response:
        sent = await receive_body(request, settings)
        return Response(str(len(decode_body(sent, settings.max_plain_bytes))))

    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post("/length", content=content, headers=headers)


async def explained(request: Request, error: Exception) -> Response:
    return problem_response(problem_of(error))


def bomb(nbytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join([*(compressor.compress(bytes(MIB)) for _ in range(nbytes // MIB)), compressor.flush()])


@pytest.mark.anyio
async def test_body_at_the_cap_is_accepted_and_one_byte_more_is_refused() -> None:
    settings = Settings(max_sent_bytes=1000, max_plain_bytes=2000)
    for headers, encode, most in ((JSON, bytes, 1000), (ZSTD, zstandard.compress, 2000)):
        assert (await post(encode(b" " * most), headers, settings)).text == str(most)
        assert (await post(encode(b" " * (most + 1)), headers, settings)).status_code == 413


@pytest.mark.anyio
async def test_endless_body_is_refused_at_the_cap() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield bytes(1000)

    response = await post(endless(), JSON, Settings(max_sent_bytes=10_000))
    assert response.status_code == 413
    assert sent == 11_000


@pytest.mark.anyio
async def test_body_that_does_not_arrive_is_refused() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await anyio.sleep_forever()

    response = await post(slow(), JSON, Settings(body_timeout_s=0.05))
    assert response.status_code == 408


@pytest.mark.anyio
async def test_extreme_compression_ratio_is_refused_before_the_cap() -> None:
    body = bomb(64 * MIB)
    assert len(body) < 2200
    response = await post(body, ZSTD, Settings())
    assert (response.status_code, response.json()["limit_bytes"]) == (413, MIB)
    assert (await post(bomb(MIB), ZSTD, Settings())).text == str(MIB)


def expanding(seed: int) -> bytes:
    """Return a zstd body of 2 MiB in which one byte in 100 cannot be compressed."""
    numbers = random.Random(seed)
    pieces = (numbers.randbytes(40).hex().encode() + b" " * 8112 for _ in range(256))
    return zstandard.compress(b'{"a": "' + b"".join(pieces) + b'"}')


@pytest.mark.anyio
async def test_few_bodies_are_decoded_at_a_time_outside_the_event_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = serve(reads_at_once=2)
    at_once, most, threads = [], 0, set()

    def watched(sent: EncodedBody, most_bytes: int) -> bytes:
        nonlocal most
        if most_bytes <= SMALL:  # to see if the body is small enough to be read at once
            return decode_body(sent, most_bytes)
        at_once.append(1)
        most = max(most, len(at_once))
        threads.add(threading.current_thread())
        try:
            return decode_body(sent, most_bytes)
        finally:
            at_once.pop()

    monkeypatch.setattr("autoac.api.request_reader.decode_body", watched)
    portal = http.portal
    loop = portal.call(threading.current_thread)
    with ThreadPoolExecutor(12) as pool:
        posts = [
            pool.submit(http.post, "/v1/profiles", content=expanding(i % 3), headers=ZSTD) for i in range(12)
        ]
    assert {post.result().status_code for post in posts} == {422}
    assert most <= 2
    assert loop not in threads


class SlowReader(InProcess):
    """A `Solver` that reads a large body only when its marker is released."""

    def __init__(self) -> None:
        super().__init__(save_all)
        self.reading: list[bytes] = []
        self.go = anyio.Event()

    async def parse_request(self, kind: Kind, body: bytes) -> ParsedRequest:
        self.reading.append(body[:40])
        await self.go.wait()
        return await super().parse_request(kind, body)


@asynccontextmanager
async def clients(app: FastAPI) -> AsyncIterator[tuple[httpx2.AsyncClient, TaskGroup]]:
    """Run the service on this event loop, and tasks that send requests to it."""
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as http,
        anyio.create_task_group() as group,
    ):
        yield http, group


def large(marker: str) -> bytes:
    return f'{{"marker": "{marker}", "a": "{"x" * SMALL}"}}'.encode()


@pytest.mark.anyio
async def test_large_bodies_of_one_key_delay_no_other_key(database_url: str, database: Database) -> None:
    """One key may use half of the checks; a small body needs none."""
    with database.write() as connection:
        first, second = (create_key(connection, name, Scope.PLAN)[1] for name in "ab")
    solver = SlowReader()
    app = create_app(Settings(database_url=database_url, reads_at_once=2, wait_s=0), solver)

    async def send(http: httpx2.AsyncClient, key: str, body: bytes, headers: dict[str, str] = JSON) -> int:
        headers = headers | {"Authorization": f"Bearer {key}"}
        return (await http.post("/v1/policies", content=body, headers=headers)).status_code

    async with clients(app) as (http, group):
        for i in range(5):
            group.start_soon(send, http, first, large(f"first {i}"))
        await anyio.wait_all_tasks_blocked()
        small = request(chain_profile())
        with anyio.fail_after(5):
            assert await send(http, second, small) in (201, 202)
            for sized in (True, False):  # with the decoded size in the frame's header, or without
                sent = zstandard.ZstdCompressor(write_content_size=sized).compress(small)
                assert await send(http, second, sent, ZSTD) in (201, 202)
        group.start_soon(send, http, second, large("second"))
        with anyio.fail_after(5):
            while len(solver.reading) < 2:
                await anyio.sleep(0.01)
        assert [b"first" in body for body in solver.reading] == [True, False]
        solver.go.set()
    assert len(solver.reading) == 6


@pytest.mark.anyio
async def test_with_one_check_at_a_time_keys_take_turns(database_url: str, database: Database) -> None:
    with database.write() as connection:
        keys = [create_key(connection, name, Scope.PLAN)[1] for name in "ab"]
    solver = SlowReader()
    app = create_app(Settings(database_url=database_url, reads_at_once=1), solver)
    async with clients(app) as (http, group):

        async def send(key: str, marker: str) -> None:
            headers = JSON | {"Authorization": f"Bearer {key}"}
            await http.post("/v1/policies", content=large(marker), headers=headers)

        for i in range(4):
            group.start_soon(send, keys[0], f"first {i}")
        with anyio.fail_after(5):
            while not solver.reading:
                await anyio.sleep(0.01)
        group.start_soon(send, keys[1], "second")
        with anyio.fail_after(5):
            while app.state.service.reader.slots.total() < 5:
                await anyio.sleep(0.01)
            await anyio.wait_all_tasks_blocked()
        solver.go.set()
    assert [b"second" in body for body in solver.reading].index(True) <= 2


@pytest.mark.anyio
async def test_large_body_waits_for_its_turn_only_so_long(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoac.api.request_reader.MOST_WAIT_S", 0.3)
    solver = SlowReader()
    app = create_app(Settings(database_url=database_url, reads_at_once=2), solver)
    async with clients(app) as (http, group):
        group.start_soon(partial(http.post, "/v1/policies", content=large("first"), headers=JSON))
        while not solver.reading:
            await anyio.sleep(0.01)
        with anyio.fail_after(5):
            answer = await http.post("/v1/policies", content=large("second"), headers=JSON)
        assert answer.status_code == 503
        assert answer.json()["type"] == "urn:autoac:problem:busy"
        assert answer.headers["retry-after"]
        solver.go.set()
    assert len(solver.reading) == 1


@pytest.mark.slow
def test_body_whose_check_takes_too_long_is_named_as_such(serve: Serve) -> None:
    http = serve(SpawnedSolver(20.0, 0.05, 2048 * MIB))
    answer = http.post("/v1/profiles", content=large("a"), headers=JSON)
    assert answer.status_code == 504
    assert answer.json()["type"] == "urn:autoac:problem:body-too-slow-to-read"
    assert answer.json()["time_limit_s"] == 0.05
