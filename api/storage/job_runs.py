"""Jobs from the side of the runners: claim, report progress, finish, give back.

NOTE [ Once in effect ]

A job may run twice: a worker that procrastinate took for dead may come back. But it takes effect once. Each
method here is one transaction that changes a running job only in the attempt that the runner claimed. If the
job was cancelled or given to another runner, nothing changes, the method returns False, and the runner kills
its child process. `write_progress`, twice a second, is how it finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zstandard
from sqlalchemy import Connection, and_, func, select, update

from autoac.api.problems import URN, Problem
from autoac.api.requests import Kind
from autoac.api.settings import Settings
from autoac.api.storage.database import Database, now
from autoac.api.storage.job_queue import JobQueue
from autoac.api.storage.job_store import LIVE, Job, JobState, add_event, get_job
from autoac.api.storage.records import PolicyOptions, add_policy, get_text
from autoac.api.storage.tables import jobs, profiles

_WENT_AWAY = {"why": "its runner went away"}


class OwnerBusy(Exception):
    """As many jobs of this owner run as its limit allows; the job stays queued."""


class JobRuns:
    """Change the state of jobs: claim, progress, finish, fail, cancel."""

    def __init__(self, database: Database, settings: Settings, queue: JobQueue) -> None:
        self.database, self.settings, self.queue = database, settings, queue

    def claim_next(self) -> Job | None:
        """Start the queued job whose turn it is, of the owners below their limit; return None without one."""
        with self.database.write() as connection:
            next_one = (
                select(jobs.c.id)
                .where(jobs.c.state == JobState.QUEUED, jobs.c.owner.not_in(self._busy_owners(connection)))
                .order_by(jobs.c.turn, jobs.c.number)
                .limit(1)
            )
            id = connection.scalar(next_one)
            return None if id is None else self._start(connection, id)

    def claim_delivered(self, id: str, queue_id: int) -> Job | None:
        """Start a job that the queue delivered; return None if the delivery is void.

        It is void if the job is final or deleted, or if a newer entry delivers it. A job that already runs
        under this entry is started again: procrastinate has taken the entry away from the earlier runner.
        After too many attempts it fails instead.

        Raises:
            OwnerBusy: the owner has reached its limit of running jobs.
        """
        with self.database.write() as connection:
            busy = self._busy_owners(connection)
            row = connection.execute(
                select(jobs.c.owner, jobs.c.state, jobs.c.attempt)
                .where(jobs.c.id == id, jobs.c.queue_id == queue_id, jobs.c.state.in_(LIVE))
                .with_for_update()
            ).one_or_none()
            if row is None:
                return None
            if row.state == JobState.QUEUED and row.owner in busy:
                raise OwnerBusy
            if row.state == JobState.RUNNING and row.attempt >= self.settings.attempts:
                self._give_up(connection, id)
                return None
            return self._start(connection, id)

    def _busy_owners(self, connection: Connection) -> list[str]:
        self.database.lock(connection, "claim")  # until the claim is committed nobody else counts
        return list(
            connection.scalars(
                select(jobs.c.owner)
                .where(jobs.c.state == JobState.RUNNING)
                .group_by(jobs.c.owner)
                .having(func.count() >= self.settings.key_running)
            )
        )

    def _start(self, connection: Connection, id: str) -> Job:
        connection.execute(
            update(jobs)
            .where(jobs.c.id == id)
            .values(state=JobState.RUNNING, attempt=jobs.c.attempt + 1, started_at=now())
        )
        job = get_job(connection, id)
        add_event(connection, id, "state", {"state": JobState.RUNNING, "attempt": job.attempt})
        return job

    def profile_text(self, job: Job) -> bytes:
        """Return the JSON of the profile that `job` plans."""
        with self.database.read() as connection:
            return get_text(connection, profiles, job.profile_digest)

    def write_progress(self, job: Job, progress: Sequence[dict[str, Any]] = ()) -> bool:
        """Append progress; return False if the job is not this runner's any more."""
        if not progress:
            with self.database.read() as connection:
                return bool(connection.scalar(select(func.count()).select_from(jobs).where(_current(job))))
        with self.database.write() as connection:
            return self._append(connection, job, progress)

    def _append(self, connection: Connection, job: Job, progress: Sequence[dict[str, Any]]) -> bool:
        held = connection.scalar(select(jobs.c.id).where(_current(job)).with_for_update()) is not None
        for piece in progress if held else ():
            add_event(connection, job.id, "progress", piece)
        return held

    def succeed(self, job: Job, result: str, progress: Sequence[dict[str, Any]] = ()) -> bool:
        """Store the result of a running job; return False and store nothing if the job is not current."""
        with self.database.write() as connection:
            if not self._append(connection, job, progress):
                return False
            if job.kind is Kind.POLICY:
                id = add_policy(connection, result, job.owner, PolicyOptions.of(job.options))
                values: dict[str, Any] = {"policy_id": id}
            else:
                values = {"result": zstandard.compress(result.encode())}
            return _end(connection, job, JobState.SUCCEEDED, **values)

    def fail(self, job: Job, problem: str) -> bool:
        """End a running job with a problem document; return False if the job is not current."""
        with self.database.write() as connection:
            return _end(connection, job, JobState.FAILED, problem=problem)

    def give_back(self, job: Job) -> bool:
        """Queue a running job again because its runner was stopped. The run does not count as an attempt."""
        with self.database.write() as connection:
            back = update(jobs).values(state=JobState.QUEUED, attempt=jobs.c.attempt - 1)
            if not connection.execute(back.where(_current(job))).rowcount:
                return False
            add_event(connection, job.id, "state", {"state": JobState.QUEUED, "why": "its runner stopped"})
            return True

    def live_entries(self) -> list[tuple[str, int | None]]:
        """Return the id of each job that is not final, with the queue's entry that delivers it."""
        with self.database.read() as connection:
            rows = connection.execute(select(jobs.c.id, jobs.c.queue_id).where(jobs.c.state.in_(LIVE)))
            return [(row.id, row.queue_id) for row in rows]

    def interrupted(self) -> list[str]:
        """Return the ids of the running jobs. When an embedded runner starts, nobody runs them."""
        with self.database.read() as connection:
            return list(connection.scalars(select(jobs.c.id).where(jobs.c.state == JobState.RUNNING)))

    def requeue_interrupted(self, id: str, queue_id: int | None = None) -> bool:
        """Deliver once more the job of a runner that died, or fail the job after too many attempts.

        Args:
            id: the job.
            queue_id: the entry under which the runner had it. If the job has another one, or is final, leave
                it alone and return False.
        """
        with self.database.write() as connection:
            found = connection.execute(
                select(jobs.c.state, jobs.c.attempt, jobs.c.turn)
                .where(
                    jobs.c.id == id, jobs.c.queue_id.is_not_distinct_from(queue_id), jobs.c.state.in_(LIVE)
                )
                .with_for_update()
            ).one_or_none()
            if found is None:
                return False
            if found.state == JobState.RUNNING and found.attempt >= self.settings.attempts:
                self._give_up(connection, id)
                return True
            values = {"state": JobState.QUEUED, "queue_id": self.queue.add(connection, id, found.turn)}
            connection.execute(update(jobs).where(jobs.c.id == id).values(**values))
            if found.state == JobState.RUNNING:
                add_event(connection, id, "state", {"state": JobState.QUEUED} | _WENT_AWAY)
            return True

    def _give_up(self, connection: Connection, id: str) -> None:
        """End a job that no runner survived."""
        problem = Problem(
            type=URN + "solver-died",
            title="The solver died",
            status=500,
            detail=f"the job was started {self.settings.attempts} times, and each time its runner went away",
        ).to_json()
        connection.execute(
            update(jobs)
            .where(jobs.c.id == id)
            .values(state=JobState.FAILED, finished_at=now(), problem=problem)
        )
        add_event(connection, id, "state", {"state": JobState.FAILED} | _WENT_AWAY)


def _current(job: Job) -> Any:
    """Return the condition that a job runs in the attempt that its runner claimed."""
    return and_(jobs.c.id == job.id, jobs.c.state == JobState.RUNNING, jobs.c.attempt == job.attempt)


def _end(connection: Connection, job: Job, state: JobState, **values: Any) -> bool:
    end = update(jobs).values(state=state, finished_at=now(), **values).where(_current(job))
    if not connection.execute(end).rowcount:
        return False
    add_event(connection, job.id, "state", {"state": state})
    return True
