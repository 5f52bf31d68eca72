"""`autoac worker`: a process that runs jobs from PostgreSQL, on as many machines as you like."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Thread

import anyio
import structlog
from prometheus_client import CollectorRegistry, MetricsHandler

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
        DatabaseNotReady: a newer release upgraded its tables.
    """
    with Database(settings.url) as database:
        if database.is_sqlite:
            raise InvalidSettings(
                "AUTOAC_DATABASE_URL: workers need PostgreSQL; with SQLite `autoac serve` solves by itself"
            )
        database.refuse_unknown()
        metrics = Metrics()
        runs = JobRuns(database, settings, PostgresQueue())
        runner = JobRunner(settings, runs, solver or SpawnedSolver.of(settings), metrics)
        worker = QueueWorker(database, runner)
        with _serve_health(settings, metrics, worker):
            anyio.run(_until_stopped, worker)


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


@contextmanager
def _serve_health(settings: Settings, metrics: Metrics, worker: QueueWorker) -> Iterator[None]:
    """Answer `/livez` and `/metrics` from a thread, so that a blocked event loop shows as well."""
    if settings.worker_port is None:
        yield
        return

    class Handler(MetricsHandler):
        registry: CollectorRegistry = metrics.registry

        def do_GET(self) -> None:
            """Answer `/livez` with 200, or with 503 if the worker is deaf; other paths with the metrics."""
            if self.path != "/livez":
                super().do_GET()
                return
            status, body = (503, b'{"status":"runner deaf"}') if worker.deaf else (200, b'{"status":"alive"}')
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        address_family = socket.getaddrinfo(settings.host, settings.worker_port)[0][0]
        daemon_threads = True

    with Server((settings.host, settings.worker_port), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        log.info("metrics", port=server.server_port)
        try:
            yield
        finally:
            server.shutdown()
