"""Send hostile bodies: each gets a 4xx, memory stays small, and the service goes on."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
import zstandard
from service_app import JSON, ZSTD, Serve
from service_fakes import InProcess, chain_profile, request, save_all
from starlette.testclient import TestClient

from autoac.api.solving.child_process import SpawnedSolver
from autoac.planner.formats.profile import Profile

pytestmark = pytest.mark.slow

MIB = 1 << 20
PATHS = ("/v1/policies", "/v1/frontiers", "/v1/floors", "/v1/profiles")


@pytest.fixture
def http(serve: Serve) -> TestClient:
    """Serve with real children, which parse large bodies."""
    return serve(SpawnedSolver(20.0, 60.0, 2048 * MIB))


def data(**changes: Any) -> dict[str, Any]:
    """Return a profile's JSON with changes at paths such as `ops__reads__items`."""
    made: dict[str, Any] = json.loads(chain_profile().to_json())
    for place, value in changes.items():
        *path, last = place.split("__")
        at = made
        for name in path:
            at = at[name]
        at[last] = value
    return made


def sent(http: TestClient, path: str, profile: Any) -> httpx2.Response:
    body = profile if path.endswith("profiles") else {"profile": profile, "budget_gb": 1}
    return http.post(path, content=json.dumps(body).encode(), headers=JSON)


HARM: dict[str, dict[str, Any]] = {
    "a version that follows itself": {"values__previous": [0, -1, -1]},
    "rows that are not there": {"values__storage": [0, 1, 7]},
    "an infinite time": {"ops__runtime_us": [1e999, 1.0, 1.0]},
    "a number as text": {"ops__runtime_us": ["much", 1.0, 1.0]},
    "a long name": {"model": "x" * 5000},
    "half a character": {"model": "\ud800"},
    "NUL in a name": {"environment__device_name": "a\0b"},
    "a name that is a number": {"model": 7},
}


@pytest.mark.parametrize("harm", HARM, ids=str)
def test_invalid_profile_is_refused_by_every_route(serve: Serve, harm: str) -> None:
    http = serve()
    profile = data(**HARM[harm])
    for path in PATHS:
        answer = sent(http, path, profile)
        assert 400 <= answer.status_code < 500, (path, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"
    assert http.get("/v1/profiles").json()["items"] == []


ODD = ("../../etc/passwd", "/etc/passwd", "a\\..\\b", "%2e%2e", "$(id)", "'; DROP TABLE jobs")


def test_name_like_a_path_or_a_command_is_only_a_name(serve: Serve) -> None:
    http = serve()
    for name in ODD:
        profile = Profile.from_data(data(model=name, modules=[name]))
        answer = http.post("/v1/policies", content=request(profile), headers=JSON)
        assert answer.status_code == 201
        assert answer.json()["model"] == name
        found = http.get("/v1/policies", params={"model": name}).json()["items"]
        assert [p["model"] for p in found] == [name]
    assert len(http.get("/v1/jobs").json()["items"]) == len(ODD)


def framed(content: bytes, **parameters: int) -> bytes:
    """Compress without the size of the content in the frame's header."""
    made = zstandard.ZstdCompressionParameters.from_level(1, **parameters)
    compressor = zstandard.ZstdCompressor(compression_params=made).compressobj()
    return compressor.compress(content) + compressor.flush()


RAW = {
    "deep nesting of objects": (b'{"a":' * 200_000, JSON, 400),
    "a number of many digits": (b'{"budget_bytes": ' + b"9" * 200_000 + b"}", JSON, 400),
    "UTF-16": ('{"budget_gb": 1}'.encode("utf-16"), JSON, 400),
    "Latin-1": ('{"ü": 1}'.encode("latin-1"), JSON, 400),
    "no zstd at all": (b"{}", ZSTD, 400),
    "half a frame": (zstandard.compress(bytes(range(256)) * 4000)[:-9], ZSTD, 400),
    "a frame in a frame": (zstandard.compress(zstandard.compress(b"{}")), ZSTD, 400),
    "bytes behind a frame": (zstandard.compress(b"{}") + b"rest", ZSTD, 400),
    "a frame with a large window": (framed(b"{}", window_log=27), ZSTD, 400),
}


@pytest.mark.parametrize("body", RAW, ids=str)
def test_random_bytes_are_refused(serve: Serve, body: str) -> None:
    content, headers, status = RAW[body]
    http = serve(SpawnedSolver(20.0, 60.0, 2048 * MIB) if len(content) > 64 << 10 else InProcess(save_all))
    for path in PATHS[:1] if len(content) > 64 << 10 else PATHS:
        assert http.post(path, content=content, headers=headers).status_code == status, path
    assert http.get("/livez").status_code == 200


def test_ten_million_ops_are_refused_without_using_memory(http: TestClient) -> None:
    numbers = random.Random(0)
    rows = b"".join(b"%d," % numbers.getrandbits(32) + b"0," * 99 for _ in range(100_000))
    ops = b'{"profile": {"format": "autoac.profile", "version": 7, "ops": {"flops": [' + rows
    body = zstandard.compress(ops + b"0]}}, " + b'"budget_gb": 1}')
    assert len(body) < MIB
    _forget_peak()
    before = _peak_bytes()
    answer = http.post("/v1/policies", content=body, headers=ZSTD)
    assert answer.status_code == 422, answer.text
    assert answer.json()["type"] == "urn:autoac:problem:malformed-profile"
    assert _peak_bytes() - before < 200 * MIB  # the body, decoded, twice; parsed it would be far more
    assert http.get("/livez").status_code == 200


def test_bomb_is_refused_by_every_route_with_a_body(serve: Serve) -> None:
    http = serve(max_plain_bytes=4 * MIB)
    bomb = framed(bytes(500 * MIB))
    _forget_peak()
    before = _peak_bytes()
    for path in PATHS:
        refused = http.post(path, content=bomb, headers=ZSTD)
        assert refused.status_code == 413
        assert refused.json()["limit_bytes"] <= 4 * MIB  # less: a bomb is known by its ratio
        assert "decoded" in refused.json()["detail"]
    assert _peak_bytes() - before < 60 * MIB


def _forget_peak() -> None:
    """Reset the kernel's count of this process's peak memory."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024
