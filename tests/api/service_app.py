"""Run the service in this process, and send a client's requests to it."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest
from starlette.testclient import TestClient

JSON = {"Content-Type": "application/json"}
ZSTD = JSON | {"Content-Encoding": "zstd"}
NOW = JSON | {"Prefer": "wait=0"}
TOKEN = "a token of more than sixteen"
URN = "urn:autoac:problem:"

_POSTGRESQL = pytest.param("postgresql", marks=pytest.mark.slow)

BOTH = pytest.mark.parametrize("size", ["sqlite", _POSTGRESQL], indirect=True)
"""Run a test on both databases; with `pytestmark = BOTH`, all tests of a module."""

POSTGRES = pytest.mark.parametrize("size", [_POSTGRESQL], indirect=True)
"""Run a test on PostgreSQL alone."""

Serve = Callable[..., TestClient]


class Clock:
    """A stand-in for `time` in which only `sleep` takes time."""

    def __init__(self, slept: list[float]) -> None:
        self.slept = slept

    def monotonic(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


class InApp(httpx2.BaseTransport):
    """Send a client's requests to the app in this process, and record them."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.requests: list[httpx2.Request] = []

    @property
    def request(self) -> httpx2.Request:
        """Return the last request."""
        return self.requests[-1]

    @property
    def posts(self) -> int:
        """Return the number of POST requests."""
        return sum(request.method == "POST" for request in self.requests)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        response = self.client.request(
            request.method, str(request.url), headers=request.headers, content=request.read()
        )
        return httpx2.Response(response.status_code, headers=response.headers, content=response.content)


Transport = Callable[..., InApp]
