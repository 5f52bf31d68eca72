"""Run the service in this process, and send a client's requests to it."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest
from starlette.testclient import TestClient

BOTH = pytest.mark.parametrize("size", ["sqlite", "postgresql"], indirect=True)
"""Run the tests of a module on both databases: `pytestmark = BOTH`."""

Serve = Callable[..., TestClient]


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
