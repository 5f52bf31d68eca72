"""`autoac worker`: a process that runs jobs from PostgreSQL, on as many machines as you like."""

from __future__ import annotations

import signal
from http.server import ThreadingHTTPServer
from typing import Any

import anyio
import structlog
from prometheus_client import start_http_server

from autoac.api.settings import InvalidSettings, Settings
from autoac.api.solving.child_process import Solver, SpawnedSolver
from autoac.api.solving.job_runner import JobRunner
from autoac.api.solving.queue_worker import QueueWorker
from autoac.api.storage.database import Database
from autoac.api.storage.job_runs import JobRuns
from autoac.api.storage.postgres_queue import PostgresQueue
from autoac.api.telemetry.metrics import Metrics

log = structlog.get_logger("autoac.worker")


def run_worker(settings: Settings, solver: Solver | None = None) -> None:
    """Run jobs until SIGTERM or SIGINT, and then give the unfinished ones back.

    Raises:
        InvalidSettings: the database is not PostgreSQL.
    """
    with Database(settings.url) as database:
        if database.is_sqlite:
            raise InvalidSettings(
                "AUTOAC_DATABASE_URL: workers need PostgreSQL; with SQLite `autoac serve` solves by itself"
            )
        metrics = Metrics()
        runs = JobRuns(database, settings, PostgresQueue())
        runner = JobRunner(settings, runs, solver or SpawnedSolver.of(settings), metrics)
        server = _serve_metrics(settings, metrics)
        try:
            anyio.run(_until_stopped, QueueWorker(database, runner))
        finally:
            if server is not None:
                server.shutdown()


async def _until_stopped(worker: QueueWorker) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_on_signal, group.cancel_scope)
        await worker.serve()


async def _stop_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("stopping", signal=signal.Signals(number).name)
            scope.cancel()
            return


def _serve_metrics(settings: Settings, metrics: Metrics) -> ThreadingHTTPServer | None:
    if settings.worker_port is None:
        return None
    served: Any = start_http_server(settings.worker_port, addr=settings.host, registry=metrics.registry)
    server: ThreadingHTTPServer = served[0]
    log.info("metrics", port=server.server_port)
    return server
