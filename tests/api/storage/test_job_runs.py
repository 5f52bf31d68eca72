"""Jobs as rows: claimed once, finished once, requeued, and delivered by procrastinate on PostgreSQL."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from service_app import BOTH, POSTGRES, Serve
from service_fakes import chain_profile, request, save_all
from sqlalchemy import text
from waiting import until

from autoac.api import Settings
from autoac.api.requests import Kind, parse_request
from autoac.api.storage import queue_of
from autoac.api.storage.database import Database
from autoac.api.storage.job_requests import JobRequests
from autoac.api.storage.job_runs import JobRuns, OwnerBusy
from autoac.api.storage.job_store import Job, JobState, JobStore, prune
from autoac.api.storage.tables import jobs
from autoac.planner.formats.profile import Profile


@dataclass(frozen=True)
class Table:
    """The jobs of a database: the side of the clients, that of the runners, and the rows."""

    database: Database
    requests: JobRequests
    runs: JobRuns
    store: JobStore

    @classmethod
    def of(cls, database: Database, **settings: Any) -> Table:
        made, queue = Settings(**{"attempts": 2} | settings), queue_of(database)
        return cls(
            database, JobRequests(database, made, queue), JobRuns(database, made, queue), JobStore(database)
        )

    def submit(self, profile: Profile, owner: str = "me", **options: Any) -> str:
        parsed = parse_request(Kind.POLICY, request(profile, **options), 60.0)
        return self.requests.submit(parsed, owner)[0].id

    def claim(self) -> Job | None:
        """Claim a job as the worker of this database does."""
        if self.database.is_sqlite:
            return self.runs.claim_next()
        live = [job for job in reversed(self.store.page({}, limit=10)) if job.state is JobState.QUEUED]
        for job in live:
            assert job.queue_id is not None
            try:
                claimed = self.runs.claim_delivered(job.id, job.queue_id)
            except OwnerBusy:
                continue
            self.set_running(job.queue_id)
            return claimed
        return None

    def claim_in_turn(self) -> str:
        """Claim the job that this database's queue gives first, and return its id."""
        if self.database.is_sqlite:
            job = self.runs.claim_next()
        else:
            fetch = text(
                "SELECT id, args->>'job_id' AS job FROM procrastinate_jobs WHERE status = 'todo' "
                "ORDER BY priority DESC, id LIMIT 1"  # as its function procrastinate_fetch_job
            )
            with self.database.read() as connection:
                entry = connection.execute(fetch).one()
            job = self.runs.claim_delivered(entry.job, entry.id)
            self.set_running(entry.id)
        return job.id

    def set_running(self, queue_id: int) -> None:
        """Change an entry as procrastinate's worker does when it fetches one."""
        change = text("UPDATE procrastinate_jobs SET status = 'doing' WHERE id = :id")
        with self.database.write() as connection:
            connection.execute(change, {"id": queue_id})

    def interrupt(self, id: str) -> bool:
        """Requeue a job as if its runner had died."""
        return self.runs.requeue_interrupted(id, self.store.get(id).queue_id)

    def states(self, id: str) -> list[str]:
        return [json.loads(event.data)["state"] for event in self.store.events(id)]


RESULT = save_all(chain_profile(), budget_gb=1).policy().to_json()


def test_job_is_claimed_once(database: Database, profile: Profile) -> None:
    """On PostgreSQL procrastinate sees to it: test_replicas.py."""
    table = Table.of(database)
    ids = {table.submit(profile, budget_gb=gb) for gb in (1, 2, 3)}
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda _: table.claim(), range(8)))
    assert {job.id for job in claimed if job is not None} == ids
    assert sum(job is not None for job in claimed) == 3


@BOTH
def test_job_is_finished_once(database: Database, profile: Profile) -> None:
    table = Table.of(database)
    id = table.submit(profile)
    first = table.claim()
    assert first is not None
    assert table.interrupt(id)
    second = table.claim()
    assert second is not None
    assert not table.runs.write_progress(first)
    assert not table.runs.write_progress(first, [{"gap": 1.0}])
    assert not table.runs.succeed(first, RESULT)
    assert not table.runs.fail(first, "{}")
    assert not table.runs.give_back(first)
    assert table.store.get(id).state is JobState.RUNNING
    assert table.store.progress(id) is None
    assert table.runs.succeed(second, RESULT)
    assert not table.runs.succeed(second, RESULT)
    assert table.states(id) == ["queued", "running", "queued", "running", "succeeded"]


@BOTH
def test_job_that_kills_its_runners_fails_after_its_attempts(database: Database, profile: Profile) -> None:
    table = Table.of(database)
    id = table.submit(profile)
    for _ in range(2):
        assert table.claim() is not None
        assert table.interrupt(id)
    assert table.store.get(id).state is JobState.FAILED
    assert "solver-died" in str(table.store.get(id).problem)
    assert table.claim() is None
    assert not table.interrupt(id)


@BOTH
def test_job_given_back_does_not_count_as_an_attempt(database: Database, profile: Profile) -> None:
    table = Table.of(database)
    table.submit(profile)
    for _ in range(5):
        job = table.claim()
        assert job.attempt == 1
        assert table.runs.give_back(job)


@BOTH
def test_key_has_a_limit_of_running_jobs(database: Database, profile: Profile) -> None:
    table = Table.of(database, key_running=1)
    mine = [table.submit(profile, "me", budget_gb=gb) for gb in (1, 2)]
    yours = table.submit(profile, "you", budget_gb=3)
    order = [table.claim(), table.claim(), table.claim()]
    assert [job and job.id for job in order] == [mine[0], yours, None]


@POSTGRES
def test_old_delivery_is_void_once_the_job_has_another(database: Database, profile: Profile) -> None:
    table = Table.of(database)
    id = table.submit(profile)
    old = table.store.get(id).queue_id
    assert old is not None
    assert table.runs.claim_delivered(id, old) is not None
    table.set_running(old)
    assert table.interrupt(id)
    new = table.store.get(id).queue_id
    assert new not in (None, old)
    assert table.runs.claim_delivered(id, old) is None
    assert not table.runs.requeue_interrupted(id, old)
    assert table.claim() is not None


@POSTGRES
def test_job_delivered_again_and_again_fails_after_its_attempts(database: Database, profile: Profile) -> None:
    table = Table.of(database)
    id = table.submit(profile)
    delivery = table.store.get(id).queue_id
    assert delivery is not None
    claimed = [table.runs.claim_delivered(id, delivery) for _ in range(3)]
    assert [job and job.attempt for job in claimed] == [1, 2, None]
    assert table.store.get(id).state is JobState.FAILED


@POSTGRES
def test_job_whose_queue_entry_is_gone_is_delivered_again(
    database: Database, serve: Serve, profile: Profile
) -> None:
    id = Table.of(database).submit(profile)
    with database.write() as connection:
        assert connection.execute(text("DELETE FROM procrastinate_jobs")).rowcount == 1
    http = serve()
    until(lambda: http.get(f"/v1/jobs/{id}").json()["state"] == "succeeded")


@POSTGRES
def test_cancelled_job_leaves_no_delivery(database: Database, profile: Profile) -> None:
    table = Table.of(database)
    table.requests.cancel(table.submit(profile))
    with database.read() as connection:
        assert connection.scalar(text("SELECT count(*) FROM procrastinate_jobs")) == 0


@BOTH
def test_what_is_old_and_not_needed_is_deleted(database: Database, profile: Profile) -> None:
    table = Table.of(database)
    done = table.submit(profile, budget_gb=1)
    job = table.claim()
    assert job is not None
    assert table.runs.succeed(job, RESULT)
    waits = table.submit(chain_profile(5, model="Other"), budget_gb=2)
    with database.write() as connection:
        connection.execute(jobs.update().values(created_at=0))  # a job's age counts from its end
    nothing = {"jobs": 0, "policies": 0, "profiles": 0}
    for days, deleted in ((1, nothing), (0, {"jobs": 1, "policies": 1, "profiles": 1}), (0, nothing)):
        with database.write() as connection:
            assert prune(connection, days) == deleted
    assert [job.id for job in table.store.page({}, limit=10)] == [waits] != [done]


@BOTH
def test_keys_take_turns(database: Database, profile: Profile) -> None:
    """As in NOTE [ Turns ]: who asks for much waits no longer than others make it, and they hardly wait."""
    table = Table.of(database)
    named = {table.submit(profile, "a", budget_gb=gb): f"a{gb}" for gb in (1, 2, 3, 4)}
    order = [table.claim_in_turn()]
    named |= {table.submit(profile, "b", budget_gb=10 + gb): f"b{gb}" for gb in (1, 2)}
    order += [table.claim_in_turn() for _ in range(4)]
    named[table.submit(profile, "b", budget_gb=13)] = "b3"  # b has no queued one, and still waits its turn
    order += [table.claim_in_turn() for _ in range(2)]
    assert [named[id] for id in order] == ["a1", "a2", "b1", "a3", "b2", "a4", "b3"]


@BOTH
def test_cancelled_jobs_cost_no_turn(database: Database, profile: Profile) -> None:
    table = Table.of(database)
    for gb in (1, 2, 3, 4):
        table.requests.cancel(table.submit(profile, "a", budget_gb=gb))
    first = table.submit(profile, "b", budget_gb=5)
    mine = table.submit(profile, "a", budget_gb=6)
    table.submit(profile, "b", budget_gb=7)
    assert [table.claim_in_turn(), table.claim_in_turn()] == [first, mine]


@POSTGRES
def test_claims_count_running_jobs_one_at_a_time(database: Database) -> None:
    free = text("SELECT pg_try_advisory_xact_lock(hashtextextended('autoac claim', 0))")
    with database.write() as connection, database.read() as other:
        Table.of(database).runs._busy_owners(connection)
        assert not other.scalar(free)
