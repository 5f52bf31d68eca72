"""Read the bodies of requests, within the limits on memory.

A body holds a slot from its first byte until it is checked. `reads_at_once` large bodies are decoded and
checked at a time; the others wait as they were sent. So `max_sent_bytes` and `max_plain_bytes` bound the
memory of all. A small body, or one that was read before, does not wait.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread
from cachetools import LRUCache
from fastapi import Request
from starlette.requests import ClientDisconnect

from autoac.api.errors import BodyTooLarge, Busy
from autoac.api.request_body import SMALL, EncodedBody, decode_body, receive_body
from autoac.api.requests import Kind, ParsedRequest, parse_request
from autoac.api.settings import Settings
from autoac.api.solving.child_process import Solver
from autoac.api.storage.job_store import RETRY_AFTER_S

T = TypeVar("T")

MOST_WAIT_S = 120.0  # of a large body for its turn to be checked
REMEMBERED = 256  # parsed requests that are kept: clients repeat theirs


class RequestReader:
    """Receive, decode and parse bodies."""

    def __init__(self, settings: Settings, solver: Solver) -> None:
        self.settings, self.solver = settings, solver
        self.checks = anyio.Semaphore(settings.reads_at_once)  # large bodies decoded and checked at once
        # By caller: its half of the checks. So callers take turns: none waits for `checks` more often.
        self.shares: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()
        self.slots: Counter[str] = Counter()  # by caller: requests whose body is not checked yet
        self._parsed: LRUCache[tuple[Kind, str, bytes], ParsedRequest] = LRUCache(REMEMBERED)

    @contextmanager
    def reserve_slot(self, request: Request) -> Iterator[None]:
        """Reserve a slot for one body. One caller gets at most half of them, so that others get in.

        Raises:
            Busy: all slots are taken, or the caller's half is.
        """
        caller, most = request.state.caller, self.settings.reads_at_once + self.settings.reads_waiting
        if self.slots.total() >= most or self.slots[caller] >= (most + 1) // 2:
            raise Busy(RETRY_AFTER_S)
        self.slots[caller] += 1
        try:
            yield
        finally:
            self.slots[caller] -= 1
            self.slots += Counter()  # drops callers without a slot

    async def parse_request(self, request: Request, kind: Kind) -> ParsedRequest:
        """Return the parsed body of a request.

        Raises:
            Busy: too many bodies are being read, or others were first for `MOST_WAIT_S`. Also raises what
                `receive_body`, `decode_body` and `requests.parse_request` do.
        """
        with self.reserve_slot(request):
            body = await receive_body(request, self.settings)
            return await while_connected(request, lambda: self._parse(kind, body, request.state.caller))

    async def report(self, request: Request, verb: str, look: Callable[[], bytes]) -> bytes:
        """Return what a child process reports of the stored plans that `look` reads: see policy_report.py.

        Raises:
            Busy: too many bodies are being read. Also raises what `look` and `Solver.report` do.
        """

        async def work() -> bytes:
            async with self._turn(request.state.caller):
                return await self.solver.report(verb, await to_thread.run_sync(look))

        with self.reserve_slot(request):
            return await while_connected(request, work)

    async def _parse(self, kind: Kind, body: EncodedBody, caller: str) -> ParsedRequest:
        digest = await to_thread.run_sync(lambda: hashlib.sha256(body.content).digest())
        key = (kind, body.coding, digest)
        if key in self._parsed:
            return self._parsed[key]
        plain = await to_thread.run_sync(_decoded_if_small, body)
        if plain is not None:
            most_seconds = self.settings.solve_time_limit_s
            parsed = await to_thread.run_sync(parse_request, kind, plain, most_seconds)
        else:
            async with self._turn(caller):
                plain = await to_thread.run_sync(decode_body, body, self.settings.max_plain_bytes)
                parsed = await self.solver.parse_request(kind, plain)
        if parsed.profile is None or len(parsed.profile.content) <= SMALL:
            self._parsed[key] = parsed
        return parsed

    @asynccontextmanager
    async def _turn(self, caller: str) -> AsyncIterator[None]:
        """Wait until a large body of `caller` may be checked.

        Raises:
            Busy: that takes too long.
        """
        half = anyio.Semaphore(max(1, self.settings.reads_at_once // 2))
        with anyio.move_on_after(MOST_WAIT_S) as wait:
            async with self.shares.setdefault(caller, half), self.checks:
                wait.deadline = math.inf
                yield
                return
        raise Busy(RETRY_AFTER_S)


def _decoded_if_small(body: EncodedBody) -> bytes | None:
    """Return the decoded body; None if it has more than `SMALL` bytes, as sent or decoded."""
    if len(body.content) > SMALL:
        return None
    try:
        return decode_body(body, SMALL)
    except BodyTooLarge:
        return None


async def while_connected(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `work`; cancel it if the client disconnects, so that it wastes no CPU.

    Raises:
        ClientDisconnect: the client went away. Also raises what `work` does.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            result = await work()
            group.cancel_scope.cancel()
            return result
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # from `work`: `watch` raises nothing
    raise ClientDisconnect
