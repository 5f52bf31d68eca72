"""The queue that hands jobs to runners.

NOTE [ Deliveries ]

On PostgreSQL procrastinate is the queue: it claims, watches heartbeats, retries and cancels. An entry of its
table delivers one of our jobs, and the job's row names that entry as `queue_id`. Three rules hold:

1. A row and its entry change in one transaction: `add` and `cancel` run on the connection of the row.
2. A worker may start only the job whose `queue_id` is the worker's own entry. When a worker dies, its job
   gets a new entry before the old one is deleted. A worker that was only slow can delete only the old one.
3. A job ends once: see NOTE [ Once in effect ] in job_runs.py.

On SQLite the service's own process is the only runner, the table of jobs is the queue, and `queue_id` is
null.
"""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import Connection


class JobQueue(Protocol):
    """Deliver queued jobs to runners, within the transactions that change their rows."""

    def add(self, connection: Connection, job_id: str, turn: int) -> int | None:
        """Have a runner start the job once the transaction is committed; return its `queue_id`.

        Jobs of a lower `turn` start first.
        """
        ...

    def cancel(self, connection: Connection, queue_id: int | None) -> None:
        """Withdraw a delivery, or stop the worker that runs it."""
        ...

    def worker_count(self, connection: Connection, lease_s: float) -> int:
        """Return the number of workers with a heartbeat in the last `lease_s` seconds."""
        ...


class TableQueue:
    """The queue of SQLite: the embedded runner claims rows and notices that a row was cancelled."""

    def add(self, connection: Connection, job_id: str, turn: int) -> None:
        """Do nothing: the row itself says that it is queued."""

    def cancel(self, connection: Connection, queue_id: int | None) -> None:
        """Do nothing: the row itself says that it is cancelled."""

    def worker_count(self, connection: Connection, lease_s: float) -> int:
        """Return 0: no other process runs jobs."""
        return 0
