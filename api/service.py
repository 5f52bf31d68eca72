"""What the routes share, and the way of a request: read, checked, made a job, waited for."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar, cast
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread
from fastapi import Request
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from starlette.requests import ClientDisconnect

from autoac.api.errors import Busy, NotFound, TooManyStreams
from autoac.api.policy_plot import drawing_body
from autoac.api.request_body import SMALL, Sent, decode_body, receive_body
from autoac.api.requests import Kind, Taken, take
from autoac.api.settings import Settings
from autoac.api.solving.child_process import Solver
from autoac.api.solving.job_runner import Runner
from autoac.api.storage.database import AWAY, Database
from autoac.api.storage.event_feed import EventFeed
from autoac.api.storage.job_store import RETRY_AFTER_S, Job, Jobs
from autoac.api.storage.keys import REMEMBER_S, Caller, Doorkeeper, note
from autoac.api.storage.plot_cache import keep_drawing, read_drawing
from autoac.api.storage.registry import get_policy, profile_text, read_policy
from autoac.api.telemetry.metrics import Metrics

T = TypeVar("T")

REMEMBERED = 256  # bodies of which it is known what they ask for
FIRST_LOOK_S, LAST_LOOK_S = 0.02, 0.25  # between two looks at a job


class Texts:
    """Policies that were asked for lately, by id: up to so many bytes of them, and for so many seconds.

    A policy never changes, so nothing here is ever wrong; one that another replica deletes is told for
    `seconds` more.
    """

    def __init__(self, seconds: float = REMEMBER_S, most_bytes: int = 64 << 20) -> None:
        self._seconds, self._most, self._held = seconds, most_bytes, 0
        self._texts: OrderedDict[str, tuple[float, bytes]] = OrderedDict()

    def get(self, id: str) -> bytes | None:
        """A policy's text, if it was asked for lately."""
        at, text = self._texts.get(id, (0.0, b""))
        return text if at and time.monotonic() - at < self._seconds else None

    def put(self, id: str, text: bytes) -> None:
        """Remember it."""
        self.forget(id)
        self._texts[id] = (time.monotonic(), text)
        self._held += len(text)
        while self._held > self._most:
            self._held -= len(self._texts.popitem(last=False)[1][1])

    def forget(self, id: str) -> None:
        """It was deleted."""
        self._held -= len(self._texts.pop(id, (0.0, b""))[1])


@dataclass(slots=True)
class Service:
    """State that the routes share.

    The bodies in memory are bounded: as sent, by the number of requests inside; decoded, by the slots.
    """

    settings: Settings
    database: Database
    jobs: Jobs
    solver: Solver
    metrics: Metrics
    doors: Doorkeeper
    runner: Runner | None  # where this process solves too
    slots: anyio.Semaphore  # bodies that are decoded and checked at once
    inside: Counter[str] = field(default_factory=Counter)  # by caller: requests until their body is checked
    texts: Texts = field(default_factory=Texts)
    streams: Counter[str] = field(default_factory=Counter)  # by caller: jobs that are listened to
    feeds: WeakValueDictionary[str, EventFeed] = field(default_factory=WeakValueDictionary)
    drawn_now: dict[str, anyio.Lock] = field(default_factory=dict)
    seen: OrderedDict[tuple[Kind, str, bytes], Taken] = field(default_factory=OrderedDict)

    @contextmanager
    def place(self, request: Request) -> Iterator[None]:
        """A place for the body of one request. One caller gets at most half of them, so that others get in.

        Raises:
            Busy: all are taken, or the caller's half.
        """
        caller, most = request.state.caller, self.settings.reads_at_once + self.settings.reads_waiting
        if self.inside.total() >= most or self.inside[caller] >= (most + 1) // 2:
            raise Busy(RETRY_AFTER_S)
        self.inside[caller] += 1
        try:
            yield
        finally:
            self.inside[caller] -= 1
            self.inside += Counter()  # drops those that have none

    @contextmanager
    def stream(self, caller: str) -> Iterator[None]:
        """Count a stream of events.

        Raises:
            TooManyStreams: the caller has as many as it may.
        """
        if self.streams[caller] >= self.settings.key_streams:
            raise TooManyStreams(self.settings.key_streams, RETRY_AFTER_S)
        self.streams[caller] += 1
        try:
            yield
        finally:
            self.streams[caller] -= 1
            self.streams += Counter()  # drops those that have none

    def feed(self, id: str) -> EventFeed:
        """Return the feed of a job, which all who listen to it share."""
        feed = self.feeds.get(id)
        if feed is None:
            feed = self.feeds[id] = EventFeed(self.jobs, id)
        return feed

    async def take(self, request: Request, kind: Kind) -> Taken:
        """What the body of a request asks for.

        Raises:
            Busy: too many bodies are being read. And what `receive_body`, `decode_body`, `request.take` do.
        """
        with self.place(request):
            sent = await receive_body(request, self.settings)
            return await while_connected(request, lambda: self._take(kind, sent))

    async def small_body(self, request: Request) -> bytes:
        """The decoded body of a request that needs few bytes.

        Raises:
            Busy: too many bodies are being read. And what `receive_body` and `decode_body` do.
        """
        with self.place(request):
            sent = await receive_body(request, self.settings, SMALL)
            return await to_thread.run_sync(decode_body, sent, SMALL)

    async def _take(self, kind: Kind, sent: Sent) -> Taken:
        async with self.slots:
            digest = await to_thread.run_sync(lambda: hashlib.sha256(sent.content).digest())
            name = (kind, sent.coding, digest)
            if name in self.seen:
                self.seen.move_to_end(name)
                return self.seen[name]
            body = await to_thread.run_sync(decode_body, sent, self.settings.max_plain_bytes)
            if len(body) <= SMALL:
                most = self.settings.solve_time_limit_s
                taken = await to_thread.run_sync(take, kind, body, most)
            else:
                taken = await self.solver.take(kind, body)
        if taken.profile is None or len(taken.profile.content) <= SMALL:
            self.seen[name] = taken
            while len(self.seen) > REMEMBERED:
                self.seen.popitem(last=False)
        return taken

    async def draw(self, request: Request, id: str) -> bytes:
        """The drawing of a policy that has none yet, made in a child and kept; as `drawing.draw` gives it.

        Raises:
            NotFound: there is no such policy, or its profile was deleted.
            Busy: too many bodies are being read. And what `Solver.draw` does.
        """
        with self.place(request):
            return await while_connected(request, lambda: self._draw(id))

    async def _draw(self, id: str) -> bytes:
        def look() -> tuple[bytes | None, bytes]:
            with self.database.read() as connection:
                found = read_drawing(connection, id)
                if found is not None:
                    return found, b""
                digest, policy = get_policy(connection, id).profile_digest, read_policy(connection, id)
                if policy is None:  # deleted this very moment
                    raise NotFound(f"no policy {id}")
                return None, drawing_body(profile_text(connection, digest), policy.text)

        def keep(drawn: bytes) -> None:
            with self.database.write() as connection:
                keep_drawing(connection, id, drawn, self.settings.keep_drawings_bytes)

        lock = self.drawn_now.setdefault(id, anyio.Lock())  # who asks at the same time waits for the same
        try:
            async with lock, self.slots:
                found, body = await to_thread.run_sync(look)
                if found is None:
                    found = await self.solver.draw(body)
                    with suppress(*AWAY):  # whoever asked gets it all the same
                        await to_thread.run_sync(keep, found)
                return found
        finally:
            if not lock.statistics().tasks_waiting:
                self.drawn_now.pop(id, None)

    async def submit(self, taken: Taken, caller: Caller, *, fresh: bool) -> Job:
        """The job of a request. Its client waits for it until `wait` has returned.

        Raises:
            NotFound, TooManyJobs, Busy: as `Jobs.submit`.
        """
        submit = self.jobs.submit
        with anyio.CancelScope(shield=True):
            job, found = await to_thread.run_sync(lambda: submit(taken, caller.name, fresh=fresh))
        cache = "miss" if not found else "hit" if job.final else "shared"
        self.metrics.cache.labels(taken.kind.value, cache).inc()
        if not found and self.runner is not None:
            self.runner.wake()
        return job

    async def wait(self, request: Request, job: Job, seconds: float) -> Job:
        """The job once it is final, or as it is after so many seconds: then it counts as accepted.

        When the client goes away before, the job is cancelled, unless others wait for it or were promised it.

        Raises:
            ClientDisconnect: it did.
        """

        async def look() -> None:
            nonlocal job
            delay = FIRST_LOOK_S
            while not job.final:
                await anyio.sleep(delay)
                delay = min(delay * 1.5, LAST_LOOK_S)
                with suppress(*AWAY):  # the client's wait goes on
                    job = await to_thread.run_sync(self.jobs.get, job.id)

        async def until() -> None:
            with anyio.move_on_after(seconds):
                await look()

        settle = self.jobs.accept
        try:
            if not job.final and seconds > 0:
                await while_connected(request, until)
            if job.final:
                settle = self.jobs.answered
        except ClientDisconnect:
            settle = self.jobs.leave
            raise
        finally:  # also where the service is told to stop: then the job goes on without it
            with anyio.CancelScope(shield=True), suppress(*AWAY):
                await to_thread.run_sync(settle, job.id)
        return job

    async def glance(self, look: Callable[[Connection], T]) -> T:
        """What `look` finds, which must be a few rows by an index: see `Database.glance`."""
        if self.database.is_sqlite:
            with suppress(OperationalError), self.database.glance() as connection:
                return look(connection)

        def elsewhere() -> T:
            with self.database.read() as connection:
                return look(connection)

        return await to_thread.run_sync(elsewhere)

    def note(self, caller: Caller, action: str, subject: str, request: Request) -> None:
        """Write a line of the audit log."""
        with self.database.write() as connection:
            note(connection, caller.name, action, subject, request.state.request_id)


async def service_of(request: Request) -> Service:
    """The service that the app was made with. Not a plain function: FastAPI calls those in a thread."""
    return cast(Service, request.app.state.service)


async def while_connected(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """What `work` gives. When the client goes away it is cancelled, so that nobody's work burns no CPU.

    Raises:
        ClientDisconnect: the client went away.
        what `work` does.
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
        raise errors.exceptions[0] from None  # `work` raised it: `watch` does not
    raise ClientDisconnect
