"""Jobs as rows: what a job is, and how it is read.

    queued --claim--> running --succeed, fail--> succeeded | failed
      ^                  |
      +-----requeue------+        queued | running --cancel--> cancelled

`job_requests.py` has the side of the clients that submit, wait and cancel; `job_runs.py` that of the runners.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import zstandard
from sqlalchemy import Connection, Row, and_, delete, func, insert, select, union

from autoac.api.errors import InUse, JobCancelled, JobFailed, NotFound
from autoac.api.requests import Kind
from autoac.api.storage.database import Database, newest_first, now, only_row
from autoac.api.storage.records import delete_row, get_text
from autoac.api.storage.tables import job_events, jobs, policies, profiles

RETRY_AFTER_S = 5


class JobState(StrEnum):
    """States of a job. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Return True if the job never changes again."""
        return self not in LIVE


LIVE = (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the table, without its result. Times are seconds since 1970.

    Invariant: a running job has one current attempt, the latest claim, and only the runner of that attempt
    may change it. A final job never changes.
    """

    number: int  # order of creation
    id: str
    kind: Kind
    profile_digest: str
    options: dict[str, Any]
    owner: str  # the caller that asked first
    state: JobState
    accepted: bool  # a client got 202: the job goes on without waiters
    attempt: int  # claims so far, less those given back by a runner that was stopped
    queue_id: int | None  # the entry of procrastinate that delivers it; None on SQLite
    created_at: float
    started_at: float | None
    finished_at: float | None
    policy_id: str | None  # the result of a policy job
    problem: str | None  # of a failed job: the problem document, as JSON

    @property
    def final(self) -> bool:
        """Return True if the job never changes again."""
        return self.state.final


JOB_COLUMNS = tuple(jobs.c[name] for name in Job.__slots__)


def job_from(row: Row[Any]) -> Job:
    """Return the job that a row of the table holds; the row has the columns `JOB_COLUMNS`."""
    fields = row._asdict()
    fields |= {"kind": Kind(row.kind), "state": JobState(row.state), "options": json.loads(row.options)}
    return Job(**fields)


def get_job(connection: Connection, id: str) -> Job:
    """Return a job.

    Raises:
        NotFound: the job does not exist.
    """
    return job_from(only_row(connection, select(*JOB_COLUMNS).where(jobs.c.id == id), "no such job"))


def add_event(connection: Connection, id: str, kind: str, data: dict[str, Any]) -> None:
    """Append an event to a job."""
    connection.execute(insert(job_events).values(job_id=id, at=now(), kind=kind, data=json.dumps(data)))


class JobStore:
    """Read the jobs of a database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def get(self, id: str) -> Job:
        """Return a job.

        Raises:
            NotFound: the job does not exist.
        """
        with self.database.read() as connection:
            return get_job(connection, id)

    def result(self, job: Job) -> bytes:
        """Return the JSON that a finished job produced.

        Raises:
            JobFailed, JobCancelled: the job has no result.
            NotFound: its policy was deleted.
        """
        match job.state:
            case JobState.CANCELLED:
                raise JobCancelled(f"job {job.id} was cancelled; ask again to start another")
            case JobState.FAILED:
                assert job.problem is not None
                raise JobFailed(job.problem, int(json.loads(job.problem)["status"]))
        with self.database.read() as connection:
            if job.policy_id is not None:
                try:
                    return get_text(connection, policies, job.policy_id)
                except NotFound as error:
                    raise NotFound(f"{error}: ask again to plan job {job.id} once more") from None
            content = connection.scalar(select(jobs.c.result).where(jobs.c.id == job.id))
        assert content is not None
        return zstandard.decompress(content)

    def events(self, id: str, after: int = 0, limit: int = 500) -> Sequence[Row[Any]]:
        """Return the events of a job after the event `after`, in order."""
        with self.database.read() as connection:
            return connection.execute(
                select(job_events)
                .where(job_events.c.job_id == id, job_events.c.number > after)
                .order_by(job_events.c.number)
                .limit(limit)
            ).all()

    def progress(self, id: str) -> dict[str, Any] | None:
        """Return the latest progress of a job, or None if it has reported none."""
        with self.database.read() as connection:
            data = connection.scalar(
                select(job_events.c.data)
                .where(job_events.c.job_id == id, job_events.c.kind == "progress")
                .order_by(job_events.c.number.desc())
                .limit(1)
            )
        return None if data is None else dict(json.loads(data))

    def page(self, wanted: Mapping[str, str | None], *, before: int | None = None, limit: int) -> list[Job]:
        """Return jobs, newest first, starting below the number `before`.

        `wanted` has values of columns; None matches all.
        """
        query = newest_first(select(*JOB_COLUMNS), jobs.c.number, before, limit)
        for column, value in wanted.items():
            if value is not None:
                query = query.where(jobs.c[column] == value)
        with self.database.read() as connection:
            return [job_from(row) for row in connection.execute(query)]

    def count_by_state(self) -> dict[str, int]:
        """Return the number of jobs in each state."""
        with self.database.read() as connection:
            counted = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state)).all()
        return {state.value: 0 for state in JobState} | {row[0]: row[1] for row in counted}


def prune(connection: Connection, days: float) -> dict[str, int]:
    """Delete what is older than `days` days, and return how many of each.

    A job's age counts from its end, and a profile stays while a job or a policy needs it.
    """
    then = now() - days * 86_400
    ended = _delete_jobs(connection, and_(jobs.c.state.not_in(LIVE), jobs.c.finished_at < then))
    old = connection.execute(delete(policies).where(policies.c.created_at < then)).rowcount
    needed = union(select(jobs.c.profile_digest), select(policies.c.profile_digest))
    unused = connection.execute(
        delete(profiles).where(profiles.c.created_at < then, profiles.c.id.not_in(needed))
    ).rowcount
    return {"jobs": ended, "policies": old, "profiles": unused}


def delete_profile(connection: Connection, digest: str) -> None:
    """Delete a profile and its jobs. Its policies stay.

    Raises:
        NotFound: the profile does not exist.
        InUse: a job that is queued or running needs it.
    """
    of_profile = jobs.c.profile_digest == digest
    if connection.scalar(select(func.count()).select_from(jobs).where(of_profile, jobs.c.state.in_(LIVE))):
        raise InUse(
            f"profile {digest} cannot be deleted, because a job that has not finished needs it: cancel that "
            "job, or wait for it"
        )
    _delete_jobs(connection, of_profile)
    delete_row(connection, profiles, digest)


def _delete_jobs(connection: Connection, condition: Any) -> int:
    ids = select(jobs.c.id).where(condition)
    connection.execute(delete(job_events).where(job_events.c.job_id.in_(ids)))
    return connection.execute(delete(jobs).where(condition)).rowcount
