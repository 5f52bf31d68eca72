"""Runs jobs: the same for the runner inside the service and for a worker on another machine."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import structlog
from anyio import to_thread
from sqlalchemy import delete, func, insert, select, update
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential, wait_random

from autoac.api.error_mapping import problem_of
from autoac.api.errors import ServiceError
from autoac.api.problems import URN, Problem
from autoac.api.requests import Kind, job_body
from autoac.api.settings import Settings
from autoac.api.solving.child_process import Solver
from autoac.api.storage.database import AWAY, Database, cause_of, is_away, now
from autoac.api.storage.job_store import Job, Jobs
from autoac.api.storage.tables import runners
from autoac.api.telemetry.metrics import Metrics
from autoac.planner.errors import PlannerError

T = TypeVar("T")

log = structlog.get_logger("autoac.runner")

IDLE_S = 1.0  # between two looks into an empty queue; this process's own jobs wake it at once
AGAIN_S, MOST_AGAIN_S = 0.5, 10.0  # between two tries of a database that is away: doubled each time


class Runner:
    """Solves jobs and keeps their leases. `wake` is called when there may be something to do."""

    def __init__(
        self, settings: Settings, database: Database, jobs: Jobs, solver: Solver, metrics: Metrics
    ) -> None:
        self.settings, self.database, self.jobs = settings, database, jobs
        self.solver, self.metrics = solver, metrics
        self.name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self.ended = False  # by an error that nobody has thought of
        self._due = anyio.Event()

    def wake(self) -> None:
        """Look into the queue now."""
        self._due.set()

    async def serve(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Claim and solve until cancelled; what runs then is queued again. Should it fail, call `on_end`."""
        try:
            await self._serve()
        except Exception as error:
            log.critical("the runner has ended; this process needs a restart", exc_info=error)
            self.ended = True
            on_end()

    async def _serve(self) -> None:
        slots = anyio.Semaphore(self.settings.solves_at_once)
        async with anyio.create_task_group() as group:
            group.start_soon(self.watch)
            while True:
                await slots.acquire()
                job = None
                try:
                    job = await self._next()
                finally:
                    if job is None:
                        slots.release()
                if job is None:
                    continue
                group.start_soon(self._in_slot, slots, job)

    async def _next(self) -> Job | None:
        """A claimed job, or None after a while without one."""
        self._due = anyio.Event()
        job = await patiently(lambda: self._claimed(None))
        if job is None:
            with anyio.move_on_after(IDLE_S):
                await self._due.wait()
        return job

    async def _claimed(self, id: str | None) -> Job | None:
        """A claim is not abandoned half-way: who is cancelled during one gives the job back."""
        with anyio.CancelScope(shield=True):
            job = await to_thread.run_sync(self.jobs.claim, self.name, id)
        try:
            await anyio.lowlevel.checkpoint()
        except BaseException:
            if job is not None:
                await self._give_back(job)
            raise
        return job

    async def _in_slot(self, slots: anyio.Semaphore, job: Job) -> None:
        try:
            await self.run(job)
        finally:
            slots.release()

    async def run_one(self, id: str) -> bool:
        """Claim a job by its id and solve it; False if it cannot be claimed now."""
        job = await self._claimed(id)
        if job is None:
            return False
        await self.run(job)
        return True

    async def run(self, job: Job) -> None:
        """Solve a claimed job and store what comes of it. Cancelled, it gives the job back."""
        started = time.monotonic()
        ended = "lost"
        told: list[dict[str, Any]] = []
        log.info("solving", job=job.id, kind=job.kind, attempt=job.attempt)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._keep, job, told, group.cancel_scope)
                ended = await self._solve(job, told)
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            # Neither `_keep` nor `_solve` raises but when cancelled from outside, or for a bug.
            raise errors.exceptions[0] from None
        except anyio.get_cancelled_exc_class():
            ended = "stopped"
            await self._give_back(job)
            raise
        finally:
            seconds = time.monotonic() - started
            self.metrics.solve_seconds.labels(job.kind, ended).observe(seconds)
            log.info("solved", job=job.id, ended=ended, seconds=round(seconds, 3))

    async def _give_back(self, job: Job) -> None:
        with anyio.CancelScope(shield=True), suppress(*AWAY):  # away: its lease will end
            if await to_thread.run_sync(self.jobs.requeue, job):
                self.metrics.requeued.inc()

    async def _solve(self, job: Job, told: list[dict[str, Any]]) -> str:
        """How it ended: "succeeded", "failed", or "lost" where the job was no longer ours."""
        try:
            text = await patiently_in_thread(lambda: self.jobs.body(job))
            solves = int(job.options.get("points", 1))
            body = job_body(text, job.options)
            result = await self.solver.answer(
                job.kind, body, told.append, solves=solves, draws=self.settings.draws
            )
            progress = drained(told)
            done = await patiently_in_thread(lambda: self.jobs.succeed(job, result, progress))
        except Exception as error:
            problem = problem_of(error)
            if isinstance(error, PlannerError | ServiceError):
                log.info("no result", job=job.id, problem=problem.type, detail=problem.detail)
            else:
                log.exception("a bug", job=job.id, exc_info=error)
            done = await patiently_in_thread(lambda: self.jobs.fail(job, problem.model_dump_json()))
            return "failed" if done else "lost"
        if done and job.kind is Kind.POLICY:
            self.metrics.gap.observe(json.loads(result.text)["predicted"]["gap"])
        return "succeeded" if done else "lost"

    async def _keep(self, job: Job, told: list[dict[str, Any]], scope: anyio.CancelScope) -> None:
        """Renew the lease and pass progress on; once the job is no longer ours, cancel `scope`."""
        every = min(0.5, self.settings.lease_s / 4)
        while True:
            await anyio.sleep(every)
            progress = drained(told)
            try:
                held = await to_thread.run_sync(self.jobs.renew, job, progress)
            except AWAY:
                told[:0] = progress
                continue  # the lease may run out: then another runner takes the job, and we learn of it here
            if not held:
                scope.cancel()
                return

    async def watch(self) -> None:
        """Say that this runner is alive, and rescue the jobs of those that are not."""
        every = self.settings.lease_s / 3
        away = False
        while True:
            try:
                await to_thread.run_sync(self._seen)
                rescued = await to_thread.run_sync(self.jobs.rescue, given_up(self.settings.attempts))
                if rescued:
                    log.warning("jobs of a runner that went away", jobs=rescued)
                    self.metrics.requeued.inc(rescued)
                    self.wake()
                away = False
            except AWAY as error:
                if not away:
                    log.warning("the database is away; this runner is not seen", cause=cause_of(error))
                away = True
            await anyio.sleep(every)

    def _seen(self) -> None:
        with self.database.write() as connection:
            there = connection.execute(
                update(runners).where(runners.c.name == self.name).values(seen_at=now())
            )
            if not there.rowcount:
                connection.execute(insert(runners).values(name=self.name, started_at=now(), seen_at=now()))
            connection.execute(delete(runners).where(runners.c.seen_at < now() - 86_400))

    def gone(self) -> None:
        """Say that this runner is no longer there."""
        with self.database.write() as connection:
            connection.execute(delete(runners).where(runners.c.name == self.name))


def alive(database: Database, lease_s: float) -> int:
    """How many runners were heard of within two leases."""
    with database.read() as connection:
        lately = runners.c.seen_at > now() - 2 * lease_s
        return connection.scalar(select(func.count()).select_from(runners).where(lately)) or 0


def drained(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is in the list, which is empty afterwards."""
    taken = told[:]
    del told[: len(taken)]
    return taken


async def patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` gives; while the database is away, try again, after longer and longer pauses."""
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(is_away),
        wait=wait_exponential(multiplier=AGAIN_S, max=MOST_AGAIN_S) + wait_random(0, AGAIN_S),
        before_sleep=_say_why,
    ):
        with attempt:
            return await work()
    raise AssertionError("there is always another attempt")


async def patiently_in_thread(work: Callable[[], T]) -> T:
    """Return what `patiently` does, of a function that waits for the database."""
    return await patiently(lambda: to_thread.run_sync(work))


def _say_why(state: RetryCallState) -> None:
    error = None if state.outcome is None else state.outcome.exception()
    if error is not None:
        log.warning("the database is away; trying again", cause=cause_of(error))


def given_up(attempts: int) -> str:
    """The problem of a job that no runner lived through."""
    return Problem(
        type=URN + "solver-died",
        title="The solver died",
        status=500,
        detail=f"the job was begun {attempts} times, and each time its runner went away",
    ).model_dump_json()
