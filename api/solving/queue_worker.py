"""The worker of PostgreSQL: runs the jobs that procrastinate delivers.

procrastinate's worker ends when the database restarts, and does not retry the jobs of a worker that died.
Ours begins again, and `_rescue` delivers such jobs once more. See NOTE [ Deliveries ] in job_queue.py.

NOTE [ A deaf worker ]

A worker shows two signs of life. While it has a free slot, the queue answers its request for a job every
POLL_S; and the database takes its heartbeat. An attempt to reach a database that is away counts as both. If
one of the two is missing for SILENT_LEASES leases, the worker is deaf, whatever the cause: no job reaches it,
or other workers take over its jobs. `/livez` then answers 503, so that a supervisor restarts the process.
While the database is away the attempts go on, so an outage restarts nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import anyio
import procrastinate
import psycopg
import structlog
from anyio import to_thread
from procrastinate.exceptions import AppNotOpen, ConnectorException
from procrastinate.job_context import AbortReason
from procrastinate.jobs import Status
from procrastinate.manager import JobManager

from autoac.api.errors import DatabaseNotReady
from autoac.api.solving.job_runner import AGAIN_S, JobRunner
from autoac.api.storage.database import AWAY, Database, cause_of
from autoac.api.storage.job_runs import OwnerBusy
from autoac.api.storage.postgres_queue import QUEUE, TASK

log = structlog.get_logger("autoac.worker")

T = TypeVar("T")

LATER_S = 2  # until a delivery is tried again whose owner is at its limit, or that met an error
CANCEL_AGAIN_S = 1.0  # between two attempts to cancel a task
POLL_S = 2.0  # between two requests for a job, if no notification came
SILENT_LEASES = 8  # without a sign of life, until the worker counts as deaf
QUEUE_AWAY = (ConnectorException, AppNotOpen, psycopg.Error)


class WorkerStopped(Exception):
    """The worker stops; the job was given back and is to be delivered again at once."""


class _DeliverAgain(procrastinate.BaseRetryStrategy):
    """Deliver again after every error. A job that a client cancelled raises CancelledError, and is over."""

    def get_retry_decision(
        self, *, exception: BaseException, job: procrastinate.jobs.Job
    ) -> procrastinate.RetryDecision | None:
        if isinstance(exception, asyncio.CancelledError):
            return None
        seconds = 0 if isinstance(exception, WorkerStopped) else LATER_S
        return procrastinate.RetryDecision(retry_in={"seconds": seconds})


@dataclass(slots=True)
class SignsOfLife:
    """Times of the last signs of life: see NOTE [ A deaf worker ]."""

    fetched: float = field(default_factory=time.monotonic)  # a request for a job was answered
    heartbeat: float = field(default_factory=time.monotonic)  # it was renewed

    def show(self) -> None:
        """Note that the worker begins again, which counts as both signs of life."""
        self.fetched = self.heartbeat = time.monotonic()


class _WatchedManager(JobManager):
    """Note when the database last answered procrastinate's two regular requests."""

    def __init__(self, app: procrastinate.App, life: SignsOfLife) -> None:
        super().__init__(app.connector)
        self._life = life

    async def fetch_job(self, queues: Iterable[str] | None, worker_id: int) -> procrastinate.jobs.Job | None:
        """Fetch a job, if there is one."""
        job = await super().fetch_job(queues, worker_id)
        self._life.fetched = time.monotonic()
        return job

    async def update_heartbeat(self, worker_id: int) -> None:
        """Renew the heartbeat, without which other workers take over this worker's jobs.

        procrastinate's own task of heartbeats ends for good at its first error. Nothing notices, since the
        task's monitor ends with the deferrer of periodic tasks, and we have no periodic tasks. So here an
        error only skips one renewal.
        """
        try:
            await super().update_heartbeat(worker_id)
        except QUEUE_AWAY as error:
            log.warning("could not renew the heartbeat; trying again", cause=_cause(error))
        else:
            self._life.heartbeat = time.monotonic()


class QueueWorker:
    """Run the jobs that procrastinate delivers, `solves_at_once` of them at a time."""

    def __init__(self, database: Database, runner: JobRunner) -> None:
        self.database, self.runner = database, runner
        self._running = 0  # deliveries in progress
        self._life = SignsOfLife()

    @property
    def deaf(self) -> bool:
        """Return True if no job can reach the worker any more: see NOTE [ A deaf worker ]."""
        settings, life = self.runner.settings, self._life
        has_slot = self._running < settings.solves_at_once
        last_sign = min(life.fetched, life.heartbeat) if has_slot else life.heartbeat
        return time.monotonic() - last_sign > SILENT_LEASES * settings.lease_s

    def wake(self) -> None:
        """Do nothing: PostgreSQL notifies procrastinate of each new entry."""

    async def serve(self) -> None:
        """Run jobs until cancelled, and then give the unfinished ones back.

        Restarts of the database do not end the worker.
        """
        await self._until_ready()
        log.info("working", at_once=self.runner.settings.solves_at_once)
        while True:
            self._life.show()
            # procrastinate shuts down in order if its task is cancelled once; anyio cancels repeatedly.
            task = asyncio.create_task(self._work(self._app()))
            try:
                await asyncio.wait([task])
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(task)
            error = task.exception()
            if error is not None:
                _raise_unless_away(error)
                log.warning("the queue is away; trying again", cause=_cause(error))
            await anyio.sleep(AGAIN_S)

    async def _until_ready(self) -> None:
        """Wait for the database and its tables, since another process may be upgrading them."""
        warned = False
        while True:
            try:
                await to_thread.run_sync(self.database.check)
                return
            except (DatabaseNotReady, *AWAY) as error:
                self._life.show()
                if not warned:
                    log.warning("waiting for the database", cause=cause_of(error))
                warned = True
                await anyio.sleep(AGAIN_S)

    def _app(self) -> procrastinate.App:
        url = self.database.url.set(drivername="postgresql").render_as_string(hide_password=False)
        app = procrastinate.App(
            # One connection renews the heartbeat, the others fetch and finish. Another one listens.
            connector=procrastinate.PsycopgConnector(conninfo=url, min_size=1, max_size=4)
        )
        app.job_manager = _WatchedManager(app, self._life)
        app.task(name=TASK, queue=QUEUE, pass_context=True, retry=_DeliverAgain())(self._deliver)
        return app

    async def _work(self, app: procrastinate.App) -> None:
        settings = self.runner.settings
        rescue = None
        try:
            await app.open_async()
            rescue = asyncio.create_task(self._rescue(app))
            await app.run_worker_async(
                queues=[QUEUE],
                concurrency=settings.solves_at_once,
                install_signal_handlers=False,
                fetch_job_polling_interval=POLL_S,
                abort_job_polling_interval=1.0,
                delete_jobs="always",
                shutdown_graceful_timeout=0,
                update_heartbeat_interval=settings.lease_s / 3,
                stalled_worker_timeout=settings.lease_s,
            )
        finally:  # also if cancelled while the pool opens: a pool that is left open never lets the loop end
            try:
                if rescue is not None:
                    await _end(rescue)
            finally:
                await app.close_async()

    async def _deliver(self, context: procrastinate.JobContext, job_id: str) -> None:
        """Run the job of an entry."""
        self._running += 1
        try:
            await self._claim_and_run(context, job_id)
        finally:
            self._running -= 1
            self._life.fetched = time.monotonic()  # it asked for no job while all slots were taken

    async def _claim_and_run(self, context: procrastinate.JobContext, job_id: str) -> None:
        queue_id = context.job.id
        assert queue_id is not None
        claim = asyncio.ensure_future(to_thread.run_sync(self.runner.runs.claim_delivered, job_id, queue_id))
        try:
            try:
                job = await asyncio.shield(claim)
            except asyncio.CancelledError:  # the claim's thread goes on, and may still commit
                if (claimed := await claim) is not None:
                    await self.runner.give_back(claimed)
                raise
            if job is not None:
                await self.runner.run(job)
        except OwnerBusy:
            raise
        except AWAY as error:
            log.warning("the database is away", job=job_id, cause=cause_of(error))
            raise
        except asyncio.CancelledError:
            if context.abort_reason() is AbortReason.USER_REQUEST:
                raise
            raise WorkerStopped from None

    async def _rescue(self, app: procrastinate.App) -> None:
        """Deliver the jobs of dead workers once more: add a new entry, then delete the old one."""
        lease_s = self.runner.settings.lease_s
        while True:
            try:
                for entry in await app.job_manager.get_stalled_jobs(
                    queue=QUEUE, task_name=TASK, seconds_since_heartbeat=lease_s
                ):
                    await self._requeue(str(entry.task_kwargs["job_id"]), entry.id)
                    with suppress(ConnectorException):  # another worker rescued it first
                        await app.job_manager.finish_job(entry, Status.FAILED, delete_job=True)
                await self._rescue_without_entry(app)
            except (*QUEUE_AWAY, *AWAY):
                pass  # the worker itself finds out, and says so
            except Exception:
                log.exception("could not look for jobs of workers that died")
            await asyncio.sleep(lease_s / 3)

    async def _rescue_without_entry(self, app: procrastinate.App) -> None:
        """Deliver jobs without an entry once more: a worker of another release may have dropped the entry."""
        live = await _in_thread(self.runner.runs.live_entries)
        if live:
            entries = await app.job_manager.list_jobs_async(queue=QUEUE, task=TASK)
            waiting = {entry.id for entry in entries}
            for id, queue_id in live:
                if queue_id not in waiting:
                    await self._requeue(id, queue_id)

    async def _requeue(self, id: str, queue_id: int | None) -> None:
        if await _in_thread(partial(self.runner.runs.requeue_interrupted, id, queue_id)):
            log.warning("requeued a job of a worker that died", job=id)
            self.runner.metrics.requeued.inc()


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel `task` until it has ended.

    One cancellation may get lost: asyncio.wait_for of Python 3.11, which psycopg waits with, drops one that
    meets its result.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait([task], timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error  # raised once the task has ended: nothing else would end it
    if cancelled is not None:
        raise cancelled


async def _in_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread; if cancelled, wait until it has given its connection back."""
    call = asyncio.ensure_future(to_thread.run_sync(function))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


def _raise_unless_away(error: BaseException) -> None:
    if isinstance(error, BaseExceptionGroup):
        if error.split(QUEUE_AWAY)[1] is not None:
            raise error
    elif not isinstance(error, QUEUE_AWAY):
        raise error


def _cause(error: BaseException) -> str:
    """Return the database's own message, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return cause_of(error.__cause__ or error)
