"""Solve requests in child processes, and run the jobs that do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autoac.api.solving.job_runner import JobRunner
    from autoac.api.storage.database import Database


class EmbeddedWorker(Protocol):
    """Run jobs inside the process of the service."""

    def wake(self) -> None:
        """Look for jobs now."""
        ...

    @property
    def deaf(self) -> bool:
        """Return True if no job can reach the worker any more, so that only a restart helps."""
        ...

    async def serve(self) -> None:
        """Run jobs until cancelled, and then give the unfinished ones back."""
        ...


def embedded_worker(database: Database, runner: JobRunner) -> EmbeddedWorker:
    """Return the worker for this kind of database; only the one of PostgreSQL imports procrastinate."""
    if database.is_sqlite:
        from autoac.api.solving.table_worker import TableWorker

        return TableWorker(runner)
    from autoac.api.solving.queue_worker import QueueWorker

    return QueueWorker(database, runner)
