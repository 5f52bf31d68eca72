"""A worker: solves jobs from PostgreSQL, on as many machines as wanted. `autoac worker` runs one."""

from __future__ import annotations

import signal
from contextlib import suppress
from http.server import ThreadingHTTPServer
from typing import Any

import anyio
import procrastinate
import psycopg
import structlog
from anyio import to_thread
from prometheus_client import start_http_server

from autoac.api.errors import NotFound
from autoac.api.settings import InvalidSettings, Settings
from autoac.api.solving.child_process import Solver, SpawnedSolver
from autoac.api.solving.job_runner import AGAIN_S, Runner
from autoac.api.solving.queue import QUEUE, TASK, enqueue_with, nudge, waiting_nudges
from autoac.api.storage.database import AWAY, Database, DatabaseNotReady, cause_of
from autoac.api.storage.job_store import Jobs, State
from autoac.api.telemetry.metrics import Metrics

log = structlog.get_logger("autoac.worker")

BUSY_S = 2.0  # until a job is looked at again whose key has as many running as it may
REMIND_S = 30.0  # a job that is queued for so long may have lost its nudge
QUEUE_AWAY = (
    procrastinate.exceptions.ConnectorException,
    procrastinate.exceptions.AppNotOpen,
    psycopg.Error,
)


class Worker:
    """Takes nudges from procrastinate and runs the jobs that they name."""

    def __init__(self, settings: Settings, solver: Solver | None = None) -> None:
        """Raises: InvalidSettings: the database is not PostgreSQL."""
        self.settings = settings
        self.database = Database(settings.url)
        if self.database.is_sqlite:
            raise InvalidSettings(
                "AUTOAC_DATABASE_URL: workers need PostgreSQL; with SQLite `autoac serve` solves by itself"
            )
        self.jobs = Jobs(self.database, settings, enqueue_with(self.database, settings))
        solver = solver or SpawnedSolver(
            settings.solve_time_limit_s, settings.solve_grace_s, settings.solve_memory_bytes
        )
        self.metrics = Metrics()
        self.runner = Runner(settings, self.database, self.jobs, solver, self.metrics)

    def run(self) -> None:
        """Work until SIGTERM or SIGINT; what runs then is queued again.

        Raises:
            DatabaseNotReady: the tables are not those of this release.
        """
        served = self._serve_metrics()
        try:
            anyio.run(self._until_stopped)
        finally:
            if served is not None:
                served.shutdown()
            with suppress(*AWAY):
                self.runner.gone()
            self.database.close()

    async def _until_stopped(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._stop_on_signal, group.cancel_scope)
            await self._until_ready()
            log.info("working", name=self.runner.name, at_once=self.settings.solves_at_once)
            group.start_soon(self.runner.watch)
            group.start_soon(self._remind)
            await self._work()

    async def _stop_on_signal(self, scope: anyio.CancelScope) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("stopping", signal=signal.Signals(number).name)
                scope.cancel()
                return

    async def _until_ready(self) -> None:
        """Wait for the database; its tables are waited for too, since something may be upgrading them."""
        said = False
        while True:
            try:
                await to_thread.run_sync(self.database.check)
                return
            except (DatabaseNotReady, *AWAY) as error:
                if not said:
                    log.warning("waiting for the database", cause=cause_of(error))
                said = True
                await anyio.sleep(AGAIN_S)

    async def _work(self) -> None:
        """Listen to the queue; begin again whenever the database went away, where procrastinate would end."""
        while True:
            app = procrastinate.App(
                connector=procrastinate.PsycopgConnector(
                    conninfo=self.database.url.set(drivername="postgresql").render_as_string(
                        hide_password=False
                    ),
                    # One connection listens, one renews the worker's heartbeat, one fetches and finishes.
                    min_size=1,
                    max_size=4,
                )
            )
            app.task(name=TASK, queue=QUEUE)(self._nudged)
            try:
                async with app.open_async():
                    await app.run_worker_async(
                        queues=[QUEUE],
                        concurrency=self.settings.solves_at_once,
                        install_signal_handlers=False,
                        fetch_job_polling_interval=2.0,
                        delete_jobs="always",
                        shutdown_graceful_timeout=0,
                    )
            except QUEUE_AWAY as error:
                log.warning("the queue is away; trying again", why=type(error).__name__)
            except ExceptionGroup as errors:
                if errors.split(QUEUE_AWAY)[1] is not None:
                    raise
                log.warning("the queue is away; trying again", why="several errors")
            await anyio.sleep(AGAIN_S)

    async def _nudged(self, id: str) -> None:
        """Run the job that a nudge names, if it is still there to be run."""
        try:
            if not await self.runner.run_one(id):
                await to_thread.run_sync(self._later, id)
        except AWAY as error:
            log.warning(
                "the database is away", job=id, cause=cause_of(error)
            )  # the lease, or `_remind`, brings it back

    def _later(self, id: str) -> None:
        """A queued job that could not be claimed waits for others of its key: look at it again."""
        try:
            state = self.jobs.get(id).state
        except NotFound:  # pruned
            return
        if state is State.QUEUED:
            with self.database.write() as connection:
                nudge(connection, id, BUSY_S)

    async def _remind(self) -> None:
        """Nudge about jobs that were queued long ago: see NOTE [ Two queues ]."""
        while True:
            await anyio.sleep(REMIND_S)
            with suppress(*AWAY):
                await to_thread.run_sync(self._renudge)

    def _renudge(self) -> None:
        with self.database.write() as connection:
            self.database.lock(connection, "remind")
            nudged = waiting_nudges(connection)
            for id in self.jobs.forgotten(REMIND_S):
                if id not in nudged:
                    nudge(connection, id)

    def _serve_metrics(self) -> ThreadingHTTPServer | None:
        if self.settings.worker_port is None:
            return None
        served: Any = start_http_server(
            self.settings.worker_port, addr=self.settings.host, registry=self.metrics.registry
        )
        server: ThreadingHTTPServer = served[0]
        log.info("metrics", port=server.server_port)
        return server
