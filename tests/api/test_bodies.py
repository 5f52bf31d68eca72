"""Bodies: how much of them the service takes, and how much memory they cost it."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator

import anyio
import httpx2
import pytest
import zstandard
from fastapi import FastAPI, Request, Response

from autoac.api import Settings
from autoac.api.answers import problem_of
from autoac.api.bodies import read_body
from autoac.api.errors import ServiceError
from autoac.api.problems import ProblemResponse

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}
ZSTD = {**JSON, "Content-Encoding": "zstd"}


async def post(
    content: bytes | AsyncIterator[bytes], headers: dict[str, str], settings: Settings
) -> httpx2.Response:
    """The answer of a small service that says how long a body is, once it is decoded."""
    app = FastAPI()
    app.add_exception_handler(ServiceError, explained)

    @app.post("/length")
    async def length(request: Request) -> Response:
        return Response(str(len(await read_body(request, settings))))

    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post("/length", content=content, headers=headers)


async def explained(request: Request, error: Exception) -> Response:
    return ProblemResponse(problem_of(error))


def bomb(nbytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join([*(compressor.compress(bytes(MIB)) for _ in range(nbytes // MIB)), compressor.flush()])


@pytest.mark.anyio
async def test_a_bomb_is_refused_before_it_takes_memory() -> None:
    body = bomb(2000 * MIB)
    assert len(body) < 70_000
    tracemalloc.start()
    try:
        response = await post(body, ZSTD, Settings(max_plain_bytes=16 * MIB))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert response.status_code == 413
    assert response.json()["limit_bytes"] == 16 * MIB
    assert "decoded" in response.json()["detail"]
    assert peak < 40 * MIB


@pytest.mark.anyio
async def test_a_body_of_just_the_cap_is_taken_and_one_byte_more_is_not() -> None:
    settings = Settings(max_sent_bytes=1000, max_plain_bytes=2000)
    for headers, encode, most in ((JSON, bytes, 1000), (ZSTD, zstandard.compress, 2000)):
        assert (await post(encode(b" " * most), headers, settings)).text == str(most)
        assert (await post(encode(b" " * (most + 1)), headers, settings)).status_code == 413


@pytest.mark.anyio
async def test_an_endless_body_is_refused_at_the_cap() -> None:
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
async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await anyio.sleep_forever()

    response = await post(slow(), JSON, Settings(body_timeout_s=0.05))
    assert response.status_code == 408


@pytest.mark.anyio
@pytest.mark.parametrize("body", [b"not zstd at all", zstandard.compress(b"{}") + b"rest"])
async def test_what_is_not_zstd_is_400(body: bytes) -> None:
    response = await post(body, ZSTD, Settings())
    assert response.status_code == 400
    assert response.json()["type"] == "urn:autoac:problem:undecodable"


@pytest.mark.anyio
async def test_a_frame_may_not_ask_for_a_large_window() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    body = compressor.compress(b"{}") + compressor.flush()
    assert (await post(body, ZSTD, Settings())).status_code == 400


@pytest.mark.anyio
async def test_a_body_may_come_in_pieces() -> None:
    body = zstandard.compress(bytes(range(256)) * 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for byte in body:
            yield bytes([byte])

    assert (await post(pieces(), ZSTD, Settings())).text == "256000"
