"""Keep profiles, policies, jobs and keys in SQLite or PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoac.api.storage.database import Database
    from autoac.api.storage.job_queue import JobQueue


def queue_of(database: Database) -> JobQueue:
    """Return the queue of a database; only the one of PostgreSQL imports procrastinate."""
    if database.is_sqlite:
        from autoac.api.storage.job_queue import TableQueue

        return TableQueue()
    from autoac.api.storage.postgres_queue import PostgresQueue

    return PostgresQueue()
