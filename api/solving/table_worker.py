"""The embedded worker of SQLite: claims jobs from the table, which no other process does.

Since nobody else runs jobs, no lease is needed: a job that is running when the worker starts was interrupted,
and is queued again at once. The worker holds a lock file next to the database. A service that is started a
second time by mistake finds it locked, and leaves the running jobs to the first.
"""

from __future__ import annotations

from functools import partial

import anyio
import structlog
from anyio import to_thread
from filelock import FileLock, Timeout

from autoac.api.solving.job_runner import JobRunner, retry_while_away, wait_for_database
from autoac.api.storage.job_store import Job

log = structlog.get_logger("autoac.runner")

IDLE_S = 1.0  # between two looks at an empty queue; jobs of this process wake the worker at once


class TableWorker:
    """Claim queued jobs and run up to `solves_at_once` of them."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner, self._runs = runner, runner.runs
        self._submitted = anyio.Event()

    @property
    def deaf(self) -> bool:
        """Return False: the worker looks into the table itself, and needs no connection that may be lost."""
        return False

    def wake(self) -> None:
        """Look at the queue now."""
        self._submitted.set()

    async def serve(self) -> None:
        """Run jobs until cancelled, and then give the unfinished ones back."""
        lock = FileLock(f"{self._runs.database.url.database}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            log.warning("another service runs the jobs of this database", lock=lock.lock_file)
        else:
            await self._requeue_interrupted()
        try:
            await self._claim_and_run()
        finally:
            lock.release()

    async def _requeue_interrupted(self) -> None:
        for id in await wait_for_database(self._runs.interrupted):
            if await wait_for_database(partial(self._runs.requeue_interrupted, id)):
                log.warning("requeued a job of an earlier process", job=id)
                self._runner.metrics.requeued.inc()

    async def _claim_and_run(self) -> None:
        slots = anyio.Semaphore(self._runner.settings.solves_at_once)
        async with anyio.create_task_group() as group:
            while True:
                await slots.acquire()
                job = None
                try:
                    job = await self._next()
                finally:
                    if job is None:
                        slots.release()
                if job is not None:
                    group.start_soon(self._run, slots, job)

    async def _next(self) -> Job | None:
        """Return a claimed job, or None after a while without one."""
        self._submitted = anyio.Event()
        job = await retry_while_away(self._claim)
        if job is None:
            with anyio.move_on_after(IDLE_S):
                await self._submitted.wait()
        return job

    async def _claim(self) -> Job | None:
        """Claim a job. A cancelled claim is not abandoned halfway: its job is given back."""
        with anyio.CancelScope(shield=True):
            job = await to_thread.run_sync(self._runs.claim_next)
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            if job is not None:
                await self._runner.give_back(job)
            raise
        return job

    async def _run(self, slots: anyio.Semaphore, job: Job) -> None:
        try:
            await self._runner.run(job)
        finally:
            slots.release()
