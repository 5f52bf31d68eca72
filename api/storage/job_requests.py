"""Jobs from the side of the clients: submit, wait, leave, cancel.

NOTE [ Turns ]

Keys take turns, so that a key that asks for a hundred plans delays nobody else's. A job gets its turn, a
number, when it is submitted: one more than the last turn of its owner, or than the latest turn that has
started, whichever is later. Jobs start in the order of their turns. So the jobs of one owner are a turn
apart, a newcomer shares the next turn with those who wait, and nobody waits forever for newcomers:

    a asks for 4 plans; the first starts     a1 a2 a3 a4     turns 1 2 3 4
    b asks for 2                             b1 b2           turns 2 3
    they start in the order                  a1, a2 b1, a3 b2, a4

This is start-time fair queueing (Goyal, Vin, Cheng 1996) of jobs that count alike. SQLite's worker orders its
query by the turn; in procrastinate the priority is the turn with a minus sign.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, case, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoac.api.errors import Busy, NotFound, TooManyJobs
from autoac.api.problems import URN
from autoac.api.requests import ParsedRequest
from autoac.api.settings import Settings
from autoac.api.storage.database import Database, now
from autoac.api.storage.job_queue import JobQueue
from autoac.api.storage.job_store import (
    JOB_COLUMNS,
    LIVE,
    RETRY_AFTER_S,
    Job,
    JobState,
    add_event,
    get_job,
    job_from,
)
from autoac.api.storage.records import add_profile, get_row
from autoac.api.storage.tables import jobs, policies, profiles

REUSED_FAILURES = tuple(URN + slug for slug in ("infeasible-budget", "invalid-budget", "invalid-constraints"))
"""Failures that a second solve would repeat. After any other failure a request is solved again."""


class JobRequests:
    """Submit and cancel jobs, and count the requests that wait for each."""

    def __init__(self, database: Database, settings: Settings, queue: JobQueue) -> None:
        self.database, self.settings, self.queue = database, settings, queue

    def submit(self, request: ParsedRequest, owner: str, *, fresh: bool = False) -> tuple[Job, bool]:
        """Return the job of a request, and True if it existed already. The caller becomes a waiter.

        A waiter ends with `end_waiter` or `abandon`.

        Args:
            request: what to solve.
            owner: the caller, whose limits count.
            fresh: solve the request even if its result is stored.

        Raises:
            NotFound: the profile does not exist.
            TooManyJobs: the owner has reached its limit of queued jobs.
            Busy: all owners together have reached theirs.
        """
        for _ in range(10):
            try:
                with self.database.write() as connection:
                    return self._submit(connection, request, owner, fresh)
            except IntegrityError:
                continue  # another replica stored the same profile or job between two of the statements
        raise Busy(RETRY_AFTER_S)

    def _submit(
        self, connection: Connection, request: ParsedRequest, owner: str, fresh: bool
    ) -> tuple[Job, bool]:
        found = self._same_request(connection, request.request_key, fresh)
        if found is not None:
            waiters = {"waiters": jobs.c.waiters + 1}
            connection.execute(update(jobs).where(jobs.c.number == found.number).values(**waiters))
            return found, True
        self.database.lock(connection, "queue")
        owned = func.coalesce(func.sum(case((jobs.c.owner == owner, 1), else_=0)), 0)
        total, mine = connection.execute(
            select(func.count(), owned).where(jobs.c.state == JobState.QUEUED)
        ).one()
        if mine >= self.settings.key_queued:
            raise TooManyJobs(self.settings.key_queued, RETRY_AFTER_S)
        if total >= self.settings.queue_most:
            raise Busy(RETRY_AFTER_S)
        digest = request.profile_digest
        if request.profile is not None:
            add_profile(connection, request.profile, owner)
        elif connection.scalar(select(profiles.c.number).where(profiles.c.id == digest)) is None:
            raise NotFound(f"no profile {digest}; POST it to /v1/profiles")
        id, turn = secrets.token_hex(16), self._next_turn(connection, owner)
        connection.execute(
            insert(jobs).values(
                id=id,
                kind=request.kind.value,
                request_key=request.request_key,
                profile_digest=digest,
                options=json.dumps(request.options, sort_keys=True),
                owner=owner,
                state=JobState.QUEUED,
                accepted=False,
                waiters=1,
                attempt=0,
                turn=turn,
                queue_id=self.queue.add(connection, id, turn),
                created_at=now(),
            )
        )
        add_event(connection, id, "state", {"state": JobState.QUEUED})
        return get_job(connection, id), False

    def _next_turn(self, connection: Connection, owner: str) -> int:
        """Return the turn of a new job: see NOTE [ Turns ]."""
        latest = select(func.max(jobs.c.turn))
        mine = latest.where(jobs.c.owner == owner, jobs.c.state != JobState.CANCELLED)
        started = select(jobs.c.turn).where(jobs.c.started_at.is_not(None))
        begun = started.order_by(jobs.c.turn.desc()).limit(1)
        return 1 + max(connection.scalar(mine) or 0, connection.scalar(begun) or 0)

    def _same_request(self, connection: Connection, request_key: str, fresh: bool) -> Job | None:
        """Return the newest job of the same request that is live or whose result is still available."""
        states = LIVE if fresh else (*LIVE, JobState.SUCCEEDED, JobState.FAILED)
        for row in connection.execute(
            select(*JOB_COLUMNS)
            .where(jobs.c.request_key == request_key, jobs.c.state.in_(states))
            .order_by(jobs.c.number.desc())
            .limit(5)
        ):
            job = job_from(row)
            match job.state:
                case JobState.SUCCEEDED:
                    with suppress(NotFound):  # its policy was deleted
                        if job.policy_id is not None:
                            get_row(connection, policies, job.policy_id)
                        return job
                case JobState.FAILED:
                    if json.loads(job.problem or "{}").get("type") in REUSED_FAILURES:
                        return job
                case _:
                    return job
        return None

    def abandon(self, id: str) -> None:
        """Stop waiting: the client went away. Cancel the job if nobody else waits and nobody got 202."""
        with self.database.write() as connection:
            connection.execute(update(jobs).where(jobs.c.id == id).values(waiters=jobs.c.waiters - 1))
            self._cancel(connection, id, jobs.c.accepted.is_(False), jobs.c.waiters <= 0)

    def end_waiter(self, id: str, *, accepted: bool = False) -> None:
        """Stop waiting: the request got its answer. After a 202 (`accepted`) the job needs no waiter."""
        with self.database.write() as connection:
            values: dict[str, Any] = {"accepted": True} if accepted else {}
            connection.execute(
                update(jobs).where(jobs.c.id == id).values(waiters=jobs.c.waiters - 1, **values)
            )

    def cancel(self, id: str) -> Job:
        """Cancel a live job and return it; return a final one as it is.

        Raises:
            NotFound: the job does not exist.
        """
        with self.database.write() as connection:
            self._cancel(connection, id)
            return get_job(connection, id)

    def _cancel(self, connection: Connection, id: str, *conditions: Any) -> None:
        cancelled = connection.execute(
            update(jobs)
            .values(state=JobState.CANCELLED, finished_at=now())
            .where(jobs.c.id == id, jobs.c.state.in_(LIVE), *conditions)
            .returning(jobs.c.queue_id)
        ).one_or_none()
        if cancelled is not None:
            add_event(connection, id, "state", {"state": JobState.CANCELLED})
            self.queue.cancel(connection, cancelled.queue_id)
