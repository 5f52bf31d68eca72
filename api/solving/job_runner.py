"""Run one claimed job: solve it in a child process, pass on its progress, store its result."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import structlog
from anyio import to_thread
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential, wait_random

from autoac.api.error_mapping import problem_of
from autoac.api.errors import ServiceError
from autoac.api.requests import Kind, job_body
from autoac.api.settings import Settings
from autoac.api.solving.child_process import Solver
from autoac.api.storage.database import AWAY, cause_of, is_away
from autoac.api.storage.job_runs import JobRuns
from autoac.api.storage.job_store import Job
from autoac.api.telemetry.metrics import Metrics
from autoac.planner.errors import PlannerError

T = TypeVar("T")

log = structlog.get_logger("autoac.runner")

PROGRESS_EVERY_S = 0.5  # also how soon a runner notices that its job was cancelled
AGAIN_S, MOST_AGAIN_S = 0.5, 10.0  # between two tries of a database that is away: doubled each time


class JobRunner:
    """Solve claimed jobs and store their results."""

    def __init__(self, settings: Settings, runs: JobRuns, solver: Solver, metrics: Metrics) -> None:
        self.settings, self.runs = settings, runs
        self.solver, self.metrics = solver, metrics

    async def run(self, job: Job) -> None:
        """Solve a claimed job and store its result. When cancelled, give the job back to the queue."""
        started = time.monotonic()
        ended = "lost"
        progress: list[dict[str, Any]] = []
        log.info("solving", job=job.id, kind=job.kind, attempt=job.attempt)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._report, job, progress, group.cancel_scope)
                ended = await self._solve(job, progress)
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            # Neither `_report` nor `_solve` raises, except when cancelled from outside or for a bug.
            raise errors.exceptions[0] from None
        except anyio.get_cancelled_exc_class():
            ended = "stopped"
            await self.give_back(job)
            raise
        finally:
            seconds = time.monotonic() - started
            self.metrics.solve_seconds.labels(job.kind, ended).observe(seconds)
            log.info("solved", job=job.id, ended=ended, seconds=round(seconds, 3))

    async def give_back(self, job: Job) -> None:
        """Queue a claimed job again, unless the database is away: then the job counts as interrupted."""
        with anyio.CancelScope(shield=True), suppress(*AWAY):
            if await to_thread.run_sync(self.runs.give_back, job):
                self.metrics.requeued.inc()

    async def _solve(self, job: Job, progress: list[dict[str, Any]]) -> str:
        """Return how the run ended: "succeeded", "failed", or "lost" to another run or a cancellation."""
        try:
            text = await wait_for_database(lambda: self.runs.profile_text(job))
            solves = int(job.options.get("points", 1))
            body = job_body(text, job.options)
            result = await self.solver.answer(job.kind, body, progress.append, solves=solves)
            rest = _drain(progress)
            done = await wait_for_database(lambda: self.runs.succeed(job, result, rest))
        except Exception as error:
            problem = problem_of(error)
            if isinstance(error, PlannerError | ServiceError):
                log.info("no result", job=job.id, problem=problem.type, detail=problem.detail)
            else:
                log.exception("a bug", job=job.id, exc_info=error)
            done = await wait_for_database(lambda: self.runs.fail(job, problem.to_json()))
            return "failed" if done else "lost"
        if done and job.kind is Kind.POLICY:
            self.metrics.gap.observe(json.loads(result)["predicted"]["gap"])
        return "succeeded" if done else "lost"

    async def _report(self, job: Job, progress: list[dict[str, Any]], scope: anyio.CancelScope) -> None:
        """Write progress as it comes; cancel `scope` once another run or a cancellation replaced this one."""
        while True:
            await anyio.sleep(PROGRESS_EVERY_S)
            pieces = _drain(progress)
            try:
                current = await to_thread.run_sync(self.runs.write_progress, job, pieces)
            except AWAY:
                progress[:0] = pieces
                continue
            if not current:
                scope.cancel()
                return


def _drain(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a list and empty it."""
    drained = pieces[:]
    del pieces[: len(drained)]
    return drained


async def retry_while_away(work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `work`; while the database is away, try again after growing pauses."""
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(is_away),
        wait=wait_exponential(multiplier=AGAIN_S, max=MOST_AGAIN_S) + wait_random(0, AGAIN_S),
        before_sleep=_log_cause,
    ):
        with attempt:
            return await work()
    raise AssertionError("AsyncRetrying has no limit on attempts, but stopped without a result or an error")


async def wait_for_database(work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread; while the database is away, try again."""
    return await retry_while_away(lambda: to_thread.run_sync(work))


def _log_cause(state: RetryCallState) -> None:
    error = None if state.outcome is None else state.outcome.exception()
    if error is not None:
        log.warning("the database is away; trying again", cause=cause_of(error))
