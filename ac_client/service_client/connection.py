"""One conversation with a planning service: address, key, time limit, and further tries."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import httpx2
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    stop_any,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from ac_client.service_client.errors import RemoteError, ServiceRefused, ServiceUnavailable
from autoac.planner.units import format_bytes

T = TypeVar("T")

CONNECT_S = 5.0
TRIES = 4
FIRST_PAUSE_S = 0.25  # before the second try, then doubled; longer if the service says so
GET_S = 30.0  # for an answer that takes no planning
SHORTEST_S = 0.1  # for an answer, even at the end
BUSY = (429, 502, 503)  # what may be gone in a moment; 502 is a proxy's between two replicas
MOST_ANSWER = 64 << 20  # bytes of an answer
FRAMING = ("content-length", "transfer-encoding")  # headers that say how an answer was sent
KEY = re.compile(r"[ -~]+")  # what a header may contain


class ServiceConnection:
    """A connection to the service at `url`, with one time limit for all of its requests.

    Args:
        token: the service's key; None for the environment's AUTOAC_TOKEN.
        transport: what carries the requests; None for the network.

    Raises:
        ServiceRefused: the key has characters that a header cannot have.
        ValueError: `url` is not an http or https URL.
    """

    def __init__(
        self, url: str, token: str | None, transport: httpx2.BaseTransport | None, timeout_s: float
    ) -> None:
        self.url = url
        self._base = policies_url(url)
        self._until = time.monotonic() + timeout_s
        self._client = httpx2.Client(transport=transport)
        self._headers = {"Accept-Encoding": "identity"} | _authorization(token)

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._client.__exit__(*error)

    @property
    def left_s(self) -> float:
        """Return the seconds until the time limit."""
        return self._until - time.monotonic()

    def send(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx2.Response:
        """Send a request, again if the service is busy or away, and return the last answer.

        Every request of this client may be sent twice and does nothing twice.

        Raises:
            ServiceUnavailable: there was no answer.
        """
        url = self._base.copy_with(path=self._base.path.removesuffix("/v1/policies") + path)

        def attempt() -> httpx2.Response:
            left = max(self.left_s if content is not None else min(self.left_s, GET_S), SHORTEST_S)
            timeout = httpx2.Timeout(left, connect=min(CONNECT_S, left))
            request = self._client.build_request(
                method,
                url,
                params=params,
                content=content,
                headers=self._headers | (headers or {}),
                timeout=timeout,
            )
            try:
                return _within(left, lambda: self._answer(request))
            except TimeoutError:
                raise ServiceUnavailable(f"{self.url} did not answer within {left:.1f} s") from None

        retrying = Retrying(
            # Other errors of the transport had all their time.
            retry=retry_if_result(lambda response: response.status_code in BUSY)
            | retry_if_exception_type(
                (httpx2.NetworkError, httpx2.ConnectTimeout, httpx2.RemoteProtocolError)
            ),
            wait=_pause_s,
            stop=stop_any(stop_after_attempt(TRIES), stop_before_delay(self.left_s)),
            sleep=time.sleep,
            retry_error_callback=_last_outcome,
        )
        try:
            return retrying(attempt)
        except httpx2.TransportError as error:
            raise ServiceUnavailable(f"{self.url} did not answer: {error or type(error).__name__}") from error

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and return the whole answer.

        Raises:
            ServiceUnavailable: it is too large, or compressed, which would hide its size.
        """
        response = self._client.send(request, stream=True)
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ServiceUnavailable(
                    f"{self.url} compressed its answer, which the request did not accept"
                )
            content = bytearray()
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MOST_ANSWER:
                    raise ServiceUnavailable(
                        f"{self.url} answered with more than {format_bytes(MOST_ANSWER)}"
                    )
        finally:
            response.close()
        headers = [(k, v) for k, v in response.headers.multi_items() if k not in FRAMING]
        return httpx2.Response(response.status_code, headers=headers, content=bytes(content))


def _pause_s(state: RetryCallState) -> float:
    """Return the seconds before the next try: longer each time, and as long as the service says."""
    pause = wait_exponential(FIRST_PAUSE_S)(state)
    if state.outcome is not None and not state.outcome.failed:
        after = state.outcome.result().headers.get("retry-after", "")
        if re.fullmatch("[0-9]{1,6}", after):
            pause = max(pause, float(after))
    # Clients that were turned away together must not come back together.
    return pause + wait_random(0, 0.25 * pause)(state)


def _last_outcome(state: RetryCallState) -> httpx2.Response:
    assert state.outcome is not None
    response: httpx2.Response = state.outcome.result()
    return response


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns, from a thread: httpx2's own limits begin again with every byte received.

    Raises:
        TimeoutError: it takes longer. The thread is left behind, until the client is closed.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised below)
            done.set_exception(error)

    threading.Thread(target=run, name="autoac request", daemon=True).start()
    return done.result(seconds)


def _authorization(token: str | None) -> dict[str, str]:
    """Return the header with the key, which no error quotes.

    Raises:
        ServiceRefused: the key has characters that a header cannot have.
    """
    key = (token or os.environ.get("AUTOAC_TOKEN") or "").strip()
    if not key:
        return {}
    if not KEY.fullmatch(key):
        where = "the argument token" if token else "the environment variable AUTOAC_TOKEN"
        at = next(i for i, letter in enumerate(key) if not KEY.fullmatch(letter))
        raise ServiceRefused(
            f"{where} must be a key of printable ASCII characters, but the one at position {at} is another; "
            "`autoac keys create NAME` makes a key"
        )
    return {"Authorization": f"Bearer {key}"}


def policies_url(url: str) -> httpx2.URL:
    """Return the address at which the service at `url` takes profiles.

    Raises:
        ValueError: `url` is not an http or https URL.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"service must be a URL such as http://127.0.0.1:8421: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"service must be a URL such as http://127.0.0.1:8421, got {url!r}")
    return parsed.copy_with(path=parsed.path.rstrip("/") + "/v1/policies")


def refusal(url: str, response: httpx2.Response) -> RemoteError:
    """Return the error for an answer with another status than the one hoped for."""
    status = response.status_code
    message = f"{url} answered {status}: {problem_of(response).get('detail') or response.reason_phrase}"
    if status == 401:
        message += ". It takes its key from the environment variable AUTOAC_TOKEN"
    refused = 400 <= status < 500 and status not in BUSY
    return ServiceRefused(message) if refused else ServiceUnavailable(message)


def problem_of(response: httpx2.Response) -> dict[str, Any]:
    """Return the problem document of an answer; {} if it has none."""
    if response.headers.get("content-type", "").partition(";")[0] != "application/problem+json":
        return {}
    try:
        problem = json.loads(response.content)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}
