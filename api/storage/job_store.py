"""Jobs: solves that somebody asked for, and what becomes of them.

    queued --claim--> running --finish--> succeeded | failed
      ^                 |
      +---- requeue ----+          queued | running --cancel--> cancelled

NOTE [ Once in effect ]

A job may be run twice: a runner that was thought dead may come back. It is finished once: claim, finish,
requeue and cancel are each one UPDATE that names the state, and for a running job also the attempt, that it
expects; whoever comes second changes no row and learns so. A runner holds a lease that it renews while it
works. Where a renewal changes no row the job is no longer its own (cancelled, or given to somebody else), and
it kills its child. So cancelling is nothing but a change of state, from whichever machine.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import zstandard
from sqlalchemy import Connection, Row, and_, case, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoac.api.errors import Busy, InUse, JobCancelled, JobFailed, NotFound, TooManyJobs
from autoac.api.problems import URN
from autoac.api.requests import Answer, Kind, Taken
from autoac.api.settings import Settings
from autoac.api.storage.database import Database, now
from autoac.api.storage.plot_cache import keep_drawing
from autoac.api.storage.registry import add_policy, add_profile, options_of, read_policy
from autoac.api.storage.tables import job_events, jobs, profiles

RETRY_AFTER_S = 5
REUSED_FAILURES = tuple(
    URN + slug
    for slug in ("infeasible-budget", "infeasible-constraints", "invalid-budget", "invalid-constraints")
)
"""What the planner says again whenever it is asked again. Other failures are tried anew."""


class State(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether nothing more happens to the job."""
        return self not in LIVE


LIVE = (State.QUEUED, State.RUNNING)


@dataclass(frozen=True, slots=True)
class Job:
    """A row of the table, without its result. Times are seconds since 1970."""

    number: int
    id: str
    kind: Kind
    profile_digest: str
    options: dict[str, Any]
    owner: str
    state: State
    accepted: bool
    attempt: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    runner: str | None
    policy_id: str | None
    problem: str | None

    @property
    def final(self) -> bool:
        return self.state.final


_COLUMNS = tuple(jobs.c[name] for name in Job.__slots__)


def _job(row: Row[Any]) -> Job:
    said = row._asdict()
    said |= {"kind": Kind(row.kind), "state": State(row.state), "options": json.loads(row.options)}
    return Job(**said)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job: a new state, or progress."""

    number: int
    at: float
    kind: str  # "state", "progress"
    data: str  # JSON


class Jobs:
    """The jobs of a database."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        enqueued: Callable[[Connection, str], None] = lambda connection, id: None,
    ) -> None:
        """Args: `enqueued` is told of each job that is to be run, inside the transaction that says so."""
        self.database, self.settings, self._enqueued = database, settings, enqueued

    # --- asked for ------------------------------------------------------------------------------------

    def submit(self, taken: Taken, owner: str, *, fresh: bool = False) -> tuple[Job, bool]:
        """A job for a request, and whether it was there already. The caller waits for it: see `leave`.

        Args:
            taken: what is asked for.
            owner: who asks; its limits count.
            fresh: solve it, although there may be a result.

        Raises:
            NotFound: there is no such profile.
            TooManyJobs: the owner has as many in the queue as it may. Busy: all together have.
        """
        for _ in range(10):
            try:
                with self.database.write() as connection:
                    return self._submit(connection, taken, owner, fresh)
            except IntegrityError:
                continue  # somebody stored the same profile, or asked for the same, between two statements
        raise Busy(RETRY_AFTER_S)

    def _submit(self, connection: Connection, taken: Taken, owner: str, fresh: bool) -> tuple[Job, bool]:
        found = self._alike(connection, taken.request_key, fresh)
        if found is not None:
            connection.execute(
                update(jobs).where(jobs.c.number == found.number).values(waiters=jobs.c.waiters + 1)
            )
            return found, True
        self.database.lock(connection, "queue")
        of_mine = func.coalesce(func.sum(case((jobs.c.owner == owner, 1), else_=0)), 0)
        total, mine = connection.execute(
            select(func.count(), of_mine).where(jobs.c.state == State.QUEUED)
        ).one()
        if mine >= self.settings.key_queued:
            raise TooManyJobs(self.settings.key_queued, RETRY_AFTER_S)
        if total >= self.settings.queue_most:
            raise Busy(RETRY_AFTER_S)
        if taken.profile is not None:
            add_profile(connection, taken.profile, owner)
        elif not connection.scalar(
            select(func.count()).select_from(profiles).where(profiles.c.digest == taken.profile_digest)
        ):
            raise NotFound(
                f"no profile {taken.profile_digest}; PUT it to /v1/profiles/{taken.profile_digest}"
            )
        id = secrets.token_hex(16)
        connection.execute(
            insert(jobs).values(
                id=id,
                kind=taken.kind.value,
                request_key=taken.request_key,
                profile_digest=taken.profile_digest,
                options=json.dumps(taken.options, sort_keys=True),
                owner=owner,
                state=State.QUEUED,
                accepted=False,
                waiters=1,
                attempt=0,
                created_at=now(),
            )
        )
        self._say(connection, id, "state", {"state": State.QUEUED})
        self._enqueued(connection, id)
        return _get(connection, id), False

    def _alike(self, connection: Connection, request_key: str, fresh: bool) -> Job | None:
        """The newest job of the same request that is live, or whose result can be had again."""
        for row in connection.execute(
            select(*_COLUMNS)
            .where(
                jobs.c.request_key == request_key,
                jobs.c.state.in_(LIVE if fresh else (*LIVE, State.SUCCEEDED, State.FAILED)),
            )
            .order_by(jobs.c.number.desc())
            .limit(5)
        ):
            job = _job(row)
            match job.state:
                case State.SUCCEEDED:
                    if job.policy_id is None or read_policy(connection, job.policy_id) is not None:
                        return job
                case State.FAILED:
                    if json.loads(job.problem or "{}").get("type") in REUSED_FAILURES:
                        return job
                case _:
                    return job
        return None

    def accept(self, id: str) -> None:
        """Somebody is told 202: the job goes on without them."""
        with self.database.write() as connection:
            connection.execute(
                update(jobs).where(jobs.c.id == id).values(accepted=True, waiters=jobs.c.waiters - 1)
            )

    def leave(self, id: str) -> None:
        """A request waits no longer. A job that nobody waits for, and nobody was promised, is cancelled."""
        with self.database.write() as connection:
            connection.execute(update(jobs).where(jobs.c.id == id).values(waiters=jobs.c.waiters - 1))
            done = connection.execute(
                _ended(State.CANCELLED).where(
                    jobs.c.id == id,
                    jobs.c.state.in_(LIVE),
                    jobs.c.accepted.is_(False),
                    jobs.c.waiters <= 0,
                )
            )
            if done.rowcount:
                self._say(connection, id, "state", {"state": State.CANCELLED})

    def answered(self, id: str) -> None:
        """A request has its answer."""
        with self.database.write() as connection:
            connection.execute(update(jobs).where(jobs.c.id == id).values(waiters=jobs.c.waiters - 1))

    def cancel(self, id: str) -> Job:
        """Cancel a live job; what is final stays as it is.

        Raises:
            NotFound: there is no such job.
        """
        with self.database.write() as connection:
            done = connection.execute(_ended(State.CANCELLED).where(jobs.c.id == id, jobs.c.state.in_(LIVE)))
            if done.rowcount:
                self._say(connection, id, "state", {"state": State.CANCELLED})
            return _get(connection, id)

    # --- looked at ------------------------------------------------------------------------------------

    def get(self, id: str) -> Job:
        """Raises: NotFound: there is no such job."""
        with self.database.read() as connection:
            return _get(connection, id)

    def result(self, job: Job) -> bytes:
        """The JSON that a finished job gave.

        Raises:
            JobFailed, JobCancelled: it gave none.
            NotFound: its policy was deleted.
        """
        match job.state:
            case State.CANCELLED:
                raise JobCancelled(f"job {job.id} was cancelled; ask again to start another")
            case State.FAILED:
                assert job.problem is not None
                raise JobFailed(job.problem, int(json.loads(job.problem)["status"]))
        with self.database.read() as connection:
            if job.policy_id is not None:
                found = read_policy(connection, job.policy_id)
                if found is None:
                    raise NotFound(f"the policy of job {job.id} was deleted; ask again to plan it anew")
                return found.text
            content = connection.scalar(select(jobs.c.result).where(jobs.c.id == job.id))
        assert content is not None
        return zstandard.decompress(content)

    def drawing(self, id: str) -> bytes:
        """Return the data that a page draws of a finished frontier, as `drawing.outline` gives it.

        Raises:
            NotFound: there is no such job, or it has no drawing.
        """
        with self.database.read() as connection:
            found: bytes | None = connection.scalar(select(jobs.c.drawing).where(jobs.c.id == id))
        if found is None:
            raise NotFound(f"no drawing of job {id}: only frontiers have one, where AUTOAC_DRAW_AHEAD is set")
        return found

    def events(self, id: str, after: int = 0, limit: int = 500) -> list[Event]:
        """What happened to a job after the event `after`, in order."""
        with self.database.read() as connection:
            rows = connection.execute(
                select(job_events.c.number, job_events.c.at, job_events.c.kind, job_events.c.data)
                .where(job_events.c.job_id == id, job_events.c.number > after)
                .order_by(job_events.c.number)
                .limit(limit)
            )
            return [Event(*row) for row in rows]

    def progress(self, id: str) -> dict[str, Any] | None:
        """The last progress of a job; none where it told none."""
        with self.database.read() as connection:
            data = connection.scalar(
                select(job_events.c.data)
                .where(job_events.c.job_id == id, job_events.c.kind == "progress")
                .order_by(job_events.c.number.desc())
                .limit(1)
            )
        return None if data is None else dict(json.loads(data))

    def page(
        self,
        *,
        state: State | None = None,
        kind: Kind | None = None,
        profile: str | None = None,
        before: int | None = None,
        limit: int,
    ) -> list[Job]:
        """Jobs, newest first, those before the number `before`."""
        query = select(*_COLUMNS).order_by(jobs.c.number.desc()).limit(limit)
        if state is not None:
            query = query.where(jobs.c.state == state)
        if kind is not None:
            query = query.where(jobs.c.kind == kind)
        if profile is not None:
            query = query.where(jobs.c.profile_digest == profile)
        if before is not None:
            query = query.where(jobs.c.number < before)
        with self.database.read() as connection:
            return [_job(row) for row in connection.execute(query)]

    def depth(self) -> dict[str, int]:
        """How many jobs are in each state."""
        with self.database.read() as connection:
            counted = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state)).all()
        return {state.value: 0 for state in State} | {row[0]: row[1] for row in counted}

    # --- run ------------------------------------------------------------------------------------------

    def claim(self, runner: str, id: str | None = None) -> Job | None:
        """A queued job to run, the oldest or the one named, with a lease on it. None if there is none."""
        with self.database.write() as connection:
            self.database.lock(connection, "claim")  # counts running jobs before it writes
            busy = (
                select(jobs.c.owner)
                .where(jobs.c.state == State.RUNNING)
                .group_by(jobs.c.owner)
                .having(func.count() >= self.settings.key_running)
            )
            query = select(jobs.c.id).where(jobs.c.state == State.QUEUED, jobs.c.owner.not_in(busy))
            if id is not None:
                query = query.where(jobs.c.id == id)
            found = connection.scalar(query.order_by(jobs.c.number).limit(1))
            if found is None:
                return None
            done = connection.execute(
                update(jobs)
                .where(jobs.c.id == found, jobs.c.state == State.QUEUED)
                .values(
                    state=State.RUNNING,
                    attempt=jobs.c.attempt + 1,
                    started_at=now(),
                    runner=runner,
                    lease_until=now() + self.settings.lease_s,
                )
            )
            if not done.rowcount:
                return None  # cancelled in between
            job = _get(connection, found)
            self._say(connection, found, "state", {"state": State.RUNNING, "attempt": job.attempt})
            return job

    def body(self, job: Job) -> bytes:
        """The text of the job's profile."""
        with self.database.read() as connection:
            content = connection.scalar(
                select(profiles.c.content).where(profiles.c.digest == job.profile_digest)
            )
        assert content is not None  # a foreign key holds it
        return zstandard.decompress(content)

    def renew(self, job: Job, progress: Sequence[dict[str, Any]] = ()) -> bool:
        """Keep the lease of a running job and note its progress; False: it is not this runner's any more."""
        with self.database.write() as connection:
            done = connection.execute(
                update(jobs).where(_held(job)).values(lease_until=now() + self.settings.lease_s)
            )
            for piece in progress if done.rowcount else ():
                self._say(connection, job.id, "progress", piece)
            return bool(done.rowcount)

    def succeed(self, job: Job, result: Answer, progress: Sequence[dict[str, Any]] = ()) -> bool:
        """Finish a running job with its result; False, and nothing is stored, if it is no longer held."""
        with self.database.write() as connection:
            done = connection.execute(_ended(State.SUCCEEDED).where(_held(job)))
            if not done.rowcount:
                return False
            if job.kind is Kind.POLICY:
                id = add_policy(connection, result.text, job.owner, options_of(job.options))
                if result.drawing is not None:
                    keep_drawing(connection, id, result.drawing, self.settings.keep_drawings_bytes)
                made: dict[str, Any] = {"policy_id": id}
            else:
                made = {"result": zstandard.compress(result.text.encode()), "drawing": result.drawing}
            connection.execute(update(jobs).where(jobs.c.id == job.id).values(**made))
            for piece in progress:
                self._say(connection, job.id, "progress", piece)
            self._say(connection, job.id, "state", {"state": State.SUCCEEDED})
            return True

    def fail(self, job: Job, problem: str) -> bool:
        """Finish a running job with a problem document; False if it is no longer held."""
        with self.database.write() as connection:
            done = connection.execute(_ended(State.FAILED, problem=problem).where(_held(job)))
            if done.rowcount:
                self._say(connection, job.id, "state", {"state": State.FAILED})
            return bool(done.rowcount)

    def requeue(self, job: Job) -> bool:
        """Give a running job back, since this runner stops. It does not count as an attempt."""
        with self.database.write() as connection:
            back = _queued().values(attempt=jobs.c.attempt - 1)
            done = connection.execute(back.where(_held(job)))
            if done.rowcount:
                self._say(connection, job.id, "state", {"state": State.QUEUED, "why": "its runner stopped"})
                self._enqueued(connection, job.id)
            return bool(done.rowcount)

    def rescue(self, problem: str) -> int:
        """Queue again what runs under a lease that is over; fail, with `problem`, what was begun too often.

        Returns:
            How many jobs it found.
        """
        expired = and_(jobs.c.state == State.RUNNING, jobs.c.lease_until < now())
        with self.database.write() as connection:
            found = connection.execute(select(jobs.c.id, jobs.c.attempt).where(expired)).all()
            rescued = 0
            for id, attempt in found:
                again = attempt < self.settings.attempts
                change = _queued() if again else _ended(State.FAILED, problem=problem)
                done = connection.execute(change.where(jobs.c.id == id, jobs.c.attempt == attempt, expired))
                if not done.rowcount:
                    continue
                rescued += 1
                state = State.QUEUED if again else State.FAILED
                self._say(connection, id, "state", {"state": state, "why": "its runner went away"})
                if again:
                    self._enqueued(connection, id)
            return rescued

    def forgotten(self, seconds: float) -> list[str]:
        """Ids of jobs that have been queued for longer than that, oldest first."""
        with self.database.read() as connection:
            return list(
                connection.scalars(
                    select(jobs.c.id)
                    .where(jobs.c.state == State.QUEUED, jobs.c.created_at < now() - seconds)
                    .order_by(jobs.c.number)
                    .limit(100)
                )
            )

    def prune(self, days: float) -> int:
        """Forget final jobs that ended so many days ago."""
        old = and_(jobs.c.state.not_in(LIVE), jobs.c.finished_at < now() - days * 86_400)
        with self.database.write() as connection:
            ids = select(jobs.c.id).where(old)
            connection.execute(delete(job_events).where(job_events.c.job_id.in_(ids)))
            return connection.execute(delete(jobs).where(old)).rowcount

    def _say(self, connection: Connection, id: str, kind: str, data: dict[str, Any]) -> None:
        connection.execute(insert(job_events).values(job_id=id, at=now(), kind=kind, data=json.dumps(data)))


def delete_profile(connection: Connection, digest: str) -> None:
    """Forget a profile and its jobs. Its policies stay.

    Raises:
        NotFound: there is none.
        InUse: a job that is queued or running needs it.
    """
    of_it = jobs.c.profile_digest == digest
    if connection.scalar(select(func.count()).select_from(jobs).where(of_it, jobs.c.state.in_(LIVE))):
        raise InUse(f"a job that is not finished needs profile {digest}; cancel it first")
    ids = select(jobs.c.id).where(of_it)
    connection.execute(delete(job_events).where(job_events.c.job_id.in_(ids)))
    connection.execute(delete(jobs).where(of_it))
    if not connection.execute(delete(profiles).where(profiles.c.digest == digest)).rowcount:
        raise NotFound(f"no profile {digest}")


def _get(connection: Connection, id: str) -> Job:
    row = connection.execute(select(*_COLUMNS).where(jobs.c.id == id)).one_or_none()
    if row is None:
        raise NotFound("no such job")
    return _job(row)


def _held(job: Job) -> Any:
    """That a job still runs, and in the attempt that its runner began."""
    return and_(jobs.c.id == job.id, jobs.c.state == State.RUNNING, jobs.c.attempt == job.attempt)


def _ended(state: State, **values: Any) -> Any:
    return update(jobs).values(state=state, finished_at=now(), lease_until=None, **values)


def _queued() -> Any:
    return update(jobs).values(state=State.QUEUED, runner=None, lease_until=None)
