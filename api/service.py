"""The state that the routes share, and the wait of a request for its job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread
from cachetools import TTLCache
from fastapi import Request
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from starlette.requests import ClientDisconnect

from autoac.api.errors import TooManyStreams
from autoac.api.request_reader import RequestReader, while_connected
from autoac.api.requests import ParsedRequest
from autoac.api.settings import Settings
from autoac.api.storage.database import AWAY, Database
from autoac.api.storage.event_feed import EventFeed
from autoac.api.storage.job_requests import JobRequests
from autoac.api.storage.job_store import RETRY_AFTER_S, Job, JobStore
from autoac.api.storage.keys import REMEMBER_S, Authenticator, Caller
from autoac.api.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from autoac.api.solving import EmbeddedWorker

T = TypeVar("T")

TEXTS_NBYTES = 64 << 20  # of policies that were requested in the last seconds
FIRST_LOOK_S, LAST_LOOK_S = 0.02, 0.25  # between two looks at a job


def policy_text_cache() -> TTLCache[str, bytes]:
    """Return a cache for texts of policies by id.

    A policy never changes. One that another replica deletes is still served for `REMEMBER_S`.
    """
    return TTLCache(TEXTS_NBYTES, REMEMBER_S, getsizeof=len)


@dataclass(slots=True)
class Service:
    """The database, the solver and everything else that the routes of one process share."""

    settings: Settings
    database: Database
    jobs: JobStore
    requests: JobRequests
    metrics: Metrics
    authenticator: Authenticator
    reader: RequestReader
    worker: EmbeddedWorker | None  # runs jobs in this process
    worker_failed: bool = False  # by a bug: this process needs a restart
    texts: TTLCache[str, bytes] = field(default_factory=policy_text_cache)
    streams: Counter[str] = field(default_factory=Counter)  # by caller: open event streams
    feeds: WeakValueDictionary[str, EventFeed] = field(default_factory=WeakValueDictionary)  # by job

    @contextmanager
    def stream(self, caller: str) -> Iterator[None]:
        """Count an event stream while it is open.

        Raises:
            TooManyStreams: the caller has reached its limit.
        """
        if self.streams[caller] >= self.settings.key_streams:
            raise TooManyStreams(self.settings.key_streams, RETRY_AFTER_S)
        self.streams[caller] += 1
        try:
            yield
        finally:
            self.streams[caller] -= 1
            self.streams += Counter()  # drops callers without a stream

    def feed(self, id: str) -> EventFeed:
        """Return the feed of a job, which all its listeners share."""
        feed = self.feeds.get(id)
        if feed is None:
            feed = self.feeds[id] = EventFeed(self.jobs, id)
        return feed

    async def submit(self, parsed: ParsedRequest, caller: Caller, *, fresh: bool) -> Job:
        """Return the job of a request. The request waits for it until `wait` has returned.

        Raises:
            NotFound, TooManyJobs, Busy: as `JobRequests.submit`.
        """
        submit = self.requests.submit
        with anyio.CancelScope(shield=True):
            job, existed = await to_thread.run_sync(lambda: submit(parsed, caller.name, fresh=fresh))
        cache = "miss" if not existed else "hit" if job.final else "shared"
        self.metrics.cache.labels(parsed.kind.value, cache).inc()
        if not existed and self.worker is not None:
            self.worker.wake()
        return job

    async def wait(self, request: Request, job: Job, seconds: float) -> Job:
        """Return the job once it is final, or after `seconds`: then its client is about to get 202.

        If the client goes away, cancel the job unless others wait for it or got 202.

        Raises:
            ClientDisconnect: the client went away.
        """

        async def look() -> None:
            nonlocal job
            delay = FIRST_LOOK_S
            while not job.final:
                await anyio.sleep(delay)
                delay = min(delay * 1.5, LAST_LOOK_S)
                with suppress(*AWAY):  # keep waiting
                    job = await to_thread.run_sync(self.jobs.get, job.id)

        async def until() -> None:
            with anyio.move_on_after(seconds):
                await look()

        end_wait: Callable[[str], None] = partial(self.requests.end_waiter, accepted=True)
        try:
            if not job.final and seconds > 0:
                await while_connected(request, until)
            if job.final:
                end_wait = self.requests.end_waiter
        except ClientDisconnect:
            end_wait = self.requests.abandon
            raise
        finally:  # also if the service is stopped: then the job goes on without the request
            with anyio.CancelScope(shield=True), suppress(*AWAY):
                await to_thread.run_sync(end_wait, job.id)
        return job

    async def read(self, look: Callable[[Connection], T]) -> T:
        """Return what `look` reads in one transaction, in a thread."""

        def in_thread() -> T:
            with self.database.read() as connection:
                return look(connection)

        return await to_thread.run_sync(in_thread)

    async def write(self, change: Callable[[Connection], T]) -> T:
        """Return what `change` returns once its transaction is committed, in a thread."""

        def in_thread() -> T:
            with self.database.write() as connection:
                return change(connection)

        return await to_thread.run_sync(in_thread)

    async def read_on_loop(self, look: Callable[[Connection], T]) -> T:
        """Return what `look` reads, which must be a few rows by an index: see `Database.read_on_loop`."""
        if self.database.is_sqlite:
            with suppress(OperationalError), self.database.read_on_loop() as connection:
                return look(connection)
        return await self.read(look)

    def worker_count(self) -> int:
        """Return the number of live workers, the one in this process included."""
        if self.database.is_sqlite:
            return int(self.worker is not None and not self.worker_failed)
        with self.database.read() as connection:
            return self.requests.queue.worker_count(connection, self.settings.lease_s)


async def service_of(request: Request) -> Service:
    """Return the service of the app. Not a plain function: FastAPI would call it in a thread."""
    return cast(Service, request.app.state.service)
