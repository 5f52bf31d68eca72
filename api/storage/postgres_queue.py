"""The queue of PostgreSQL: procrastinate, in the same database. See NOTE [ Deliveries ] in job_queue.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from procrastinate import App, SyncPsycopgConnector
from procrastinate.exceptions import AlreadyEnqueued, ConnectorException
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError, OperationalError

QUEUE = "autoac-jobs"
TASK = "autoac.run_job"


class PostgresQueue:
    """Add entries to procrastinate's queue and cancel them, on the connections of our own transactions."""

    def __init__(self) -> None:
        self._app = App(connector=SyncPsycopgConnector())  # never opened: each call brings its connection

    def add(self, connection: Connection, job_id: str, turn: int) -> int:
        """Add an entry that delivers the job; at most one entry of a job waits at any time."""
        entry = self._app.configure_task(
            TASK,
            queue=QUEUE,
            queueing_lock=job_id,
            priority=-turn,
            connection=_driver_connection(connection),
        )
        with _database_errors():
            return entry.defer(job_id=job_id)

    def cancel(self, connection: Connection, queue_id: int | None) -> None:
        """Delete a waiting entry, or have procrastinate stop the worker that runs it."""
        if queue_id is not None:
            with _database_errors():
                self._app.job_manager.cancel_job_by_id(
                    queue_id, abort=True, delete_job=True, connection=_driver_connection(connection)
                )

    def worker_count(self, connection: Connection, lease_s: float) -> int:
        """Count the workers with a recent heartbeat; procrastinate has no function for it."""
        fresh = text(
            "SELECT count(*) FROM procrastinate_workers "
            "WHERE last_heartbeat > now() - make_interval(secs => :lease_s)"
        )
        return int(connection.scalar(fresh, {"lease_s": lease_s}) or 0)


def _driver_connection(connection: Connection) -> Any:
    """Return psycopg's connection under SQLAlchemy's, in the same transaction."""
    return connection.connection.driver_connection


@contextmanager
def _database_errors() -> Iterator[None]:
    """Raise procrastinate's database errors as SQLAlchemy's, which the callers expect."""
    try:
        yield
    except AlreadyEnqueued as error:
        raise IntegrityError("procrastinate", None, error) from error
    except ConnectorException as error:
        raise OperationalError("procrastinate", None, error.__cause__ or error) from error
