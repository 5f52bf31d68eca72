"""Where jobs are handed to workers: procrastinate, on the same PostgreSQL.

NOTE [ Two queues ]

Our table of jobs is what counts. A row of procrastinate is a nudge, written in the same transaction: "job ID
may be claimed". A nudge that is lost, comes twice or comes late does no harm, for a worker claims by a
compare-and-set, and `Worker.remind` nudges again about jobs that have been queued for long. So nothing rests
on procrastinate's own states: a job of a killed worker stays "doing" there for ever (it does not rescue them
by itself), while our lease ends and the job is queued again.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from sqlalchemy import Connection, text

from autoac.api.settings import Settings
from autoac.api.storage.database import Database

QUEUE = "autoac"
TASK = "autoac.solve"

_DEFER = text(
    "SELECT procrastinate_defer_jobs_v1(ARRAY[ROW(:queue, :task, 0, NULL, NULL, CAST(:args AS jsonb), "
    "now() + make_interval(secs => :delay))]::procrastinate_job_to_defer_v1[])"
)


def nudge(connection: Connection, id: str, delay_s: float = 0.0) -> None:
    """Have a worker look at a job, in `delay_s` seconds."""
    connection.execute(
        _DEFER, {"queue": QUEUE, "task": TASK, "args": json.dumps({"id": id}), "delay": delay_s}
    )


def waiting_nudges(connection: Connection) -> set[str]:
    """Ids of the jobs about which a worker is to be nudged."""
    rows = text("SELECT args->>'id' FROM procrastinate_jobs WHERE status = 'todo' AND task_name = :task")
    return set(connection.scalars(rows, {"task": TASK}))


def enqueue_with(database: Database, settings: Settings) -> Callable[[Connection, str], None]:
    """Who is told of jobs that are to be run: workers. An embedded runner looks itself."""
    if database.is_sqlite or settings.runs_embedded:
        return lambda connection, id: None
    return nudge
